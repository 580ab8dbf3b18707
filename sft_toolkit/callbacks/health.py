"""Stops a run whose loss or gradient is no longer a number, and says where it began."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.errors import TrainingDivergedError

logger = logging.getLogger(__name__)

SHOWN_ROWS = 8
WAYS_OUT = (
    "What to try: a lower learning_rate, more warmup_steps, max_grad_norm (1.0), bf16 or fp32 instead of fp16, "
    "and a look at these rows with `sft-toolkit preview`. An earlier checkpoint is still good."
)


class NonFiniteGuard(TrainerCallback):
    """Raises on every rank alike, from what each log event says.

    `SFTTrainer` logs `nonfinite`: a list of {"step", "loss", "rows"}, one entry per update since the last event whose
    loss or gradient norm was NaN or infinite. With a Trainer that logs no such list, the logged `loss` and `grad_norm`
    count instead, one per event (under fp16 an infinite gradient norm is how the loss scale is found, and is no fault).

    Args:
        stop_after: consecutive non-finite updates that end the run.

    Raises:
        TrainingDivergedError: that many in a row, or a non-finite evaluation loss while training: raised before the
            Trainer compares it, so such weights are never the best checkpoint.
    """

    def __init__(self, stop_after: int = 3) -> None:
        if stop_after < 1:
            raise ValueError(f"stop_after must be at least 1, but is {stop_after}")
        self.stop_after = stop_after
        self._streak: list[dict[str, Any]] = []
        self._training = False
        self._previous_event = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._streak, self._training, self._previous_event = [], True, state.global_step

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._training = False

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not self._training or not logs or ("loss" not in logs and "nonfinite" not in logs):
            return
        for entry in _nonfinite_updates(logs, state.global_step, args.fp16):
            before = entry["step"] - 1 if "nonfinite" in logs else self._previous_event
            follows = bool(self._streak) and self._streak[-1]["step"] == before
            self._streak = [*self._streak, entry] if follows else [entry]
            if state.is_world_process_zero:
                logger.warning("The loss or gradient is not finite at %s", _describe(entry))
            if len(self._streak) >= self.stop_after:
                raise TrainingDivergedError(self._message())
        self._previous_event = state.global_step

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        for name, value in (metrics or {}).items():
            if self._training and re.fullmatch(r"eval_(.+_)?loss", name) and not math.isfinite(value):
                raise TrainingDivergedError(
                    f"The evaluation at step {state.global_step} gave {name} = {value}. These weights are not saved "
                    f"as the best ones, and the run stops.\n{WAYS_OUT}"
                )

    def _message(self) -> str:
        number = len(self._streak)
        head = "update was" if number == 1 else f"{number} consecutive updates were"
        lines = [f"Training diverged: {head} not finite."]
        lines += [f"  {_describe(entry)}" for entry in self._streak]
        return "\n".join([*lines, WAYS_OUT])


def _nonfinite_updates(logs: Mapping[str, Any], step: int, fp16: bool) -> Sequence[dict[str, Any]]:
    if "nonfinite" in logs:
        return list(logs["nonfinite"])
    watched = [logs["loss"]] if fp16 else [logs["loss"], logs.get("grad_norm", 0.0)]
    if all(math.isfinite(value) for value in watched):
        return []
    return [{"step": step, "loss": float(logs["loss"]), "rows": []}]


def _describe(entry: Mapping[str, Any]) -> str:
    rows = [str(row) for row in entry["rows"][:SHOWN_ROWS]]
    hidden = len(entry["rows"]) - len(rows)
    where = f", rows {', '.join(rows)}" if rows else ""
    return f"step {entry['step']}: loss {entry['loss']}{where}" + (f" and {hidden} more" if hidden > 0 else "")
