"""A rank ends behind its exit handlers, before the interpreter is taken down; other programs end as they always did."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The order in which Python ends a program: threads, exit handlers, then its own objects.
PROGRAM = """
import atexit, logging, sys, threading, time
from sft_toolkit.engines.ending import run_program

class UntilTheInterpreterGoes:
    def __del__(self):
        print("interpreter taken down", file=sys.__stdout__)

def worked_later():
    time.sleep(0.2)
    print("thread done")

def main():
    global kept
    kept = UntilTheInterpreterGoes()
    atexit.register(print, "handler ran")
    threading.Thread(target=worked_later).start()
    logging.getLogger().addHandler(logging.StreamHandler(sys.stdout))
    logging.warning("said")
    print("no line end", end=" ", flush=False)
    {ending}

run_program(main)
"""


def _run(ending: str, **launcher: str) -> tuple[int, list[str], str]:
    environment = {k: v for k, v in os.environ.items() if k not in {"RANK", "WORLD_SIZE", "LOCAL_RANK"}} | launcher
    command = [sys.executable, "-c", PROGRAM.replace("{ending}", ending)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout.splitlines(), done.stderr


@pytest.mark.parametrize("code", [0, 2, 143])
def test_a_rank_skips_the_finalization_and_keeps_code_output_threads_and_handlers(code: int) -> None:
    as_rank = _run(f"return {code}", RANK="1", WORLD_SIZE="2", LOCAL_RANK="1")
    assert as_rank == (code, ["said", "no line end thread done", "handler ran"], "")
    alone = _run(f"return {code}")
    assert alone == (code, ["said", "no line end thread done", "handler ran", "interpreter taken down"], "")


@pytest.mark.parametrize("launcher", [{}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}])
def test_what_main_raises_ends_the_program_as_ever(launcher: dict[str, str]) -> None:
    assert _run("sys.exit(5)", **launcher)[0] == 5
    code, _, stderr = _run("raise ValueError('odd')", **launcher)
    assert code == 1
    assert stderr.endswith("ValueError: odd\n")
