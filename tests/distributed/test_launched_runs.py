"""`train.py` under real launchers: what was asked for runs, or the run is refused before the model loads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.distributed.launch import ROOT, Finished, accelerate, build_operators, launch, run_ranks
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels

pytestmark = pytest.mark.slow


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """A run of two updates on the tiny model."""
    model, data, config = tmp_path / "model", tmp_path / "train.jsonl", tmp_path / "run.yaml"
    tiny_model().save_pretrained(model)
    tiny_tokenizer().save_pretrained(model)
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_with_labels(1, 15, 3, 25)), encoding="utf-8")
    sections = {
        "model": {"name_or_path": str(model)},
        "data": {"train": str(data), "max_length": 256, "cache_dir": str(tmp_path / "cache")},
        "training": {
            "output_dir": str(tmp_path / "out"),
            "max_steps": 2,
            "per_device_train_batch_size": 1,
            "save_strategy": "no",
        },
    }
    config.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return config


def refused(finished: Finished, run_file: Path) -> str:
    """What the first rank says; nobody trained, loaded a model, or showed a traceback of ours."""
    assert finished.code == 1, finished.tail()  # a launcher ends with 1 whatever its processes end with
    assert "exit status 2" in finished.stderr or "exitcode  : 2" in finished.stderr
    assert not (run_file.parent / "out" / "final").exists()
    assert "Loading weights" not in finished.stderr
    assert "sft_toolkit/" not in finished.stderr
    assert finished.stderr.count("error: ") == 1
    said = finished.stderr.split("error: ")[1]
    return said.split("Traceback")[0]  # the launcher's own


def test_accelerate_that_starts_one_process_for_two(run_file: Path) -> None:
    finished = launch(accelerate("--cpu", "--num_processes", "2", "train.py", "--config", run_file))
    said = refused(finished, run_file)
    assert said.startswith("`accelerate launch` was asked for several processes and started one, as it does with --cpu")
    assert not (run_file.parent / "out").exists()


def test_two_ranks_refuse_what_can_not_engage_before_the_model_loads(run_file: Path) -> None:
    """Fewer processes than asked for, a JSON that contradicts the arguments, FSDP on a CPU."""
    settings = run_file.parent / "ds.json"
    zero = {"train_micro_batch_size_per_gpu": 4, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    settings.write_text(json.dumps(zero), encoding="utf-8")
    asked = ["distributed.num_processes=4", f"distributed.deepspeed={settings}", "distributed.strategy=fsdp"]
    lines = [[str(run_file), override] for override in asked]
    first, second = run_ranks("tests.distributed.workers:command_lines", {"lines": lines})
    assert [code for code, _ in [*first, *second]] == [2] * 6
    for _, said in second:
        assert "error" not in said  # the first rank speaks for both
    processes, table, fsdp = (said.split("error: ")[1] for _, said in first)
    assert processes.startswith(
        "distributed.num_processes: 4 asked for, 2 started by torchrun (`torchrun --nproc_per_node 2"
    )
    assert table.splitlines()[:5] == [
        f"{settings} contradict the arguments of the run:",
        "  key                             JSON  YAML",
        "  train_micro_batch_size_per_gpu  4     1  (training.per_device_train_batch_size)",
        "  bf16.enabled                    true  false  (training.bf16 / precision)",
        'Write "auto" in the JSON and it follows the arguments, or change the arguments.',
    ]
    assert fsdp.startswith("fsdp: accelerate has FSDP on accelerators only; take zero3")
    for _, said in first:
        assert said.count("error: ") == 1
        assert "Loading weights" not in said
        assert "Traceback" not in said
    assert not (run_file.parent / "out" / "final").exists()


def test_two_sources_of_deepspeed_settings(run_file: Path) -> None:
    file = ROOT / "configs" / "accelerate" / "deepspeed.yaml"
    launcher = accelerate("--config_file", file, "--num_processes", "2", "train.py", "--config", run_file)
    finished = launch([*launcher, "distributed.deepspeed=configs/ds_zero3.json"])
    said = refused(finished, run_file)
    assert said.startswith(
        "distributed.deepspeed: configs/ds_zero3.json, and the launcher brings DeepSpeed settings of its own "
        "(configs/ds_zero2.json); keep one of the two"
    )


def test_a_launchers_zero3_that_says_nothing_of_the_weights_saves_them_whole(run_file: Path) -> None:
    build_operators()
    settings, file = run_file.parent / "ds.json", run_file.parent / "accelerate.yaml"
    settings.write_text('{"train_batch_size": "auto", "zero_optimization": {"stage": 3}}', encoding="utf-8")
    deepspeed = {"deepspeed_config_file": str(settings)}
    launcher = {"distributed_type": "DEEPSPEED", "deepspeed_config": deepspeed, "num_machines": 1, "num_processes": 2}
    file.write_text(json.dumps(launcher), encoding="utf-8")
    command = accelerate("--config_file", file, "train.py", "--config", run_file, "training.save_strategy=steps")
    finished = launch([*command, "training.save_steps=2"], timeout=180)
    assert finished.code == 0, finished.tail()
    out = run_file.parent / "out"
    shapes = {name: weight.shape for name, weight in tiny_model().state_dict().items()}
    for folder in ("checkpoint-2", "final"):
        assert {name: t.shape for name, t in load_file(out / folder / "model.safetensors").items()} == shapes
    manifest = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert manifest["engaged"]["strategy"] == "zero3"
    assert "FutureWarning" not in finished.stderr


def test_a_launchers_zero3_that_forbids_the_weights_is_refused(run_file: Path) -> None:
    fields = ("--zero_stage", "3", "--zero3_save_16bit_model", "false")
    finished = launch(accelerate("--use_deepspeed", "--num_processes", "2", *fields, "train.py", "--config", run_file))
    assert refused(finished, run_file).startswith(
        "the DeepSpeed settings of `accelerate launch`: zero_optimization.stage3_gather_16bit_weights_on_model_save: "
        "without it ZeRO-3 saves no weights that load without DeepSpeed; write true"
    )


@pytest.mark.parametrize("file", ["cpu_two_processes", "deepspeed"])
def test_the_accelerate_files_start_what_they_say(file: str, run_file: Path) -> None:
    build_operators()
    path = ROOT / "configs" / "accelerate" / f"{file}.yaml"
    finished = launch(
        accelerate("--config_file", path, "--num_processes", "2", "train.py", "--config", run_file), timeout=180
    )
    assert finished.code == 0, finished.tail()
    engaged = json.loads((run_file.parent / "out" / "run.json").read_text(encoding="utf-8"))["engaged"]
    assert engaged["strategy"] == {"cpu_two_processes": "ddp", "deepspeed": "zero2"}[file]
    assert (engaged["world_size"], engaged["global_batch"], engaged["precision"]) == (2, 2, "fp32")
    assert (run_file.parent / "out" / "final" / "model.safetensors").is_file()
