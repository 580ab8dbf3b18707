"""Ctrl-C, SIGTERM and its early warning SIGUSR1: finish the step, save, stop. A second signal stops at once."""

from __future__ import annotations

import logging
import os
import signal
import threading
from time import monotonic
from types import FrameType
from typing import Any, cast

import torch
from torch import distributed
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.engines.early_warning import was_noted
from sft_toolkit.engines.parent import is_orphaned

logger = logging.getLogger(__name__)

# SLURM's `--signal=USR1@120` warns two minutes before it ends a job; Windows has no such signal.
EARLY_WARNING = getattr(signal, "SIGUSR1", None)
SIGNALS = tuple(number for number in (signal.SIGTERM, signal.SIGINT, EARLY_WARNING) if number is not None)
STANDARD_ERROR = 2
# torchrun passes on to its workers a signal that a scheduler or a terminal has already sent to them too, a few
# milliseconds later: that is the same request, not a second one.
ECHO_SECONDS = 0.5


class InterruptCallback(TrainerCallback):
    """Turns a signal into one checkpoint at the end of the running step and an orderly end of `train()`.

    With several processes a signal may reach only one of them, or each at another step. So at every step end the ranks
    agree (a maximum over one integer): all save and stop at the same step.

    Handlers are installed while training runs, in the main thread only (Python allows no other), and the earlier ones
    come back afterwards. An exception skips `on_train_end`: whoever catches it calls `close()`.

    A SIGINT that the process was started to ignore (nohup, a background job of a script) stays ignored. SIGUSR1 counts
    as the SIGTERM that it announces; neither its repetition nor that SIGTERM is a second signal.

    Args:
        launcher: process id of the launcher that started this process (`parent.launcher()`); when it is gone, the run
            saves and stops as at a SIGTERM.

    Attributes:
        signal_received: number of the signal that ended training, the same on every rank; None otherwise. A command
            line exits with 128 + this number.
    """

    def __init__(self, launcher: int | None = None) -> None:
        self._launcher = launcher
        self._warned = False
        self.signal_received: int | None = None
        self._noted: int | None = None  # what this process got; the ranks have not agreed on it yet
        self._earlier: dict[int, Any] = {}
        self._received_at = 0.0
        self._echo_seconds = 0.0
        self._speaks = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.close()
        self.signal_received = self._noted = None
        self._warned = False
        self._echo_seconds = ECHO_SECONDS if args.world_size > 1 else 0.0
        self._speaks = state.is_world_process_zero
        if threading.current_thread() is not threading.main_thread():
            return
        for number in SIGNALS:
            if number == signal.SIGINT and signal.getsignal(number) is signal.SIG_IGN:
                continue
            self._earlier[number] = signal.signal(number, self._note)
        if was_noted(self._earlier.get(cast(int, EARLY_WARNING))):  # while the data was prepared
            self._noted, self._warned = signal.SIGTERM, True

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self._noted is None and is_orphaned(self._launcher):
            self._note_orphaned()
        self.signal_received = _agreed(self._noted, args)
        if self.signal_received is None:
            return
        if state.is_world_process_zero:
            name = signal.Signals(self.signal_received).name
            logger.warning("%s received: saving a checkpoint at step %d and stopping", name, state.global_step)
        control.should_training_stop = True
        control.should_save = True
        control.should_log = True
        # Schedulers kill soon after they ask (30 s is common): no time for an evaluation.
        control.should_evaluate = False

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # Trainer calls this also in the middle of an epoch that was stopped; the checkpoint is already there.
        if self.signal_received is not None and control.should_training_stop:
            control.should_save = control.should_evaluate = control.should_log = False

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # A signal during the last evaluation or save still counts: what follows training is then left to a resume.
        self.signal_received = _agreed(self._noted, args)
        self.close()

    def close(self) -> None:
        """Put the earlier signal handlers back; harmless when there is nothing to put back."""
        while self._earlier:
            number, handler = self._earlier.popitem()
            # None: a handler that was not installed from Python and can't be put back from here.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def _note_orphaned(self) -> None:
        self._noted = signal.SIGTERM
        logger.warning("the launcher (process %d) is gone: this run ends as at a SIGTERM", self._launcher)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = monotonic()
        if number == EARLY_WARNING:
            if self._noted is None:
                self._noted, self._warned = signal.SIGTERM, True
                self._say(number, "")
            return
        if self._warned:
            self._warned = False  # what it announced
            self._received_at = now
            return
        if self._noted is not None:
            if now - self._received_at < self._echo_seconds:
                return
            self.close()
            signal.raise_signal(number)
            return
        self._noted, self._received_at = number, now
        self._say(number, " Once more stops at once, without saving.")
        if not self._echo_seconds:
            # With the earlier handlers back, a second signal works even while a long C call keeps Python waiting.
            self.close()

    def _say(self, number: int, more: str) -> None:
        if self._speaks:
            # Not through logging: a handler may run while the interrupted code holds the stream's lock.
            text = f"\n{signal.Signals(number).name}: saving after this step, then stopping.{more}\n"
            os.write(STANDARD_ERROR, text.encode())


def _agreed(number: int | None, args: TrainingArguments) -> int | None:
    """The highest signal number over all ranks; a collective where several take part."""
    if not (distributed.is_available() and distributed.is_initialized()) or distributed.get_world_size() == 1:
        return number
    device = torch.device("cpu") if distributed.get_backend() == "gloo" else args.device
    highest = torch.tensor(number or 0, dtype=torch.int32, device=device)
    distributed.all_reduce(highest, op=distributed.ReduceOp.MAX)
    return int(highest) or None
