"""A checkpoint of two ranks goes on with one, with the losses of the run that was never stopped; or is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import build_operators, run_ranks
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2-offload": {"zero_stage": 2, "offload_optimizer": True},
    "zero3": {"zero_stage": 3},
    "zero3-adapter": {"zero_stage": 3, "adapter": True},
}
BATCH = {"global_batch_size": 4}


def test_one_rank_goes_on_where_two_stopped(tmp_path: Path) -> None:
    build_operators()
    model = tmp_path / "model"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    worker = "tests.distributed.world_worker:train_all"
    of_two = [{"output_dir": str(tmp_path / name), **BATCH, **case} for name, case in CASES.items()]
    first, _ = run_ranks(worker, {"model_dir": str(model), "runs": of_two}, timeout=180)
    whole = dict(zip(CASES, first, strict=True))

    resume = {name: {"resume": str(tmp_path / name / "checkpoint-2")} for name in CASES}
    of_one = [
        {"output_dir": str(tmp_path / f"{name}-one"), **BATCH, **case, **resume[name]} for name, case in CASES.items()
    ]
    refused = [
        {"output_dir": str(tmp_path / "other"), "zero_stage": 3, "global_batch_size": 2, **resume["zero3"]},
        {"output_dir": str(tmp_path / "other"), **BATCH, **resume["zero3-adapter"], "adapter": True},
    ]
    (found,) = run_ranks(worker, {"model_dir": str(model), "runs": [*of_one, *refused]}, processes=1, timeout=240)
    for name, losses in zip(CASES, found, strict=False):
        assert len(whole[name]) == 4
        assert losses == pytest.approx(whole[name], abs=2e-6), name  # the first two are the checkpoint's own history
    other_batch, other_strategy = found[len(CASES) :]
    checkpoint = tmp_path / "zero3" / "checkpoint-2"
    assert other_batch == (
        f"{checkpoint} was written with 4 rows an update over 2 ranks, and now 1 make it 2: the schedule and the place "
        f"in the data would be wrong. Set training.global_batch_size: 4, or start anew from its weights: "
        f"model.name_or_path: {checkpoint} and another training.output_dir"
    )
    checkpoint = tmp_path / "zero3-adapter" / "checkpoint-2"
    assert other_strategy == (
        f"{checkpoint} was written under zero3, and this is ddp: the optimizer state of one is of no use to the other. "
        f"Set the strategy back, or start anew from its weights: lora.adapter: {checkpoint} and another "
        "training.output_dir"
    )
