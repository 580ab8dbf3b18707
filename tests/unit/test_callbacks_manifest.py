from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerControl

from sft_toolkit.callbacks import manifest
from sft_toolkit.callbacks.manifest import ManifestCallback
from tests.unit.callback_runs import arguments, state, stock_trainer


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [50.0]
    monkeypatch.setattr(manifest, "monotonic", lambda: now[0])
    return now


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return found


def test_it_tells_at_every_moment_how_the_run_stands(tmp_path: Path, clock: list[float]) -> None:
    callback = ManifestCallback({"seed": 42, "dtype": torch.float32, "loss": float("nan")})
    args, control = arguments(tmp_path), TrainerControl()
    callback.on_train_begin(args, state(0), control)
    running = read(tmp_path)
    assert len(running.pop("started_at")) == len("2026-01-01T00:00:00+00:00")
    assert running == {
        "seed": 42,
        "dtype": "torch.float32",
        "loss": "NaN",
        "exit_state": "running",
        "resumed_from_step": None,
        "step": 0,
        "max_steps": 10,
        "wall_seconds": 0.0,
    }
    clock[0] = 52.5
    callback.on_save(args, state(4), control)
    assert (read(tmp_path)["exit_state"], read(tmp_path)["step"], read(tmp_path)["wall_seconds"]) == ("running", 4, 2.5)
    callback.on_train_end(args, state(10), control)
    assert (read(tmp_path)["exit_state"], read(tmp_path)["step"]) == ("finished", 10)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_wall_time_adds_up_over_a_resume_and_not_over_a_new_run(tmp_path: Path, clock: list[float]) -> None:
    args, control = arguments(tmp_path), TrainerControl()
    first = ManifestCallback()
    first.on_train_begin(args, state(0), control)
    clock[0] += 7.0
    first.on_save(args, state(4), control)

    resumed = ManifestCallback()
    resumed.on_train_begin(args, state(4), control)
    clock[0] += 1.0
    resumed.on_train_end(args, state(10), control)
    assert (read(tmp_path)["wall_seconds"], read(tmp_path)["resumed_from_step"]) == (8.0, 4)

    anew = ManifestCallback()
    anew.on_train_begin(args, state(0), control)
    assert read(tmp_path)["wall_seconds"] == 0.0


def test_an_interrupted_run_says_so(tmp_path: Path) -> None:
    callback = ManifestCallback(interrupted=lambda: True)
    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    callback.on_train_end(arguments(tmp_path), state(3), TrainerControl())
    assert (read(tmp_path)["exit_state"], read(tmp_path)["step"]) == ("interrupted", 3)


def test_the_caller_may_finish_later_or_record_a_failure(tmp_path: Path) -> None:
    callback = ManifestCallback(finish=False)
    callback.record_exit("failed", "before training")
    assert list(tmp_path.iterdir()) == []
    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    callback.on_train_end(arguments(tmp_path), state(10), TrainerControl())
    assert read(tmp_path)["exit_state"] == "running"
    callback.record_exit("failed", "No space left on device")
    assert (read(tmp_path)["exit_state"], read(tmp_path)["error"]) == ("failed", "No space left on device")
    callback.record_exit("finished")
    assert read(tmp_path)["exit_state"] == "finished"
    assert "error" not in read(tmp_path)


def test_a_run_of_the_stock_trainer_finishes(tmp_path: Path) -> None:
    stock_trainer(tmp_path, [ManifestCallback({"seed": 1})]).train()
    found = read(tmp_path)
    assert (found["seed"], found["exit_state"], found["step"], found["max_steps"]) == (1, "finished", 3, 3)
