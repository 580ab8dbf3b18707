"""One piece of work at a time in a thread of its own; what it raises comes up where somebody asks for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Background:
    """A thread that is there while it works.

    It is no daemon: a process that ends waits for it. A daemon that is stopped in the middle of a C++ call would take
    the process down with an exit code of its own.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_busy(self) -> bool:
        """Whether it is at work."""
        return self._thread is not None and self._thread.is_alive()

    def start(self, work: Callable[[], None]) -> None:
        """Begin; waits for the piece before, and raises what that one raised."""
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(work,), name=self._name)
        self._thread.start()

    def wait(self) -> None:
        """Until the work is done; raises what it raised, once."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise()

    def look(self) -> None:
        """Raise what the work raised, once; waits for nothing."""
        if not self.is_busy:
            self.wait()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error
