"""SIGUSR1 while nothing is trained: noted, and nothing else.

`sbatch --signal=USR1@120` sends it two minutes before the job's end. Its default is to kill, which would cost the token
cache that is being built, or the final weights that are being written. A training that begins afterwards knows of it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

_STANDARD_ERROR = 2


class EarlyWarning:
    """A handler that remembers whether it was called."""

    received = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Say so; not through logging, whose lock the interrupted code may hold."""
        if not self.received and os.environ.get("RANK", "0") == "0":
            text = "SIGUSR1: nothing is trained at the moment, so there is nothing to save; going on until SIGTERM."
            os.write(_STANDARD_ERROR, f"\n{text}\n".encode())
        self.received = True


@contextmanager
def early_warning_noted() -> Iterator[None]:
    """For the length of a command; handlers that somebody else has installed stay."""
    number = getattr(signal, "SIGUSR1", None)  # Windows has none
    in_main_thread = threading.current_thread() is threading.main_thread()
    if number is None or not in_main_thread or signal.getsignal(number) is not signal.SIG_DFL:
        yield
        return
    signal.signal(number, EarlyWarning())
    try:
        yield
    finally:
        signal.signal(number, signal.SIG_DFL)


def was_noted(handler: object) -> bool:
    """Whether an earlier handler of SIGUSR1 has been called meanwhile."""
    return isinstance(handler, EarlyWarning) and handler.received
