"""Which checkpoints stay when there are more than `save_total_limit`.

Trainer's own rotation goes by time, counts and deletes any folder that begins with `checkpoint-`, and at the end of
training keeps the best one alone under a limit of 1, so that nothing is left to go on from.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sft_toolkit.checkpoints.checkpoint import checkpoints, step_of, why_incomplete
from sft_toolkit.checkpoints.durable import remove

logger = logging.getLogger(__name__)


def rotate(latest: Path, limit: int | None, best: Path | None, is_whole: Callable[[Path], bool] | None = None) -> None:
    """Delete older checkpoints beside `latest`, the one just written.

    `latest` and `best` stay; the newest whole ones by number fill up to `limit`. What is newer than `latest` (the run
    went on from an older one) counts where it is whole, and is never deleted. Folders with other names than
    `checkpoint-N` are neither counted nor touched.

    Args:
        limit: how many stay, `latest` and `best` included; None or less than 1 keeps all.
        is_whole: whether a checkpoint could be resumed from; by default by names, sizes and headers.
    """
    if limit is None or limit < 1:
        return
    is_whole = is_whole or (lambda folder: why_incomplete(folder, contents=False) is None)
    found = checkpoints(latest.parent)
    stay = {latest.name, "" if best is None else best.name}
    kept = {folder for folder in found if folder.name in stay}
    for folder in found:
        if len(kept) < limit and folder not in kept and is_whole(folder):
            kept.add(folder)
    for folder in found:
        if folder not in kept and step_of(folder) < step_of(latest):
            _delete(folder)


def _delete(folder: Path) -> None:
    try:
        remove(folder)
    except OSError as error:  # one checkpoint too many is no reason to lose a run
        logger.warning("%s can't be deleted: %s", folder, error.strerror or error)
