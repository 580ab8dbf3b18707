"""In which part of a run an unexpected failure came and where its traceback lies, for a message of two lines."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PHASE, _TRACEBACK = "sft_toolkit_phase", "sft_toolkit_traceback"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark whatever is raised inside; the innermost name stays. The exception itself is not changed otherwise."""
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _PHASE):
            setattr(error, _PHASE, name)
        raise


def phase_of(error: BaseException) -> str | None:
    """What was going on when this was raised."""
    name: str | None = getattr(error, _PHASE, None)
    return name


def leave_traceback(error: BaseException, folder: Path) -> None:
    """Write `error.txt` into the folder, one for each rank; not being able to is no second failure."""
    path = traceback_file(folder)
    with suppress(OSError):
        path.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        setattr(error, _TRACEBACK, str(path))


def traceback_file(folder: Path) -> Path:
    """Where this rank leaves its traceback."""
    rank = os.environ.get("RANK", "0")
    return folder / ("error.txt" if rank == "0" else f"error-rank{rank}.txt")


def traceback_of(error: BaseException) -> str | None:
    """The file that `leave_traceback` has written."""
    path: str | None = getattr(error, _TRACEBACK, None)
    return path


def user_code_of(error: BaseException) -> str | None:
    """The innermost line of the user's own code that this toolkit called, as `file.py:12, in on_step_end`."""
    ours = str(Path(__file__).parent)
    installed = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
    found, called_by_us = None, False
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith(ours):
            called_by_us = True
        elif called_by_us and not frame.filename.startswith((*installed, "<")):
            found = f"{os.path.basename(frame.filename)}:{frame.lineno}, in {frame.name}"
    return found
