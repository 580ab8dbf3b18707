"""A run that has no memory left says in which phase, how much was foreseen, and what to change."""

from __future__ import annotations

import json
from itertools import count
from typing import Any

import pytest
import torch

from tests.e2e.workshop import Workshop

NO_MEMORY = "[enforce fail] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"


@pytest.mark.parametrize(
    ("place", "during", "keys"),
    [
        (
            "sft_toolkit.training.forward_paths.ForwardPaths.part_of_update",
            "computing the forward, behind step 0",
            [
                "training.per_device_train_batch_size: 1 instead of 2; with training.gradient_accumulation_steps: 2, "
                "and losses stay the same",
                "data.max_length: less than 64",
            ],
        ),
        ("torch.optim.AdamW.step", "making the optimizer step, behind step 0", ["training.per_device_train_batch"]),
        (
            "sft_toolkit.metering.accounting.EvalMeter.add",
            "evaluating, behind step 2",
            ["training.per_device_eval_batch_size: 4 instead of 8; the loss stays the same"],
        ),
        ("transformers.Trainer._save_optimizer_and_scheduler", "saving a checkpoint, behind step 2", ["training.save"]),
        ("sft_toolkit.assemble.build_model", "loading the model", ["model.quantize"]),
    ],
)
def test_phase(workshop: Workshop, monkeypatch: pytest.MonkeyPatch, place: str, during: str, keys: list[str]) -> None:
    def exhausted(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError(NO_MEMORY)

    monkeypatch.setattr(place, exhausted)
    outcome = workshop.run("train")
    assert outcome.code == 1
    assert f"error: out of memory while {during}: RuntimeError: {NO_MEMORY}\n" in outcome.err
    assert "  measured   " in outcome.err
    assert "Traceback" not in outcome.err
    shown = outcome.err.rpartition("What helps most, the first first:")[2]
    for key in keys:
        assert f"  {key}" in shown
    assert NO_MEMORY in (workshop.out / "error.txt").read_text()
    if "step" in during:
        assert "  predicted  " in outcome.err
        record = json.loads((workshop.out / "run.json").read_text())
        assert record["exit_state"] == "failed"
        assert record["error"].startswith(f"OutOfMemoryError: out of memory while {during}")


def test_what_was_learned_until_then_is_saved(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    workshop.config["training"] |= {"eval_strategy": "no", "save_steps": 100}
    whole, calls = torch.Tensor.backward, count(1)

    def third_fails(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise MemoryError
        return whole(*args, **kwargs)

    monkeypatch.setattr("torch.Tensor.backward", third_fails)
    outcome = workshop.run("train")
    assert (outcome.code, (workshop.out / "checkpoint-2" / "COMPLETE").exists()) == (1, True)
    assert "out of memory while computing the backward, behind step 2: MemoryError\n" in outcome.err
