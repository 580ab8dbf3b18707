"""A disk that can't take a file: which errors mean that, and what to say."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

# Full, over quota, read-only, not allowed, broken, gone, unmounted.
_TROUBLES = {
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.ESTALE,
    errno.EFBIG,
}
# torch and safetensors write in C++ and Rust, and raise what is no OSError.
_PHRASES = ("os error", "no space left", "writer failed", "file write failed", "iostream error", "unexpected pos")


def trouble(error: BaseException, folder: Path, needed: int) -> str | None:
    """What is wrong with the disk that `folder` lies on, in words; None where the error is about something else."""
    if isinstance(error, OSError) and error.errno in _TROUBLES:
        return os.strerror(error.errno)
    text = str(error).lower()
    if isinstance(error, OSError) or any(phrase in text for phrase in _PHRASES):
        if (space := free_bytes(folder)) is not None and space < needed:
            return os.strerror(errno.ENOSPC)
        return str(error).splitlines()[0]
    return None


def free_bytes(folder: Path) -> int | None:
    """Free space for this user where `folder` is or will be; None where that can't be told."""
    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    try:
        return shutil.disk_usage(place).free
    except OSError:
        return None


def in_words(count: int | None) -> str:
    """Bytes as `812 kB`, `1.5 GB`."""
    if count is None:
        return "an unknown amount"
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit in ("bytes", "kB") or size >= 100 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
