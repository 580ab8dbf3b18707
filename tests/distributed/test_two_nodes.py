"""Two launchers on loopback are two machines, each with an output folder of its own; and a launcher that restarts."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import Finished, accelerate, build_operators, free_port, launch
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels

pytestmark = pytest.mark.slow


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    model, data, config = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run.yaml"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_with_labels(1, 15, 3, 25)), encoding="utf-8")
    training = {"max_steps": 4, "per_device_train_batch_size": 1, "save_steps": 1, "logging_steps": 1}
    sections = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(data), "max_length": 256, "cache_dir": str(tmp_path / "cache")},
        "training": {**training, "learning_rate": 0.01, "output_dir": str(tmp_path / "out")},
    }
    config.write_text(json.dumps(sections), encoding="utf-8")
    return config


def on_two_nodes(run_file: Path, *overrides: str) -> list[Finished]:
    """What both machines said; machine N writes to `nodeN`."""
    port = free_port()
    world = ["--multi_gpu", "--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]

    def start(rank: int) -> Finished:
        own = f"training.output_dir={run_file.parent / f'node{rank}'}"
        command = accelerate(*world, "--machine_rank", str(rank), "train.py", "--config", run_file, port=port)
        return launch([*command, own, *overrides], timeout=180)

    with ThreadPoolExecutor(2) as both:
        return list(both.map(start, (0, 1)))


def losses(folder: Path) -> dict[int, float]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def stop_after(folder: Path, step: int) -> None:
    """As if the run had been ended by a failure behind this update."""
    for checkpoint in folder.glob("checkpoint-*"):
        if int(checkpoint.name.rsplit("-", 1)[1]) > step:
            shutil.rmtree(checkpoint)
    shutil.rmtree(folder / "final")
    manifest: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    (folder / "run.json").write_text(json.dumps({**manifest, "exit_state": "failed"}), encoding="utf-8")


def test_machines_without_a_shared_disk_go_on_from_one_checkpoint(run_file: Path) -> None:
    build_operators()
    first, second = (run_file.parent / name for name in ("node0", "node1"))
    for machine in on_two_nodes(run_file, "distributed.strategy=zero2"):
        assert machine.code == 0, machine.tail()
        assert "training.output_dir is another folder on each machine" in machine.stderr
    engaged = json.loads((first / "run.json").read_text(encoding="utf-8"))["engaged"]
    assert (engaged["nodes"], engaged["world_size"], engaged["strategy"]) == (2, 2, "zero2")
    whole = losses(first)
    assert sorted(whole) == [1, 2, 3, 4]
    assert not (second / "checkpoint-2" / "trainer_state.json").exists()
    stop_after(first, 2)
    for machine in on_two_nodes(run_file, "distributed.strategy=zero2"):
        assert machine.code == 0, machine.tail()
        assert "step 1/4" not in machine.stderr
    assert losses(first) == pytest.approx(whole, abs=1e-6)
    assert (second / "checkpoint-2" / "trainer_state.json").exists()  # it was sent
    assert (first / "final" / "model.safetensors").is_file()


def test_a_rank_that_is_killed_is_restarted_and_goes_on(run_file: Path) -> None:
    """`--max-restarts`: torchrun starts all ranks anew, and `training.resume: auto` does the rest."""
    from tests.distributed.launch import torchrun

    name = "tests.distributed.breaking.KillsRankOne"
    command = torchrun("train.py", "--config", run_file, f"callbacks=[{{{name}: {{at_step: 2}}}}]")
    command.insert(3, "--max-restarts=1")
    finished = launch(command, timeout=180)
    assert finished.code == 0, finished.tail()
    assert sorted(losses(run_file.parent / "out")) == [1, 2, 3, 4]
    assert finished.stderr.count("step 1/4") == 1


def test_a_rank_that_raises_ends_all_of_them_with_its_message(run_file: Path) -> None:
    from tests.distributed.launch import torchrun

    name = "tests.distributed.breaking.RaisesOnRankOne"
    finished = launch(torchrun("train.py", "--config", run_file, f"callbacks=[{name}]"), timeout=100)
    assert finished.code == 1
    assert not finished.timed_out
    assert "error (rank 1): while training: RuntimeError: rank one is out of paper" in finished.stderr
    assert "no emergency checkpoint at step 2: not every rank has failed, or some are gone" in finished.stderr
