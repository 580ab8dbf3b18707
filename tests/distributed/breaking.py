"""Callbacks that end a rank in the middle of a training."""

from __future__ import annotations

import os
import signal
from typing import Any

from transformers import TrainerCallback


class KillsRankOne(TrainerCallback):
    """As the kernel does when memory runs out; once, and not in the ranks that torchrun starts anew."""

    def __init__(self, at_step: int) -> None:
        self.at_step = at_step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if args.process_index == 1 and state.global_step == self.at_step and not again:
            os.kill(os.getpid(), signal.SIGKILL)


class RaisesOnRankOne(TrainerCallback):
    """An error that only one rank meets."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.process_index == 1 and state.global_step == 2:
            raise RuntimeError("rank one is out of paper")
