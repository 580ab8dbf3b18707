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


class RaisesOnEveryRank(TrainerCallback):
    """An error that all ranks meet: in a callback behind an update, or in the middle of one."""

    def __init__(self, at_step: int, during: str = "step end") -> None:
        self.at_step, self.during = at_step, during

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at_step and self.during == "step end":
            raise RuntimeError("out of ink")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step != self.at_step or self.during == "step end":
            return
        # The first rank fails in its forward, the second one in its backward, with collectives of DDP on their way.
        trained = [parameter for parameter in kwargs["model"].parameters() if parameter.requires_grad]
        if args.process_index == 0:
            kwargs["model"].get_output_embeddings().register_forward_pre_hook(_out_of_ink)
        else:
            trained[0].register_hook(_out_of_ink)


def _out_of_ink(*_: Any) -> None:
    raise RuntimeError("out of ink")
