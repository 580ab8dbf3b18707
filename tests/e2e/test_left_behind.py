"""What a run that ends badly leaves in its folder, and what no run may leave there."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.workshop import Workshop
from tests.tiny import chat


def test_batches_that_are_all_dropped(workshop: Workshop) -> None:
    outcome = workshop.run("train", "training.dataloader_drop_last=true", "training.per_device_train_batch_size=16")
    assert outcome.code == 2
    assert (
        "training.dataloader_drop_last: true leaves nothing to train on: 8 rows, and a batch takes 16 "
        "(per_device_train_batch_size 16 x 1 processes)"
    ) in outcome.err
    assert not workshop.out.exists()


def test_a_metric_that_cant_use_the_answers(workshop: Workshop) -> None:
    workshop.config["evaluation"] = {"generate": 2, "metrics": ["exact_match", "json_fields"]}
    outcome = workshop.run("train")
    assert outcome.code == 2
    assert "evaluation.metrics: 'json_fields' can't score the held-out answers" in outcome.err
    assert not workshop.out.exists()


def test_what_no_check_foresaw(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("a wheel came off")

    monkeypatch.setattr("sft_toolkit.assemble.build_model", broken)
    outcome = workshop.run("train")
    assert outcome.code == 1
    place = f"(test_left_behind.py:{broken.__code__.co_firstlineno + 1}, in broken)"  # the user's code, not ours
    assert f"error: while loading the model: RuntimeError: a wheel came off {place}\n" in outcome.err
    assert f"(the traceback is in {workshop.out / 'error.txt'})" in outcome.err
    assert "Traceback" not in outcome.err
    assert "a wheel came off" in (workshop.out / "error.txt").read_text()
    monkeypatch.setenv("SFT_TOOLKIT_TRACEBACK", "1")
    assert "Traceback" in workshop.run("train").err
    monkeypatch.undo()
    assert workshop.run("train", "training.max_steps=1").code == 0
    assert not (workshop.out / "error.txt").exists()


def test_no_file_of_a_run_holds_the_token_of_the_hub(workshop: Workshop) -> None:
    workshop.write_rows("train.jsonl", [{"messages": chat("a", "b")}] * 2)
    outcome = workshop.run("train", "training.hub_token=hf_secret", "training.max_steps=2")
    assert outcome.code == 0, outcome.err
    files = [path for path in workshop.out.rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in files)
    assert [path.name for path in files if b"hf_secret" in path.read_bytes()] == []
