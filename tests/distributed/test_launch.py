"""The launch helper itself: it starts what it says, and leaves nothing behind."""

from __future__ import annotations

import sys

import psutil

from tests.distributed.launch import launch, run_ranks


def test_two_ranks_start_on_a_cpu() -> None:
    ranks = run_ranks("tests.distributed.workers:environment")
    assert ranks == [
        {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"} for rank in (0, 1)
    ]


def test_the_watchdog_ends_a_child_in_a_session_of_its_own() -> None:
    child = "import time; print('child', flush=True); time.sleep(300)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    finished = launch([sys.executable, "-c", parent], timeout=3)
    assert (finished.timed_out, finished.code, finished.stdout) == (True, -9, "child\n")
    assert finished.seconds < 20
    assert not [process.pid for process in psutil.process_iter() if child in " ".join(process.cmdline())]


def test_a_command_that_fails_is_reported() -> None:
    finished = launch([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"])
    assert (finished.code, finished.stdout, finished.stderr, finished.timed_out) == (1, "out\n", "err\n", False)
