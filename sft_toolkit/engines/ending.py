"""The end of a program that is a rank: after everybody's exit handlers, without the interpreter's own finalization."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from sft_toolkit.engines.launch import read_launch


def run_program(main: Callable[[], int]) -> NoReturn:
    """Call `main` and exit with the code that it returns; for the last line of a program, never inside of one.

    A rank ends behind its exit handlers and skips what Python does next. Threads of gloo outlive the process group
    (four of them were counted behind `destroy_process_group` and a garbage collection); one that drops its last tensor
    while the interpreter is being taken down ends a finished training with "terminate called without an active
    exception" and SIGABRT, and its launcher calls the run failed. Seen in about one of several hundred launches of two
    ranks; https://github.com/pytorch/pytorch/issues/190489.

    Raises:
        SystemExit: with the code; in a rank, the process is gone when its exit handlers are through.
    """
    ended: list[int] = []
    atexit.register(_leave, ended)  # handlers run last in, first out: whoever registers later has had their turn
    ended.append(main())
    sys.exit(ended[0])


def _leave(ended: list[int]) -> None:
    launch = read_launch(os.environ)
    if not ended or launch is None or not launch.launched:
        return
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(ended[0])
