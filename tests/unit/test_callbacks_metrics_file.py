from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerControl, TrainingArguments

from sft_toolkit.callbacks.metrics_file import MetricsFileCallback
from tests.unit.callback_runs import arguments, state, stock_trainer


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return arguments(tmp_path / "out")


def begin(callback: MetricsFileCallback, args: TrainingArguments, step: int = 0) -> None:
    callback.on_train_begin(args, state(step), TrainerControl())


def log(callback: MetricsFileCallback, args: TrainingArguments, step: int, **logs: Any) -> None:
    callback.on_log(args, state(step), TrainerControl(), logs=logs)


def lines(args: TrainingArguments) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(str(args.output_dir)) / "metrics.jsonl").read_text().splitlines()]


def test_events_of_one_step_become_one_line(args: TrainingArguments) -> None:
    callback = MetricsFileCallback()
    begin(callback, args)
    log(callback, args, 1, loss=2.5, epoch=0.5)
    assert lines(args) == [{"step": 1, "loss": 2.5, "epoch": 0.5}]
    log(callback, args, 1, eval_loss=2.0, epoch=0.5)
    log(callback, args, 2, loss=1.5, epoch=1.0)
    assert lines(args) == [
        {"step": 1, "loss": 2.5, "epoch": 0.5, "eval_loss": 2.0},
        {"step": 2, "loss": 1.5, "epoch": 1.0},
    ]


def test_numbers_are_numbers_and_what_is_not_finite_has_a_name(args: TrainingArguments) -> None:
    callback = MetricsFileCallback()
    begin(callback, args)
    logs = {
        "loss": "6.248",
        "grad_norm": float("inf"),
        "low": -np.inf,
        "gone": "nan",
        "np": np.float32(0.5),
        "torch": torch.tensor(3),
        "note": "warm",
        "nonfinite": [{"step": 1, "loss": float("nan"), "rows": [4, 7]}],
    }
    log(callback, args, 1, **logs)
    text = (Path(str(args.output_dir)) / "metrics.jsonl").read_text()
    assert text == (
        '{"step": 1, "loss": 6.248, "grad_norm": "Infinity", "low": "-Infinity", "gone": "NaN", "np": 0.5, '
        '"torch": 3, "note": "warm", "nonfinite": [{"step": 1, "loss": "NaN", "rows": [4, 7]}]}\n'
    )
    assert logs["loss"] == "6.248", "the logs belong to the Trainer"


def test_a_resumed_run_replaces_the_steps_it_repeats(args: TrainingArguments) -> None:
    first = MetricsFileCallback()
    begin(first, args)
    for step in (2, 4, 6):
        log(first, args, step, loss=float(step))
    path = Path(str(args.output_dir)) / "metrics.jsonl"
    path.write_text(path.read_text() + '{"step": 8, "lo')  # a crash in the middle of a line

    second = MetricsFileCallback()
    begin(second, args, step=4)
    assert [line["step"] for line in lines(args)] == [2, 4]
    log(second, args, 4, eval_loss=0.25)
    log(second, args, 6, loss=0.5)
    assert lines(args) == [
        {"step": 2, "loss": 2.0},
        {"step": 4, "loss": 4.0, "eval_loss": 0.25},
        {"step": 6, "loss": 0.5},
    ]


def test_a_new_run_starts_an_empty_file_and_keeps_what_was_evaluated_before_it(args: TrainingArguments) -> None:
    old = MetricsFileCallback()
    begin(old, args)
    log(old, args, 5, loss=9.0)

    new = MetricsFileCallback()
    log(new, args, 0, eval_loss=3.0)
    assert lines(args) == [{"step": 5, "loss": 9.0}], "evaluating alone leaves the folder as it is"
    begin(new, args)
    log(new, args, 1, loss=2.0)
    assert lines(args) == [{"step": 0, "eval_loss": 3.0}, {"step": 1, "loss": 2.0}]


def test_an_unchanged_file_is_not_written_again_on_resume(args: TrainingArguments) -> None:
    first = MetricsFileCallback()
    begin(first, args)
    log(first, args, 3, loss=1.0)
    path = Path(str(args.output_dir)) / "metrics.jsonl"
    before = path.stat()
    begin(MetricsFileCallback(), args, step=3)
    assert (path.stat().st_ino, path.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_a_file_emptied_by_someone_else_gets_no_hole(args: TrainingArguments) -> None:
    callback = MetricsFileCallback()
    begin(callback, args)
    log(callback, args, 1, loss=1.0)
    (Path(str(args.output_dir)) / "metrics.jsonl").unlink()
    log(callback, args, 2, loss=2.0)
    log(callback, args, 2, eval_loss=3.0)
    assert lines(args) == [{"step": 2, "loss": 2.0, "eval_loss": 3.0}]


def test_an_unwritable_file_is_named(args: TrainingArguments) -> None:
    callback = MetricsFileCallback()
    begin(callback, args)
    path = Path(str(args.output_dir)) / "metrics.jsonl"
    path.unlink()
    path.mkdir()
    with pytest.raises(IsADirectoryError, match=r"out/metrics\.jsonl"):
        log(callback, args, 1, loss=1.0)


def test_steps_rise_over_a_real_resume(tmp_path: Path) -> None:
    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
    stock_trainer(tmp_path, [MetricsFileCallback()], max_steps=3, **options).train()
    resumed = stock_trainer(tmp_path, [MetricsFileCallback()], max_steps=4, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in found] == [1, 2, 3, 4]
    assert ["loss" in line for line in found] == [True] * 4
    assert ["eval_loss" in line for line in found] == [False, True, False, True]
    assert "train_loss" in found[-1]
    assert all(isinstance(line["loss"], float) for line in found)
