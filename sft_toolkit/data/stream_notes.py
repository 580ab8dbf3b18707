"""What the loader's worker process tells the training process of a stream: the place of each window, and its rows.

Only the worker reads the rows then, but checkpoints are written by the training process. Two processes that a loader
connects share nothing but batches of tensors, so a window is one small file in a folder of their own.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import tempfile
from collections.abc import Sequence
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, NamedTuple

from torch.utils.data import get_worker_info

_KEPT = 64  # a worker reads ahead of what is trained on by a few batches, each in some window


class Note(NamedTuple):
    """A window.

    Attributes:
        first: its first item.
        following: the place of the window behind it, as plain data.
        names: "file, row N" of the rows of each item.
    """

    first: int
    following: dict[str, Any]
    names: Sequence[Sequence[str]]


class WindowNotes:
    """The windows that a worker has read lately, for the process that made this object."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="sft_toolkit-stream-"))
        # Not `weakref.finalize`, which a forked worker would run too.
        Finalize(self, shutil.rmtree, (self._folder, True), exitpriority=0)

    def write(self, note: Note) -> None:
        """Called for every window; does something in a worker only."""
        if get_worker_info() is None:
            return
        draft = self._folder / "draft"
        draft.write_text(json.dumps(note), encoding="utf-8")
        draft.replace(self._folder / f"{note.first:020}.json")
        for old in self._files()[:-_KEPT]:
            old.unlink(missing_ok=True)

    def read(self) -> list[Note]:
        """In the order of their first items."""
        return [Note(*json.loads(file.read_text(encoding="utf-8"))) for file in self._files()]

    def forget(self) -> None:
        """Drop what the worker of an earlier training wrote; does nothing in a worker."""
        if get_worker_info() is None:
            for file in self._files():
                file.unlink(missing_ok=True)

    def _files(self) -> list[Path]:
        return sorted(self._folder.glob("*.json"))


def worker_problem(args: Any) -> str | None:
    """Why the worker processes that `TrainingArguments` ask for can't read a stream; None where they can."""
    workers = args.dataloader_num_workers
    if workers > 1:
        return (
            f"training.dataloader_num_workers: {workers} processes would each tokenise the whole stream, since where a "
            "batch begins is known when all rows before it are tokenised; 1 reads ahead while the device computes"
        )
    default = multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]
    start = args.dataloader_multiprocessing_context or default
    if workers and start != "fork":
        return (
            f"training.dataloader_num_workers: a worker that is started by '{start}' can't take the stream with it; "
            "set training.dataloader_multiprocessing_context: fork, or no worker"
        )
    return None
