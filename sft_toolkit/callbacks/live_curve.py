"""The loss curve in the output of a notebook's cell, redrawn in place while it trains."""

from __future__ import annotations

import io
from importlib import import_module
from time import monotonic
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.curve import curves_of, draw


class LiveCurveCallback(TrainerCallback):
    """Shows what `loss.png` shows. Without IPython, and on other processes than the first, it does nothing.

    Args:
        every_seconds: shortest time between two drawings.
    """

    def __init__(self, every_seconds: float = 2.0) -> None:
        self.every_seconds = every_seconds
        self._shown: Any = None  # IPython's handle
        self._next = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._shown, self._next = None, 0.0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if monotonic() >= self._next:
            self._show(state)
            self._next = monotonic() + self.every_seconds

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._show(state)

    def _show(self, state: TrainerState) -> None:
        curves = curves_of(state.log_history)
        if not state.is_world_process_zero or not curves:
            return
        try:
            shown: Any = import_module("IPython.display")
        except ImportError:
            return
        picture = io.BytesIO()
        draw(curves, state.max_steps).savefig(picture, format="png")
        image = shown.Image(data=picture.getvalue(), format="png", width=640)
        if self._shown is None:
            self._shown = shown.display(image, display_id=True)
        else:
            self._shown.update(image)
