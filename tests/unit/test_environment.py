"""Variables and switches of a training are undone, and stand again only while it works."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sft_toolkit import assemble, commands
from sft_toolkit.engines.environment import Footprint, environment_kept, without_variable
from sft_toolkit.errors import ConfigError


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    before = dict(os.environ)
    yield
    torch.use_deterministic_algorithms(False)
    assert dict(os.environ) == {**before, "PYTEST_CURRENT_TEST": os.environ["PYTEST_CURRENT_TEST"]}


def test_what_the_stack_writes_is_undone_and_what_others_write_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("WANDB_NAME", "before")
    with suppress(RuntimeError), environment_kept():
        os.environ["ACCELERATE_MIXED_PRECISION"] = "bf16"
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        del os.environ["ACCELERATE_USE_DEEPSPEED"]  # as TrainingArguments does on a GPU
        os.environ["WANDB_NAME"] = "mine"
        raise RuntimeError
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "no"
    assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
    assert "FSDP_CPU_RAM_EFFICIENT_LOADING" not in os.environ
    assert os.environ["WANDB_NAME"] == "mine"


def test_a_variable_is_absent_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_CONFIG_DS_FIELDS", "zero_stage")
    with without_variable("ACCELERATE_CONFIG_DS_FIELDS"), without_variable("ACCELERATE_NEVER_SET"):
        assert "ACCELERATE_CONFIG_DS_FIELDS" not in os.environ
    assert os.environ["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage"


def test_a_footprint_stands_only_while_its_trainer_works() -> None:
    footprint = Footprint()
    with footprint.recorded():
        os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
        torch.use_deterministic_algorithms(True)
    assert "ACCELERATE_USE_DEEPSPEED" not in os.environ
    assert not torch.are_deterministic_algorithms_enabled()
    with footprint.in_place():
        with footprint.in_place():  # evaluation inside a training
            pass
        assert os.environ["ACCELERATE_USE_DEEPSPEED"] == "true"
        assert torch.are_deterministic_algorithms_enabled()
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    assert not {"ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP", "CUBLAS_WORKSPACE_CONFIG"} & set(os.environ)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("command", [commands.check, commands.prepare_only, commands.preview, assemble.run])
def test_a_command_leaves_the_environment_as_it_was(
    command: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def writes(*args: Any) -> None:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = "as the first import of peft does"
        raise ConfigError("stop here")

    for name in ("commands.check_run", "commands.prepare_data", "assemble.refuse_start"):
        monkeypatch.setattr(f"sft_toolkit.{name}", writes)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{name_or_path: a/b}}\ndata: {{train: a/b}}\ntraining: {{output_dir: {tmp_path}/out}}\n")
    with pytest.raises(ConfigError, match="stop here"):
        command(str(file))
    assert "TORCHINDUCTOR_CACHE_DIR" not in os.environ
