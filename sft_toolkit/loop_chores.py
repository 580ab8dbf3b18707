"""What SFTTrainer has to do at fixed places of Trainer's loop, as a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback

from sft_toolkit.attention import refuse_leaking
from sft_toolkit.data.token_dataset import PackedDataset

if TYPE_CHECKING:
    from sft_toolkit.trainer import SFTTrainer


class LoopChores(TrainerCallback):
    """Proves that packed documents are isolated, sets the order of each epoch, keeps the counters over a resume."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks: under ZeRO-3 the two forwards of the proof are collective."""
        self.trainer.token_meter.resume(state.log_history)
        if isinstance(self.trainer.train_dataset, PackedDataset):
            refuse_leaking(self.trainer.model_wrapped, self.trainer.base_model())

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a mid-epoch resume, Trainer's own set_epoch stops at accelerate's SkipBatchSampler."""
        if self.trainer.row_order is not None:
            self.trainer.row_order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Log before each save, so that a checkpoint's log history holds exact token counters."""
        control.should_log |= control.should_save
        return control
