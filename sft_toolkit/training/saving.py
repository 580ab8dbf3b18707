"""Trainer whose checkpoints are whole or not there: written beside, checked, flushed, marked, renamed.

Trainer writes straight into `checkpoint-N`, so that a crash or a full disk leaves a folder that looks like one; it
deletes older ones by time and by the beginning of their name; and it saves weights that are NaN as readily as others.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

from sft_toolkit.callbacks.complete import CompleteCallback
from sft_toolkit.callbacks.health import NonFiniteGuard
from sft_toolkit.checkpoints.checkpoint import STATE, check_saved, checkpoints, choose_resume, why_incomplete
from sft_toolkit.checkpoints.disk import free_bytes, in_words, trouble
from sft_toolkit.checkpoints.durable import STAGING, clear_staging, flush_tree, put_in_place, staged
from sft_toolkit.checkpoints.finite import are_finite
from sft_toolkit.checkpoints.marker import mark_complete
from sft_toolkit.checkpoints.rotation import rotate
from sft_toolkit.errors import CheckpointError, ConfigError, TrainingDivergedError
from sft_toolkit.training.saving_chores import SavingChores
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


class SavingTrainer(Trainer):
    """`transformers.Trainer`, with whole checkpoints where the arguments are `SFTArguments`.

    Two private methods are overridden, since Trainer has no public one around the writing of a checkpoint;
    `tests/resume/test_upstream.py` pins what is relied on.
    """

    _pushed: str | None = None
    _resumed_at: int | None = None  # updates that the checkpoint has behind it

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known_whole: set[Path] = set()
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
    def saves_whole(self) -> bool:
        """With a plain `TrainingArguments` everything is as in Trainer."""
        return isinstance(self.args, SFTArguments)

    @property
    def saves_on_error(self) -> bool:
        """One process only: where several train, the others may not have failed, and saving takes all of them."""
        return self.saves_whole and cast(SFTArguments, self.args).save_on_error and self.args.world_size == 1

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
            return super().train(resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            if self.saves_whole:
                self._save_what_is_sound(error)
                self.is_in_train = False  # Trainer leaves it on, and a later evaluate() then believes to be inside
            raise

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
        """As Trainer's, but for the summary of a training that had no step left: its mean loss would be 0.0."""
        if not (self.saves_whole and "train_runtime" in logs and self.state.global_step == self._resumed_at):
            super().log(logs, start_time)

    # ---- Writing one -------------------------------------------------------------------------------------------------

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes, rotates and cleans up: a folder of unfinished things, that never holds an older one."""
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self.saves_whole else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.saves_whole:
            super()._save_checkpoint(model, trial)
            return
        if not self.weights_are_finite():
            logger.warning("no checkpoint at step %d: the weights hold NaN or infinity", self.state.global_step)
            return
        target = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        with self._clear_words(target, self.checkpoint_bytes()):
            super()._save_checkpoint(model, trial)
            self._point_to_best(target)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                _seal(staged(target))
                put_in_place(staged(target), target)
            self.accelerator.wait_for_everyone()
            if self.state.is_local_process_zero and staged(target).is_dir():
                put_in_place(staged(target), target)  # what this machine wrote, where no disk is shared
        if self._pushed is not None:
            self._pushed = None
            super()._push_from_checkpoint(str(target))
        if self.args.should_save:
            self._known_whole.add(target)
            best = self.state.best_model_checkpoint
            rotate(target, self.args.save_total_limit, None if best is None else Path(best), self._is_whole)

    def save_whole(self, target: Path) -> Path:
        """As `save_model`, on all ranks: the folder is there as a whole, opened again and checked, or not at all."""
        with self._clear_words(target, self.weight_bytes()):
            self.save_model(str(staged(target)))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                check_saved(staged(target))
                flush_tree(staged(target))
                put_in_place(staged(target), target)
            self.accelerator.wait_for_everyone()
        return target

    def _save_what_is_sound(self, error: BaseException) -> None:
        """An emergency checkpoint of the last whole update, where an error of something else ends the training."""
        step, is_ours = self.state.global_step, isinstance(error, CheckpointError | TrainingDivergedError | ConfigError)
        if is_ours or not isinstance(error, Exception) or not (self.saves_on_error and self.is_in_train):
            return
        target = Path(super()._get_output_dir(None)) / f"checkpoint-{step}"
        is_new = step > (self._resumed_at or 0) and not target.exists()
        if not is_new or trouble(error, target, 0) or not self._chores.restore_last_update(step):
            return
        try:
            self._save_checkpoint(self.model, None)
        except Exception as second:
            logger.warning("no emergency checkpoint at step %d: %s", step, second)
            return
        if target.exists():
            logger.warning(
                "%s ended the training; step %d, the last whole update, is saved", type(error).__name__, step
            )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Uploads run on while training does: they begin once the folder has its name."""
        if self.saves_whole:
            self._pushed = checkpoint_folder
        else:
            super()._push_from_checkpoint(checkpoint_folder)

    def _point_to_best(self, target: Path) -> None:
        """Trainer looks for the best checkpoint beside the one that it writes, and writes that into its state."""
        if self.state.best_global_step:
            best = target.with_name(f"checkpoint-{self.state.best_global_step}")
            if best == target or best.is_dir():
                self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged(target) / STATE))

    @contextmanager
    def _clear_words(self, target: Path, needed: int) -> Iterator[None]:
        """A disk that can't take it: nothing half-written stays, older checkpoints do, and the reason is said."""
        try:
            yield
        except BaseException as error:
            clear_staging(target.parent, everything=True)
            reason = trouble(error, target, needed)
            if reason is None:
                raise
            raise CheckpointError(
                f"'{target}' could not be written: {reason}. {_space(target, needed)}{_what_stays(target)}"
            ) from error

    def _is_whole(self, folder: Path) -> bool:
        """Read once per process: contents that were checked, by this process or here, are not read at every save."""
        if folder not in self._known_whole and why_incomplete(folder) is None:
            self._known_whole.add(folder)
        return folder in self._known_whole and why_incomplete(folder, contents=False) is None

    # ---- What would be written ---------------------------------------------------------------------------------------

    def weights_are_finite(self) -> bool:
        """Whether no trained weight is NaN or infinite on any rank; all ranks have to ask."""
        broken = torch.tensor([0 if are_finite(self.model) else 1], device=self.args.device)
        return not bool(self.accelerator.gather(broken).sum())

    def weight_bytes(self) -> int:
        """What saving the model writes: all weights, or with LoRA those of the adapter."""
        return sum(_elements(p) * p.element_size() for p in self._saved_parameters())

    def checkpoint_bytes(self) -> int:
        """About how large a checkpoint gets: the weights, and what the optimizer holds of them."""
        states = getattr(self.optimizer, "state", None) or {}
        held = sum(t.numel() * t.element_size() for s in states.values() for t in s.values() if torch.is_tensor(t))
        to_come = sum(8 * _elements(p) for p in self._saved_parameters() if p.requires_grad)  # Adam: two fp32 moments
        return self.weight_bytes() + (held or to_come)

    def _saved_parameters(self) -> list[nn.Parameter]:
        is_adapter = hasattr(self.model, "peft_config")
        return [p for p in cast(nn.Module, self.model).parameters() if p.requires_grad or not is_adapter]


def _seal(folder: Path) -> None:
    """Open what was written, list it, flush it."""
    if any(folder.glob("*.safetensors")):
        check_saved(folder)
    mark_complete(folder)
    flush_tree(folder)


def _elements(parameter: nn.Parameter) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 holds a part of it here


def _steps_behind(checkpoint: str | bool | None) -> int | None:
    if not isinstance(checkpoint, str):
        return None
    try:
        return int(json.loads((Path(checkpoint) / STATE).read_text(encoding="utf-8"))["global_step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _what_stays(target: Path) -> str:
    older = [folder.name for folder in checkpoints(target.parent) if folder != target]
    held = f"Older checkpoints ({', '.join(older[:3])}) are untouched" if older else "No older checkpoint was there"
    return f"{held}; mend that, then run the same command to go on."


def _space(target: Path, needed: int) -> str:
    free = free_bytes(target.parent)
    if free is None or free > 2 * needed:
        return ""  # a read-only disk has room enough
    return (
        f"It needs about {in_words(needed)}, and {in_words(free)} are free there without it "
        "(training.save_total_limit keeps fewer). "
    )
