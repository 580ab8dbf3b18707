"""Ended without warning at random moments, also inside a save: the final weights are those of no kill."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_weights_of_an_undisturbed_one(tmp_path: Path) -> None:
    moments = os.environ.get("SFT_TORTURE", "2")  # `make torture`: 50
    command = [sys.executable, "-m", "tests.faults.killing", str(tmp_path), "--moments", moments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # threads would not survive a fork
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["equal"] == int(moments)
    assert counts["killed"] >= 1
