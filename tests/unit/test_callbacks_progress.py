from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl

from sft_toolkit.callbacks import progress
from sft_toolkit.callbacks.progress import ProgressCallback, clock, describe
from tests.unit.callback_runs import OtherRank, arguments, state, stock_trainer

LOGS = {
    "loss": 1.25,
    "grad_norm": 0.5,
    "learning_rate": 2e-4,
    "epoch": 0.4,
    "tokens": 5000,
    "tokens_per_second": 1234.56,
    "padding_share": 0.0312,
}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_log_event_in_short_texts() -> None:
    assert describe(LOGS) == ["epoch 0.40", "loss 1.2500", "lr 2.0e-04", "1,235 tok/s", "padding 3.1 %"]
    assert describe({"eval_loss": 2.0, "eval_exact_match": 0.5, "eval_runtime": 3.0, "epoch": 1.0}) == [
        "epoch 1.00",
        "eval_loss 2.0000",
        "eval_exact_match 0.5000",
    ]
    assert describe({"train_runtime": 62.4, "train_loss": 1.5, "total_flos": 1e9}) == [
        "train_loss 1.5000",
        "finished in 1:02",
    ]
    assert describe({"loss": float("nan")}) == ["loss nan"]


def test_seconds_as_a_clock() -> None:
    assert [clock(0.4), clock(62), clock(3599.6), clock(7384)] == ["0:00", "1:02", "1:00:00", "2:03:04"]


def test_a_log_file_gets_one_line_per_event_with_the_time_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    out = io.StringIO()
    callback, args, control = ProgressCallback(out), arguments(tmp_path), TrainerControl()
    callback.on_train_begin(args, state(2), control)
    now[0] = 8.0
    callback.on_log(args, state(4), control, logs=LOGS)  # 2 steps in 8 s, 6 to go
    callback.on_log(args, state(4), control, logs={"eval_loss": 2.0})
    callback.on_log(args, state(10), control, logs={"train_runtime": 8.0, "train_loss": 1.5})
    callback.on_train_end(args, state(10), control)
    assert out.getvalue() == (
        "step 4/10  epoch 0.40  loss 1.2500  lr 2.0e-04  1,235 tok/s  padding 3.1 %  eta 0:24\n"
        "step 4/10  eval_loss 2.0000\n"
        "step 10/10  train_loss 1.5000  finished in 0:08\n"
    )


def test_a_terminal_gets_a_bar_and_lines_above_it_for_evaluations(tmp_path: Path) -> None:
    out = Terminal()
    callback, args, control = ProgressCallback(out), arguments(tmp_path), TrainerControl()
    callback.on_train_begin(args, state(0), control)
    callback.on_step_end(args, state(4), control)
    callback.on_log(args, state(4), control, logs=LOGS)
    for _ in range(2):
        callback.on_prediction_step(args, state(4), control, eval_dataloader=[1, 2])
    callback.on_evaluate(args, state(4), control)
    callback.on_log(args, state(4), control, logs={"eval_loss": 2.0})
    callback.on_train_end(args, state(4), control)
    shown = out.getvalue().replace("\r", "\n").splitlines()
    assert "step 4/10  eval_loss 2.0000" in shown
    assert any(line.startswith("train:  40%") and "1,235 tok/s, padding 3.1 %" in line for line in shown)
    assert any(line.startswith("eval:   0%") and "0/2" in line for line in shown)


def test_evaluating_without_training_writes_a_line(tmp_path: Path) -> None:
    out = io.StringIO()
    ProgressCallback(out).on_log(arguments(tmp_path), state(0, max_steps=0), TrainerControl(), logs={"eval_loss": 2.0})
    assert out.getvalue() == "eval_loss 2.0000\n"


@pytest.mark.parametrize("bar", [True, False])
def test_other_ranks_are_quiet(tmp_path: Path, bar: bool) -> None:
    out = io.StringIO()
    trainer = stock_trainer(tmp_path, [OtherRank(), ProgressCallback(out, bar=bar)], eval_strategy="steps")
    trainer.train()
    assert out.getvalue() == ""


def test_a_failed_run_leaves_no_bar_behind_for_the_next_one(tmp_path: Path) -> None:
    callback, args, control = ProgressCallback(Terminal()), arguments(tmp_path), TrainerControl()
    callback.on_train_begin(args, state(0), control)
    first: Any = callback._training
    callback.on_train_begin(args, state(0), control)
    assert (first.disable, callback._training.disable) == (True, False)
    callback.close()
    callback.close()


def test_by_default_it_writes_to_the_standard_error_of_the_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = ProgressCallback()
    stock_trainer(tmp_path, [callback]).train()
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split("  ")[0] for line in err.splitlines() if line.startswith("step")] == [
        "step 1/3",
        "step 2/3",
        "step 3/3",
        "step 3/3",
    ]
    assert sys.stderr is not None
