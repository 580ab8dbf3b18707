"""What SFTTrainer has to do at fixed places of Trainer's loop, as a callback."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerCallback

from sft_toolkit.errors import ConfigError
from sft_toolkit.metering.step_times import StepTimes
from sft_toolkit.metering.utilisation import utilisation_of
from sft_toolkit.training.intake import adapter_callbacks
from sft_toolkit.training.stream_keeper import keepers_of

if TYPE_CHECKING:
    from sft_toolkit.trainer import SFTTrainer


def add_chores(trainer: SFTTrainer) -> None:
    """What its adapter needs at every update, and the chores; the last callbacks."""
    keepers = keepers_of(trainer.train_dataset)
    for callback in (*adapter_callbacks(trainer.model), *keepers, LoopChores(trainer)):
        trainer.add_callback(callback)


class LoopChores(TrainerCallback):
    """Sets the order of each epoch, keeps the counters over a resume and the clock; the last callback."""

    def __init__(self, trainer: SFTTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The log history of a checkpoint holds its counters.

        Raises:
            ConfigError: no update would be made, which Trainer reports as a training that went well.
        """
        _refuse_no_updates(args, state, kwargs.get("train_dataloader"))
        device, meter = args.device, self.trainer.token_meter
        meter.times = StepTimes(on_cuda=device.type == "cuda")
        meter.utilisation = utilisation_of(self.trainer.paths.unwrapped(), device, _computes_in(args, self.trainer))
        meter.resume(state.log_history)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Between this and the next update: the schedule, logs, other callbacks."""
        self.trainer.token_meter.times.enter(None)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The time since the log entry before the save went into the checkpoint."""
        self.trainer.token_meter.times.restart()

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After a mid-epoch resume, Trainer's own set_epoch stops at accelerate's SkipBatchSampler."""
        if self.trainer.row_order is not None:
            self.trainer.row_order.set_epoch(int(state.epoch or 0))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        """Log before each save, so that a checkpoint's log history holds exact token counters."""
        control.should_log |= control.should_save
        return control


def _refuse_no_updates(args: Any, state: Any, batches: Any) -> None:
    if state.max_steps == 0:
        raise ConfigError(f"num_train_epochs: {args.num_train_epochs:g} trains nothing")
    if args.dataloader_drop_last and hasattr(batches, "__len__") and len(batches) == 0:
        raise ConfigError(
            f"dataloader_drop_last: leaves nothing to train on: there are fewer rows than a batch takes "
            f"(per_device_train_batch_size {args.per_device_train_batch_size} x {args.world_size} processes)"
        )


def _computes_in(args: Any, trainer: SFTTrainer) -> torch.dtype:
    if args.bf16 or args.fp16:
        return torch.bfloat16 if args.bf16 else torch.float16
    dtype = getattr(trainer.base_model(), "dtype", torch.float32)
    return dtype if isinstance(dtype, torch.dtype) else torch.float32
