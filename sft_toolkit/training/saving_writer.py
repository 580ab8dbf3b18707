"""Trainer whose checkpoints are whole or not there: written beside, checked, flushed, marked, renamed.

Trainer writes straight into `checkpoint-N`, so that a crash or a full disk leaves a folder that looks like one; it
deletes older ones by time and by the beginning of their name; and it saves weights that are NaN as readily as others.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from sft_toolkit.checkpoints.checkpoint import STATE, check_saved, checkpoints, why_incomplete
from sft_toolkit.checkpoints.disk import free_bytes, in_words, trouble
from sft_toolkit.checkpoints.durable import STAGING, clear_staging, flush_tree, put_in_place, staged
from sft_toolkit.checkpoints.finite import are_finite
from sft_toolkit.checkpoints.marker import mark_complete
from sft_toolkit.checkpoints.rotation import rotate
from sft_toolkit.errors import CheckpointError
from sft_toolkit.training.saving_agreement import Agreement
from sft_toolkit.training.saving_behind import BehindTrainer, Copied
from sft_toolkit.training.saving_space import checkpoint_bytes, refuse_full_disk, weight_bytes
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


class WritingTrainer(BehindTrainer):
    """`transformers.Trainer`, with whole checkpoints where the arguments are `SFTArguments`.

    Two private methods are overridden, since Trainer has no public one around the writing of a checkpoint;
    `tests/resume/test_saving.py` pins what is relied on.
    """

    _pushed: str | None = None
    _being_written: Path | None = None  # by the thread
    _after_error: Agreement | None = None  # while ranks save behind an error that all of them met

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._known_whole: set[Path] = set()

    @property
    def saves_whole(self) -> bool:
        """With a plain `TrainingArguments` everything is as in Trainer."""
        return isinstance(self.args, SFTArguments)

    def _get_output_dir(self, trial: Any) -> str:
        """Where Trainer writes, rotates and cleans up: a folder of unfinished things, that never holds an older one."""
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, STAGING) if self.saves_whole else folder

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if not self.saves_whole:
            super()._save_checkpoint(model, trial)
            return
        self.settle()
        if not self.weights_are_finite():
            logger.warning("no checkpoint at step %d: the weights hold NaN or infinity", self.state.global_step)
            return
        target = Path(super()._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        needed = checkpoint_bytes(self)
        is_split = cast(SFTArguments, self.args).async_save
        with self._clear_words(target, needed):
            if self.args.should_save:
                refuse_full_disk(target.parent, needed)
            with self.splitting() if is_split else nullcontext() as copied, self._without_best():
                super()._save_checkpoint(model, trial)
            self._point_to_best(target)
            self._add_to(staged(target))
            self._wait_for_all()
        best = self.state.best_model_checkpoint
        finish = partial(self._finish, target, needed, copied, None if best is None else Path(best))
        if copied is None:
            if self.args.should_save:
                finish()
            self._being_written = target
            self.settle()
        else:
            self._being_written = target
            if self.args.should_save:
                self._behind.start(finish)
        if self._pushed is not None:
            self._pushed = None
            super()._push_from_checkpoint(str(target))

    def _finish(self, target: Path, needed: int, copied: Copied | None, best: Path | None) -> None:
        """The part that takes long, by the one rank that writes; in the thread, where a copy was made."""
        with self._clear_words(target, needed):
            if copied is not None:
                self.write_copied(copied, staged(target))
            _seal(staged(target))
            put_in_place(staged(target), target)
        self._known_whole.add(target)
        rotate(target, self.args.save_total_limit, best, self._is_whole)

    def settle(self) -> None:
        """Wait until the checkpoint that is being written is there, on all ranks.

        Raises:
            CheckpointError: it could not be written.
        """
        target, self._being_written = self._being_written, None
        if target is None:
            return
        self._behind.wait()
        self._wait_for_all()
        if self.state.is_local_process_zero and staged(target).is_dir():
            put_in_place(staged(target), target)  # what this machine wrote, where no disk is shared

    def look_behind(self) -> None:
        """Raise now what writing has raised in the meantime."""
        self._behind.look()

    def save_whole(self, target: Path) -> Path:
        """As `save_model`, on all ranks: the folder is there as a whole, opened again and checked, or not at all."""
        self.settle()
        needed = weight_bytes(self)
        with self._clear_words(target, needed):
            if self.args.should_save:
                refuse_full_disk(target.parent, needed)
            self.save_model(str(staged(target)))
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                check_saved(staged(target))
                flush_tree(staged(target))
                put_in_place(staged(target), target)
            self.accelerator.wait_for_everyone()
        return target

    def _add_to(self, folder: Path) -> None:
        """What callbacks keep in a checkpoint belongs to it before it is whole: a kill behind it would lose that."""
        for callback in self.callback_handler.callbacks:
            add = getattr(callback, "add_to_checkpoint", None)
            if add is not None:
                folder.mkdir(parents=True, exist_ok=True)  # another rank may not have made it yet
                add(folder, self.args, self.state)

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

    # ---- Behind an error, the group of the training is not to be used ------------------------------------------------

    def weights_are_finite(self) -> bool:
        """Whether no trained weight is NaN or infinite on any rank; all ranks have to ask."""
        if self._after_error is not None:
            return True  # each has looked before they agreed
        broken = torch.tensor([0 if are_finite(self.model) else 1], device=self.args.device)
        return not bool(self.accelerator.gather(broken).sum())

    def store_flos(self) -> None:
        """As Trainer's, which adds up over all ranks."""
        if self._after_error is None:
            super().store_flos()

    def _wait_for_all(self) -> None:
        if self._after_error is None:
            self.accelerator.wait_for_everyone()
        else:
            self._after_error.wait()

    @contextmanager
    def _without_best(self) -> Iterator[None]:
        """Trainer waits for all ranks before it looks for the best one, which `_point_to_best` does."""
        best = self.state.best_global_step
        if self._after_error is not None:
            self.state.best_global_step = None
        try:
            yield
        finally:
            self.state.best_global_step = best

    # ---- Words and looks ---------------------------------------------------------------------------------------------

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


def _seal(folder: Path) -> None:
    """Open what was written, list it, flush it."""
    if any(folder.glob("*.safetensors")):
        check_saved(folder)
    mark_complete(folder)
    flush_tree(folder)


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
