"""How far, how fast, how well: a bar in terminals and notebooks, plain lines in log files."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any, TextIO

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length


class ProgressCallback(TrainerCallback):
    """Shows loss, learning rate, tokens per second, padding and the time left, on the world's first process only.

    Args:
        stream: where to; default the standard error of the moment training begins.
        bar: True a bar, False one line per log event; None takes the bar where somebody is watching. A log file
            full of carriage returns is of no use to anyone.
    """

    def __init__(self, stream: TextIO | None = None, bar: bool | None = None) -> None:
        self._stream = stream
        self._bar = bar
        self._training: Any = None  # tqdm bars
        self._evaluation: Any = None
        self._first_step = 0
        self._began = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        self._first_step, self._began = state.global_step, monotonic()
        if state.is_world_process_zero and self._shows_bar():
            self._training = self._new_bar(state.max_steps, "train", initial=state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._training is not None:
            self._training.update(state.global_step - self._training.n)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        parts = describe(logs)
        if self._training is not None and "loss" in logs:
            self._training.set_postfix_str(", ".join(parts))
        elif parts:
            head = [f"step {state.global_step}/{state.max_steps}"] if state.max_steps > 0 else []
            self._write("  ".join([*head, *parts, *self._time_left(logs, state)]))

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        batches = kwargs.get("eval_dataloader")
        if not state.is_world_process_zero or not self._shows_bar() or not has_length(batches):
            return
        if self._evaluation is None:
            self._evaluation = self._new_bar(len(batches), "eval", leave=False)
        self._evaluation.update(1)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._close_evaluation()

    def on_predict(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, metrics: Any, **kwargs: Any
    ) -> None:
        self._close_evaluation()

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    def close(self) -> None:
        """Leave the bars as they stand; also for a run that ended by an exception, where no event says so."""
        self._close_evaluation()
        if self._training is not None:
            self._training.close()
            self._training = None

    def _close_evaluation(self) -> None:
        if self._evaluation is not None:
            self._evaluation.close()
            self._evaluation = None

    def _out(self) -> TextIO:
        return sys.stderr if self._stream is None else self._stream

    def _shows_bar(self) -> bool:
        if self._bar is not None:
            return self._bar
        # A notebook's stream is no terminal, but tqdm.auto draws a widget there.
        return self._out().isatty() or (self._stream is None and "ipykernel.zmqshell" in sys.modules)

    def _new_bar(self, total: int, name: str, **options: Any) -> Any:
        from tqdm.auto import tqdm

        return tqdm(total=total, desc=name, file=self._out(), dynamic_ncols=True, **options)

    def _write(self, line: str) -> None:
        if self._training is not None:
            self._training.write(line, file=self._out())
        else:
            self._out().write(line + "\n")
            self._out().flush()

    def _time_left(self, logs: Mapping[str, Any], state: TrainerState) -> list[str]:
        done, left = state.global_step - self._first_step, state.max_steps - state.global_step
        if "loss" not in logs or done <= 0 or left <= 0:
            return []
        return [f"eta {clock((monotonic() - self._began) / done * left)}"]


def describe(logs: Mapping[str, Any]) -> list[str]:
    """The entries of a log event that people look at while they wait, as short texts; evaluation keeps its names."""
    if "train_runtime" in logs:
        loss = [f"train_loss {_short(logs['train_loss'])}"] if "train_loss" in logs else []
        return [*loss, f"finished in {clock(logs['train_runtime'])}"]
    parts = []
    if "epoch" in logs:
        parts.append(f"epoch {logs['epoch']:.2f}")
    if "loss" in logs:
        parts.append(f"loss {_short(logs['loss'])}")
    parts += [f"{key} {_short(value)}" for key, value in logs.items() if _is_eval_score(key)]
    if "learning_rate" in logs:
        parts.append(f"lr {logs['learning_rate']:.1e}")
    if "tokens_per_second" in logs:
        parts.append(f"{logs['tokens_per_second']:,.0f} tok/s")
    if "padding_share" in logs:
        parts.append(f"padding {100 * logs['padding_share']:.1f} %")
    return parts


def _is_eval_score(key: str) -> bool:
    speeds = ("_runtime", "_samples_per_second", "_steps_per_second", "_model_preparation_time")
    return key.startswith("eval_") and not key.endswith(speeds)


def _short(value: Any) -> str:
    return f"{value:.4f}" if isinstance(value, float) and math.isfinite(value) else str(value)


def clock(seconds: float) -> str:
    """`1:02` or `2:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
