"""Killed anywhere, the run goes on with the very same losses."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from sft_toolkit import run
from tests.tiny import chat, tiny_model, tiny_tokenizer

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As in the processes that are started: sums over two threads may differ in their last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": chat(f"say {i}", "abcdefgh"[: 1 + i % 8])} for i in range(60)]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "model": {"name_or_path": str(tmp_path / "model")},
        "data": {"train": str(tmp_path / "train.jsonl"), "max_length": 64, "cache_dir": str(tmp_path / "cache")},
        "lora": {"r": 4, "dropout": 0.1},
        "training": {
            "output_dir": str(tmp_path / "killed"),
            "num_train_epochs": 40,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",  # so that a run may be made longer without another schedule
            "logging_steps": 1,
            "save_steps": 10,
            "save_total_limit": 3,
        },
    }


def written(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start(config: dict[str, Any], folder: Path) -> tuple[subprocess.Popen[str], Path]:
    path = written(config, folder)
    command = [sys.executable, str(ROOT / "train.py"), "--config", str(path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env), path


def wait_for_lines(file: Path, count: int, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if file.exists() and len(file.read_bytes().splitlines()) >= count:
            return
        time.sleep(0.05)
    raise AssertionError(f"{file} did not reach {count} lines in {seconds} s")


def losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines})
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.slow
def test_sigterm_saves_at_the_next_step_and_the_resumed_losses_are_the_same(
    config: dict[str, Any], tmp_path: Path
) -> None:
    process, path = start(config, tmp_path)
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 13)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 143, err
    assert "stopped by a signal" in out
    assert json.loads((tmp_path / "killed" / "run.json").read_text())["exit_state"] == "interrupted"
    stopped_at = max(losses(tmp_path / "killed"))
    assert (tmp_path / "killed" / f"checkpoint-{stopped_at}" / "COMPLETE").is_file()

    longer = f"training.max_steps={stopped_at + 12}"
    run(path, [longer])
    run(path, [longer, f"training.output_dir={tmp_path / 'whole'}"])
    killed = losses(tmp_path / "killed")
    assert killed == losses(tmp_path / "whole")
    assert len(killed) == stopped_at + 12


@pytest.mark.slow
def test_a_sigterm_that_only_the_launcher_gets_saves_too(config: dict[str, Any], tmp_path: Path) -> None:
    """`accelerate launch` with one process dies of it at once and passes nothing on."""
    config["training"] |= {"num_train_epochs": 4000, "save_steps": 10_000}
    config["model"] |= {"attn_implementation": "eager"}
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1"]
    command += [str(ROOT / "train.py"), "--config", str(written(config, tmp_path))]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "OMP_NUM_THREADS": "1"})
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 5)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(timeout=60) != 0
    deadline = time.monotonic() + 60
    while json.loads((tmp_path / "killed" / "run.json").read_text())["exit_state"] == "running":
        assert time.monotonic() < deadline, (tmp_path / "log").read_text()
        time.sleep(0.05)
    manifest = json.loads((tmp_path / "killed" / "run.json").read_text())
    assert manifest["exit_state"] == "interrupted"
    assert (tmp_path / "killed" / f"checkpoint-{manifest['step']}" / "COMPLETE").is_file()
    assert "is gone: this run ends as at a SIGTERM" in (tmp_path / "log").read_text()


@pytest.mark.slow
def test_after_kill_9_the_newest_good_checkpoint_is_taken_and_the_losses_are_the_same(
    config: dict[str, Any], tmp_path: Path
) -> None:
    config["training"] |= {"num_train_epochs": 2, "save_steps": 5}
    config["training"]["output_dir"] = str(tmp_path / "whole")
    run(written(config, tmp_path))
    config["training"]["output_dir"] = str(tmp_path / "killed")
    process, path = start(config, tmp_path)
    wait_for_lines(tmp_path / "killed" / "metrics.jsonl", 12)
    process.kill()
    process.communicate()
    result = run(path)
    assert result.exit_code == 0
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert len(losses(tmp_path / "whole")) == 30
