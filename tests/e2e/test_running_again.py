"""The same command twice, and with something changed: nothing to do, more to do, or refused by name."""

from __future__ import annotations

import copy
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_toolkit import load_config
from sft_toolkit.running.arguments import arguments_from, as_written
from tests.e2e.workshop import Outcome, Workshop


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in [folder, *folder.rglob("*")]}


@pytest.fixture
def finished(workshop: Workshop) -> Workshop:
    """A finished full fine-tune; each test changes something and runs it again."""
    del workshop.config["lora"]
    del workshop.config["data"]["eval"]
    for name in ("eval_strategy", "eval_steps"):
        del workshop.config["training"][name]
    workshop.config["training"] |= {
        "save_steps": 2,
        "learning_rate": "5e-3",
        "gradient_checkpointing": False,
        "bf16": False,
        "disable_tqdm": True,
        "lr_scheduler_type": "constant",
    }
    first = workshop.run("train")
    assert first.code == 0, first.err
    return workshop


def nothing_to_do(workshop: Workshop, outcome: Outcome, before: dict[Path, int]) -> None:
    assert outcome.code == 0, outcome.err
    assert f"nothing to do: {workshop.out} holds this run, finished" in outcome.out
    assert times(workshop.out) == before


def test_the_same_run_written_in_other_ways_is_finished(finished: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    before = times(finished.out)
    again = finished.run("train")
    nothing_to_do(finished, again, before)
    assert "was written after" not in again.err

    file = finished.folder / "train.jsonl"
    os.utime(file, (time.time() + 60, time.time() + 60))
    again = finished.run("train")
    nothing_to_do(finished, again, before)
    assert f"data.train: {file} was written after this run had begun" in again.err

    written = copy.deepcopy(finished.config)
    finished.config["training"]["learning_rate"] = 0.005
    finished.config["training"]["save_total_limit"] = None
    finished.config["training"]["seed"] = 42
    finished.config["training"]["activation_checkpointing"] = finished.config["training"].pop("gradient_checkpointing")
    finished.config["lora"] = None
    finished.config["data"] |= {"train": [{"path": finished.config["data"]["train"]}], "packing": False}
    nothing_to_do(finished, finished.run("train"), before)
    nothing_to_do(finished, finished.run("train", "training.learning_rate=5e-03", "training.weight_decay=0"), before)

    monkeypatch.chdir(finished.folder)
    finished.config = copy.deepcopy(written)
    finished.config["model"]["name_or_path"] = "model"
    finished.config["data"] |= {"train": "./train.jsonl", "cache_dir": "elsewhere"}
    finished.config["training"]["output_dir"] = "out/"
    assert finished.run("train").code == 0
    assert times(finished.out) == before

    finished.config = json.loads(json.dumps(yaml.safe_load((finished.out / "config.resolved.yaml").read_text())))
    nothing_to_do(finished, finished.run("train"), before)


@pytest.mark.parametrize(
    "training",
    [
        {"max_steps": 6, "save_steps": 2, "optim": "sgd"},
        {"max_steps": -1, "num_train_epochs": 1, "save_strategy": "epoch"},
        {"save_strategy": "no", "global_batch_size": 4},
        {"report_to": [], "precision": "fp32", "save_total_limit": 1, "warmup_steps": 0.1, "lr_scheduler_kwargs": {}},
    ],
    ids=["steps", "epochs", "unsaved", "spelled out"],
)
def test_in_other_configurations_too(workshop: Workshop, training: dict[str, Any]) -> None:
    del workshop.config["training"]["max_steps"]
    workshop.config["training"] |= {"max_steps": 2, **training}
    first = workshop.run("train")
    assert first.code == 0, first.err
    before = times(workshop.out)
    nothing_to_do(workshop, workshop.run("train"), before)
    run = workshop.json("run.json")
    (workshop.out / "run.json").write_text(json.dumps(run | {"asked_fingerprint": "of another spelling"}))
    nothing_to_do(workshop, workshop.run("train"), times(workshop.out))


def test_what_changes_nothing_about_a_finished_run_is_told(finished: Workshop) -> None:
    before = times(finished.out)
    again = finished.run("train", "training.logging_steps=5")
    nothing_to_do(finished, again, before)
    assert "training.logging_steps: 1 instead of 5" not in again.err
    assert "training.logging_steps: 5 instead of 1 changes nothing about a finished run" in again.err


def test_another_run_in_the_same_folder_is_refused_by_name(finished: Workshop) -> None:
    before = times(finished.out)
    outcome = finished.run("train", "training.learning_rate=1e-3", "data.max_length=48", "training.seed=7")
    assert outcome.code == 2
    assert "training.learning_rate: was 0.005 when the checkpoint was made, is 0.001 now" in outcome.err
    assert "data.max_length: was 64 when the checkpoint was made, is 48 now" in outcome.err
    assert "training.seed: was 42 when the checkpoint was made, is 7 now" in outcome.err
    del finished.config["training"]["learning_rate"]  # back to a default is a change too
    assert "training.learning_rate: was 0.005" in finished.run("train").err
    assert times(finished.out) == before


def test_more_steps_and_epochs_go_on_and_fewer_are_refused(finished: Workshop) -> None:
    outcome = finished.run("train", "training.max_steps=6")
    assert outcome.code == 0, outcome.err
    assert [line["step"] for line in finished.metrics()] == [1, 2, 3, 4, 5, 6]
    before = times(finished.out)
    outcome = finished.run("train", "training.max_steps=5")
    assert outcome.code == 2
    assert f"training.max_steps: 5 ends before '{finished.out / 'checkpoint-6'}', which is at step 6" in outcome.err
    outcome = finished.run("train", "training.max_steps=-1", "training.num_train_epochs=1")
    assert outcome.code == 2
    assert "training.num_train_epochs: 1.0 ends before" in outcome.err
    assert times(finished.out) == before


def test_a_finished_run_without_a_checkpoint_can_not_go_on(finished: Workshop) -> None:
    for folder in finished.out.glob("checkpoint-*"):
        shutil.rmtree(folder)
    before = times(finished.out)
    outcome = finished.run("train", "training.max_steps=6")
    assert outcome.code == 2
    assert "holds a finished run, which kept no checkpoint to go on from; training.max_steps can't be" in outcome.err
    assert times(finished.out) == before


def test_a_run_that_was_killed_after_its_last_checkpoint_trains_no_step_more(finished: Workshop) -> None:
    weights = (finished.out / "final" / "model.safetensors").read_bytes()
    metrics = [{"step": line["step"], "loss": line["loss"]} for line in finished.metrics()]
    run = finished.json("run.json")
    (finished.out / "run.json").write_text(json.dumps(run | {"exit_state": "running"}))
    shutil.rmtree(finished.out / "final")
    assert finished.run("train").code == 0
    assert (finished.out / "final" / "model.safetensors").read_bytes() == weights
    assert [{"step": line["step"], "loss": line["loss"]} for line in finished.metrics()] == metrics
    assert finished.metrics()[-1]["train_loss"] > 1  # that of the first time: of no step there is no mean
    assert finished.json("run.json")["exit_state"] == "finished"
    assert finished.json("run.json")["step"] == 4


def test_a_data_file_that_was_changed_since_is_refused_and_not_mixed_in(finished: Workshop) -> None:
    file = finished.folder / "train.jsonl"
    rows = file.read_text()
    file.write_text(rows.replace("say 3", "say 4"))  # the same length
    outcome = finished.run("train", "training.max_steps=6")
    assert outcome.code == 2
    assert f"data.train: its rows are not those that '{finished.out / 'checkpoint-4'}' was trained on" in outcome.err
    assert finished.json("run.json")["exit_state"] == "finished"
    file.write_text(rows)
    assert finished.run("train", "training.max_steps=6").code == 0


def test_a_draft_comes_to_the_same_configuration_as_the_arguments_that_run(workshop: Workshop) -> None:
    from sft_toolkit.rehearsal.draft import Draft

    config = load_config(workshop.write_config())
    sections = (config.training, config.data, config.distributed)
    assert as_written(arguments_from(*sections, Draft), config.training) == as_written(
        arguments_from(*sections), config.training
    )
