"""In which part of a run an unexpected failure came, so that the command line can say it in one line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_NAME = "sft_toolkit_phase"


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Mark whatever is raised inside; the innermost name stays. The exception itself is not changed otherwise."""
    try:
        yield
    except BaseException as error:
        if not hasattr(error, _NAME):
            setattr(error, _NAME, name)
        raise


def phase_of(error: BaseException) -> str | None:
    """What was going on when this was raised."""
    name: str | None = getattr(error, _NAME, None)
    return name
