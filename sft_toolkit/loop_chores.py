"""What SFTTrainer has to do at fixed places of Trainer's loop, as a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

if TYPE_CHECKING:
    from sft_toolkit.trainer import SFTTrainer


class LoopChores(TrainerCallback):
    """Sets the order of each epoch and keeps the counters over a resume; the last callback."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The log history of a checkpoint holds its counters."""
        self.trainer.token_meter.resume(state.log_history)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a mid-epoch resume, Trainer's own set_epoch stops at accelerate's SkipBatchSampler."""
        if self.trainer.row_order is not None:
            self.trainer.row_order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Log before each save, so that a checkpoint's log history holds exact token counters."""
        control.should_log |= control.should_save
        return control
