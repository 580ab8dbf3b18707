from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM, Trainer, TrainerControl, TrainingArguments

from sft_toolkit.callbacks.health import WAYS_OUT, NonFiniteGuard
from sft_toolkit.errors import TrainingDivergedError
from tests.unit.callback_runs import arguments, state, stock_trainer

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return arguments(tmp_path)


def guard(args: TrainingArguments, stop_after: int) -> NonFiniteGuard:
    callback = NonFiniteGuard(stop_after)
    callback.on_train_begin(args, state(0), TrainerControl())
    return callback


def log(callback: NonFiniteGuard, args: TrainingArguments, step: int, **logs: Any) -> None:
    callback.on_log(args, state(step), TrainerControl(), logs=logs)


def entry(step: int, rows: list[int] | None = None, loss: float = NAN) -> dict[str, Any]:
    return {"step": step, "loss": loss, "rows": rows or []}


def break_weights(trainer: Trainer) -> None:
    assert isinstance(trainer.model, LlamaForCausalLM)
    with torch.no_grad():
        trainer.model.lm_head.weight[7, 0] = math.nan


def test_a_non_finite_update_is_logged_with_step_and_rows(
    args: TrainingArguments, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="sft_toolkit"):
        log(guard(args, 3), args, 10, loss=1.0, nonfinite=[entry(4, [7, 9]), entry(8, list(range(11)), INF)])
    assert [record.message for record in caplog.records] == [
        "The loss or gradient is not finite at step 4: loss nan, rows 7, 9",
        "The loss or gradient is not finite at step 8: loss inf, rows 0, 1, 2, 3, 4, 5, 6, 7 and 3 more",
    ]


def test_it_stops_after_so_many_in_a_row_also_over_two_events(args: TrainingArguments) -> None:
    callback = guard(args, 3)
    log(callback, args, 10, loss=1.0, nonfinite=[entry(9, [1]), entry(10, [2])])
    with pytest.raises(TrainingDivergedError) as caught:
        log(callback, args, 20, loss=1.0, nonfinite=[entry(11, [3])])
    assert str(caught.value) == (
        "Training diverged: 3 consecutive updates were not finite.\n"
        "  step 9: loss nan, rows 1\n  step 10: loss nan, rows 2\n  step 11: loss nan, rows 3\n" + WAYS_OUT
    )
    assert caught.value.exit_code == 1


def test_a_finite_update_between_starts_the_count_anew(args: TrainingArguments) -> None:
    callback = guard(args, 2)
    log(callback, args, 10, loss=1.0, nonfinite=[entry(10)])
    log(callback, args, 20, loss=1.0, nonfinite=[entry(12), entry(14)])
    log(callback, args, 30, loss=1.0)
    log(callback, args, 40, loss=1.0, nonfinite=[entry(35)])


def test_without_the_list_the_logged_numbers_count(args: TrainingArguments) -> None:
    callback = guard(args, 2)
    log(callback, args, 10, loss=1.0, grad_norm=INF)
    log(callback, args, 20, loss=1.0, grad_norm=1.0)
    log(callback, args, 30, loss=NAN)
    with pytest.raises(TrainingDivergedError, match=r"step 30: loss nan\n  step 40: loss 1\.5\n"):
        log(callback, args, 40, loss=1.5, grad_norm=NAN)


def test_under_fp16_an_infinite_gradient_is_the_loss_scale_being_found(args: TrainingArguments) -> None:
    args.fp16 = True
    log(guard(args, 1), args, 1, loss=1.0, grad_norm=INF)


def test_a_non_finite_evaluation_ends_training_and_only_training(args: TrainingArguments) -> None:
    callback = guard(args, 3)
    callback.on_evaluate(args, state(5), TrainerControl(), metrics={"eval_loss": 1.0, "eval_runtime": 2.0})
    with pytest.raises(TrainingDivergedError, match=r"^The evaluation at step 5 gave eval_code_loss = nan\."):
        callback.on_evaluate(args, state(5), TrainerControl(), metrics={"eval_loss": 1.0, "eval_code_loss": NAN})
    callback.on_train_end(args, state(10), TrainerControl())
    callback.on_evaluate(args, state(10), TrainerControl(), metrics={"eval_loss": NAN})


def test_a_count_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="stop_after must be at least 1, but is 0"):
        NonFiniteGuard(0)


def test_weights_that_evaluate_to_nan_never_become_the_best_checkpoint(tmp_path: Path) -> None:
    trainer = stock_trainer(
        tmp_path,
        [NonFiniteGuard(stop_after=9)],
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
    )
    break_weights(trainer)
    with pytest.raises(TrainingDivergedError, match="gave eval_loss = nan"):
        trainer.train()
    assert trainer.state.best_metric is None
    assert list(tmp_path.glob("checkpoint-*")) == []


def test_a_run_that_diverges_stops_at_the_step_asked_for(tmp_path: Path) -> None:
    trainer = stock_trainer(tmp_path, [NonFiniteGuard(stop_after=2)], max_steps=5)
    break_weights(trainer)
    with pytest.raises(TrainingDivergedError, match="2 consecutive updates"):
        trainer.train()
    assert trainer.state.global_step == 2
