"""Trainer that goes on from whole checkpoints, and saves the last whole update when an error ends the training."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any, cast

from torch import distributed
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from sft_toolkit.callbacks.complete import CompleteCallback
from sft_toolkit.callbacks.health import NonFiniteGuard
from sft_toolkit.checkpoints.checkpoint import STATE, checkpoints, choose_resume
from sft_toolkit.checkpoints.disk import trouble
from sft_toolkit.checkpoints.finite import are_finite
from sft_toolkit.errors import CheckpointError, ConfigError, TrainingDivergedError
from sft_toolkit.training.saving_agreement import Agreement, NoAgreementError
from sft_toolkit.training.saving_chores import SavingChores
from sft_toolkit.training.saving_writer import WritingTrainer
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


class SavingTrainer(WritingTrainer):
    """`WritingTrainer`, with the ways to go on from a checkpoint and to end with one."""

    written_at_end = 0  # bytes of what follows the training, by whoever writes that
    _agreement: Agreement | None = None
    _resumed_at: int | None = None  # updates that the checkpoint has behind it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not self.saves_whole:
            return
        if self.skips_nonfinite and (self.is_deepspeed_enabled or self.is_fsdp_enabled):
            raise ConfigError("on_nonfinite: skip needs the gradients, which DeepSpeed and FSDP keep to themselves")
        present = {type(callback) for callback in self.callback_handler.callbacks}
        if NonFiniteGuard not in present:
            self.add_callback(NonFiniteGuard(cast(SFTArguments, self.args).stop_after_nonfinite))
        self._chores = SavingChores(self)
        self.add_callback(self._chores)
        if CompleteCallback not in present:
            self.add_callback(CompleteCallback())

    @property
    def saves_on_error(self) -> bool:
        """Whether an error ends in an emergency checkpoint, where the state is sound."""
        return self.saves_whole and cast(SFTArguments, self.args).save_on_error

    @property
    def skips_nonfinite(self) -> bool:
        """Updates whose gradient is not finite are left out."""
        return self.saves_whole and cast(SFTArguments, self.args).on_nonfinite == "skip"

    # ---- Going on from one -------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; `resume_from_checkpoint=True` is the newest whole checkpoint, broken ones are passed over.

        Raises:
            CheckpointError: there are checkpoints, and none is whole; a checkpoint can't be written.
            TrainingDivergedError: `stop_after_nonfinite` updates in a row were not finite.
        """
        if self.saves_whole:
            output_dir = Path(self.args.output_dir or ".")
            if resume_from_checkpoint is True and checkpoints(output_dir):
                resume_from_checkpoint = str(choose_resume(output_dir, "auto"))
            self._resumed_at = _steps_behind(resume_from_checkpoint)
        try:
            self.settle()
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self.saves_whole:
                if isinstance(error, Exception):
                    self._end_writing()
                    self._save_what_is_sound(error)
                self.is_in_train = False  # Trainer leaves it on, and a later evaluate() then believes to be inside
            raise
        finally:
            self._agreement = None

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: DataLoader[Any]
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """As Trainer's, with no epoch left where the checkpoint is the run's end: Trainer would train one step more."""
        values = super().set_initial_training_values(args, dataloader)
        steps_per_epoch, max_steps = values[1], values[-1]
        if self._resumed_at is None or max_steps is None or self._resumed_at < max_steps:
            return values
        return min(values[0], self._resumed_at // steps_per_epoch), *values[1:]

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """As Trainer's, but for the summary of a training that had no step left: its mean loss would be 0.0.

        The summary comes before the best weights are loaded, so that the checkpoint that holds them has to be there.
        """
        if "train_runtime" in logs:
            self.settle()
        if not (self.saves_whole and "train_runtime" in logs and self.state.global_step == self._resumed_at):
            super().log(logs, start_time)

    # ---- Ending with one ---------------------------------------------------------------------------------------------

    def prepare_for_errors(self) -> None:
        """At the start of training, on all ranks: the way on which they will agree behind an error."""
        alone = self.args.world_size == 1 or not distributed.is_initialized()
        if self.saves_on_error and not alone and not self._is_sharded() and "MASTER_PORT" in os.environ:
            self._agreement = Agreement(self.args.ddp_timeout)

    def _is_sharded(self) -> bool:
        return self.is_deepspeed_enabled or self.is_fsdp_enabled or self.args.parallelism_config is not None

    def _end_writing(self) -> None:
        """The checkpoint that is being written comes to its end; the error on its way is not hidden by another one."""
        try:
            self._behind.wait()
        except Exception as error:
            logger.warning("%s", error)
        self._being_written = None

    def _save_what_is_sound(self, error: Exception) -> None:
        """An emergency checkpoint of the last whole update, where an error of something else ends the training."""
        is_ours = isinstance(error, CheckpointError | TrainingDivergedError | ConfigError)
        step = self.state.global_step
        target = Path(Trainer._get_output_dir(self, None)) / f"checkpoint-{step}"
        is_new = step > (self._resumed_at or 0) and not target.exists()
        if is_ours or not (self.saves_on_error and self.is_in_train and is_new):
            return
        reason = self._agreed(step, self._why_unsound(error, step, target))
        if reason is None:
            reason = self._saved_after_error(target)
        if reason is not None:
            logger.warning("no emergency checkpoint at step %d: %s", step, reason)
        elif self.is_world_process_zero():
            logger.warning(
                "%s ended the training; step %d, the last whole update, is saved", type(error).__name__, step
            )

    def _why_unsound(self, error: Exception, step: int, target: Path) -> str | None:
        if trouble(error, target, 0):
            return "the disk is in trouble"
        if not self._chores.restore_last_update(step):
            return "an update was only half applied"
        return None if are_finite(self.model) else "the weights hold NaN or infinity"

    def _agreed(self, step: int, reason: str | None) -> str | None:
        """`reason`, or what stands against it on another rank."""
        if self.args.world_size == 1:
            return reason
        if self._agreement is None:
            return "each rank holds a part of the state, and the others may have gone on"
        try:
            answers = self._agreement.everybody_says((step, reason))
        except NoAgreementError as alone:
            return str(alone)
        if len({at for at, _ in answers}) > 1:
            return f"the ranks are at the steps {', '.join(str(at) for at, _ in answers)}"
        return next((f"rank {rank}: {why}" for rank, (_, why) in enumerate(answers) if why), None)

    def _saved_after_error(self, target: Path) -> str | None:
        self._after_error = self._agreement
        try:
            self._save_checkpoint(self.model, None)
            self.settle()
        except Exception as second:
            return str(second)
        finally:
            self._after_error = None
        return None


def _steps_behind(checkpoint: str | bool | None) -> int | None:
    if not isinstance(checkpoint, str):
        return None
    try:
        return int(json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
