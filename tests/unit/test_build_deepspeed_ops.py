"""The script that compiles DeepSpeed's operators: locks of the dead are removed, locks of the living are not."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parent.parent.parent / "scripts" / "build_deepspeed_ops.py"


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("build_deepspeed_ops", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "cpu_adam" / "lock"
    path.parent.mkdir()
    path.touch()
    return path


def test_a_lock_that_nobody_holds_is_removed(script: Any, lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.clear_lock(lock, patience=0) is None
    assert not lock.exists()
    said = f"{lock}: no process holds it (its owner was killed while compiling): removed\n"
    assert capsys.readouterr().out == said


def test_a_lock_that_a_process_holds_stays(script: Any, lock: Path) -> None:
    with lock.open():
        assert script.clear_lock(lock, patience=0) == f"{lock}: still held by process {os.getpid()}"
    assert lock.exists()


def test_a_compiler_that_outlives_its_parent_keeps_the_lock(script: Any, lock: Path) -> None:
    with subprocess.Popen(["sleep", "60"], cwd=lock.parent) as compiler:
        try:
            assert script.clear_lock(lock, patience=0) == f"{lock}: still held by process {compiler.pid}"
        finally:
            compiler.kill()
    assert lock.exists()


def test_what_is_built_for_these_versions_and_this_cpu_is_not_built_again(script: Any, tmp_path: Path) -> None:
    wanted = script.fingerprint()
    assert set(wanted) == {"deepspeed", "torch", "python", "cpu"}
    assert not script.is_built(tmp_path, wanted)
    for name in script.BUILDERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.so").touch()
    (tmp_path / "built.json").write_text(json.dumps(wanted), encoding="utf-8")
    assert script.is_built(tmp_path, wanted)
    assert not script.is_built(tmp_path, {**wanted, "torch": "0"})
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", SCRIPT, "--directory", tmp_path],
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout == ""
    imported = {line.split("|")[-1].strip() for line in finished.stderr.splitlines()}
    assert not imported & {"torch", "deepspeed"}
