"""A run that stands still says where: which phase, which rank, and the stack of every thread."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from time import monotonic
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)

WAITING, UPDATING = "waiting for the next batch", "computing an update"
SAVING, EVALUATING = "saving a checkpoint", "evaluating"


class StallWatch(TrainerCallback):
    """Warns from a thread of its own when no event has come for a while, on the rank that it happens to.

    A data loader that hangs, a collective that waits for a rank that is gone, a file system that does not answer: none
    raises anything. The warning ends nothing; it is repeated after twice the time, and so on.

    Args:
        seconds: without an event, until the warning. Longer than the longest evaluation of a batch or save.
    """

    def __init__(self, seconds: float = 1800.0) -> None:
        if seconds <= 0:
            raise ValueError(f"seconds must be above 0, but is {seconds}")
        self.seconds = seconds
        self._stop: threading.Event | None = None
        self._phase, self._since, self._step, self._rank = WAITING, 0.0, 0, 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        self._rank, self._step = args.process_index, state.global_step
        self._enter(WAITING)
        self._stop = threading.Event()
        threading.Thread(target=self._watch, args=(self._stop,), name="stall-watch", daemon=True).start()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._enter(UPDATING)

    def on_substep_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._enter(UPDATING)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._step = state.global_step
        self._enter(EVALUATING if control.should_evaluate else SAVING if control.should_save else WAITING)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._enter(EVALUATING)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._enter(SAVING if control.should_save else WAITING)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._enter(WAITING)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()

    @property
    def phase(self) -> str:
        """What the last event says is going on."""
        return self._phase

    def close(self) -> None:
        """End the thread. An exception skips `on_train_end`: whoever catches it calls this."""
        if self._stop is not None:
            self._stop.set()
            self._stop = None

    def _enter(self, phase: str) -> None:
        self._phase, self._since = phase, monotonic()

    def _watch(self, stop: threading.Event) -> None:
        patience = self.seconds
        seen = self._since
        while not stop.wait(self.seconds / 10):
            if self._since != seen:
                seen, patience = self._since, self.seconds
            stood = monotonic() - seen
            if stood > patience:
                patience *= 2
                logger.warning(
                    "rank %d has been %s for %.0f s, behind step %d; its threads stand here:\n%s",
                    self._rank,
                    self._phase,
                    stood,
                    self._step,
                    stacks(),
                )


def stacks() -> str:
    """Where every thread of this process stands, the main one first, the thread that asks left out."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    first = threading.main_thread().ident
    return "\n".join(
        f"  {names.get(ident, ident)}:\n" + "".join(traceback.format_stack(frames[ident])).rstrip()
        for ident in sorted(frames, key=lambda ident: ident != first)
        if ident != threading.get_ident()
    )
