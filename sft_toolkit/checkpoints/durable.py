"""Folders that are there as a whole or not at all: written beside, flushed to the disk, renamed.

A rename within one file system is atomic; what was flushed before it survives a power cut.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

STAGING = "_unfinished"  # beside the finished folders; hub uploads leave out names that begin with an underscore


def staged(target: Path) -> Path:
    """Where to write what will become `target`: same name, same file system, in a folder of unfinished things."""
    return target.parent / STAGING / target.name


def flush_tree(folder: Path) -> None:
    """Flush every file below `folder`, and the folders that list them, to the disk."""
    for path in sorted(folder.rglob("*")):
        flush(path)
    flush(folder)


def flush(path: Path) -> None:
    """Flush one file, or the entries of one folder, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a staged folder to `target`; what stood there (a broken checkpoint) is gone afterwards."""
    if target.exists():
        remove(target)
    folder.rename(target)
    flush(target.parent)
    clear_staging(target.parent)


def remove(folder: Path) -> None:
    """Delete a folder; stopped half-way, what is left of it no longer goes by its name."""
    doomed = folder.parent / STAGING / f"{folder.name}.removed"
    doomed.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)
    clear_staging(folder.parent)


def clear_staging(parent: Path, *, everything: bool = False) -> None:
    """Remove the folder of unfinished things if nothing is in it; with `everything`, whatever is in it."""
    if everything:
        shutil.rmtree(parent / STAGING, ignore_errors=True)
        return
    try:
        (parent / STAGING).rmdir()
    except OSError:
        return  # not there, or something else is being written
