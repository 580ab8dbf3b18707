"""What a trial tells the study while it trains, and the value that it is compared by."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import optuna
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments


class WatchCallback(TrainerCallback):
    """Reports every evaluation, ends a trial that the pruner gives up, and evaluates behind the last update.

    Args:
        trial: where to report.
        key: the metric, as the log names it.
    """

    def __init__(self, trial: optuna.Trial, key: str) -> None:
        self.trial, self.key = trial, key
        self.pruned = False
        self._reported = -1

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        value = next((e[self.key] for e in reversed(state.log_history) if self.key in e), None)
        if value is None or not math.isfinite(value) or state.global_step == self._reported:
            return
        self._reported = state.global_step
        self.trial.report(value, state.global_step)
        # A trial at its last update is complete: there is nothing left to save.
        if state.global_step < state.max_steps and self.trial.should_prune():
            self.pruned = control.should_training_stop = True

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step >= state.max_steps and self._reported != state.global_step:
            control.should_evaluate = True


def value_of(folder: Path, key: str, minimize: bool, best: bool) -> float | None:
    """The metric of a run from its log: of the last evaluation, or of the best where that is the model that is kept."""
    try:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    values = [event[key] for event in map(json.loads, lines) if key in event]
    finite = [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]
    if not finite or (not best and not isinstance(values[-1], int | float)):
        return None
    return (min(finite) if minimize else max(finite)) if best else finite[-1]
