"""What has to be known and done around the saving of checkpoints, as a callback."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sft_toolkit.checkpoints.durable import clear_staging
from sft_toolkit.checkpoints.finite import gradients_are_finite
from sft_toolkit.training.saving_space import room_or_refusal

if TYPE_CHECKING:
    from sft_toolkit.training.saving import SavingTrainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RandomState:
    """The generators of this process behind an update; taking it costs about 30 microseconds."""

    step: int
    python: Any
    numpy: Any
    torch: Tensor
    cuda: list[Tensor]

    @classmethod
    def at(cls, step: int) -> RandomState:
        """Now."""
        on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all() if on_cuda else []
        return cls(step, random.getstate(), np.random.get_state(), torch.get_rng_state(), cuda)

    def restore(self) -> None:
        """Put them back."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)
        if self.cuda:
            torch.cuda.set_rng_state_all(self.cuda)


class SavingChores(TrainerCallback):
    """Looks before each save, and knows at every moment whether the state is that of a whole update."""

    def __init__(self, trainer: SavingTrainer) -> None:
        self.trainer = trainer
        self._updating_from: int | None = None
        self._random: RandomState | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """What a killed process left unfinished goes; a disk that is too small is told of at once, on all ranks.

        Trainer saves, logs and evaluates in the rhythm of the checkpoint, whatever the arguments say now.
        """
        self._updating_from, self._random = None, None
        state.compute_steps(args, state.max_steps)
        self.trainer.prepare_for_errors()
        if state.is_world_process_zero:
            clear_staging(Path(args.output_dir), everything=True)
        warning = room_or_refusal(self.trainer, self.trainer.written_at_end)
        if warning and state.is_world_process_zero:
            logger.warning("%s", warning)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """From here until the step is counted, weights, optimizer and schedule belong to two updates."""
        self._updating_from = state.global_step
        # Under fp16 the gradient scaler leaves such updates out by itself, and learns its scale from them.
        if self.trainer.skips_nonfinite and not args.fp16 and not gradients_are_finite(self.trainer.model):
            cast(nn.Module, self.trainer.model).zero_grad()  # without gradients an optimizer changes nothing
            if state.is_world_process_zero:
                logger.warning("update %d is left out: its gradient is not finite", state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The random numbers that the next update begins with; what a thread failed to write meanwhile is an error."""
        self.trainer.look_behind()
        if self.trainer.saves_on_error:
            self._random = RandomState.at(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Log before each save, as at the end of a step."""
        control.should_log |= control.should_save

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """After an update that was not finite there is nothing worth a checkpoint; no event comes later before it."""
        if not control.should_save or not logs or "loss" not in logs:
            return
        bad_now = any(entry["step"] == state.global_step for entry in logs.get("nonfinite", ()))
        if bad_now or not self.trainer.weights_are_finite():
            control.should_save = False
            if state.is_world_process_zero:
                reason = "its update was not finite" if bad_now else "the weights hold NaN or infinity"
                logger.warning("no checkpoint at step %d: %s", state.global_step, reason)

    def restore_last_update(self, step: int) -> bool:
        """Bring the random numbers back to the end of update `step`; False where the state is that of no update."""
        if self._updating_from is not None and step <= self._updating_from:
            return False
        if self._random is not None and self._random.step == step:
            self._random.restore()
        return True
