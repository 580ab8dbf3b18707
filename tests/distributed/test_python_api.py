"""Trainings started from Python hold what those from YAML hold: asked is engaged, and nothing stays behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.distributed.api_worker import train_one
from tests.distributed.launch import build_operators, run_ranks
from tests.distributed.routed import routed_model
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
# In this order, in one process: each would take over what the one before it left behind.
RUNS: dict[str, dict[str, Any]] = {
    "zero3": {"zero_stage": 3},
    "plain": {},
    "zero2-offload": {"zero_stage": 2, "offload_optimizer": True},
    "deterministic": {"full_determinism": True},
    "bf16": {"bf16": True},
    "overridden": {"zero_stage": 2, "offload_optimizer": True, "own_optimizer": "overridden"},
    "passed": {"zero_stage": 2, "own_optimizer": "passed"},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    build_operators()
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def test_one_process_runs_one_engine_after_the_other(model_dir: str, tmp_path: Path) -> None:
    arguments = {"model_dir": model_dir, "folder": str(tmp_path), "runs": RUNS}
    (found,) = run_ranks("tests.distributed.api_worker:train_all", arguments, processes=1)
    engaged = {name: run["engaged"] for name, run in found.items() if isinstance(run, dict)}
    assert engaged == {
        "zero3": "zero3",
        "plain": "ddp",
        "zero2-offload": "zero2",
        "deterministic": "ddp",
        "bf16": "ddp",
    }
    for name in engaged:
        assert found[name]["environment_changed"] == [], name
        assert not found[name]["deterministic"]
        exact = name != "bf16"
        assert found[name]["precision"] == ("no" if exact else "bf16")
        assert found[name]["loss"] == pytest.approx(found["plain"]["loss"], abs=1e-5 if exact else 2e-3)
    assert found["overridden"].startswith(
        "optimizer: torch.optim.sgd.SGD can't run under optimizer offload: accelerate"
    )
    assert found["passed"].startswith("optimizers: under DeepSpeed Trainer makes its own and would ignore these")


def test_two_ranks_take_a_model_by_name_apart(model_dir: str, tmp_path: Path) -> None:
    routed_dir = str(tmp_path / "routed-model")
    routed_model().save_pretrained(routed_dir)
    tiny_tokenizer().save_pretrained(routed_dir)
    routed = {"model_dir": routed_dir, "loads_by": "routed", "optim": "sgd", "activation_checkpointing": False}
    runs = {
        "zero3": {"zero_stage": 3},
        "module": {"zero_stage": 3, "loads_by": "auto"},
        "plain": {},
        "experts": {"zero_stage": 3, **routed},
    }
    arguments = {"model_dir": model_dir, "folder": str(tmp_path), "runs": runs}
    first, second = run_ranks("tests.distributed.api_worker:train_all", arguments)
    assert first["zero3"]["engaged"] == second["zero3"]["engaged"] == "zero3"
    assert first["plain"]["engaged"] == "ddp"
    for name in ("zero3", "module"):
        assert first[name]["loss"] == pytest.approx(first["plain"]["loss"], abs=1e-5)
    _experts_are_gathered_together([first["experts"], second["experts"]], routed, tmp_path)
    saved, plain = (load_file(tmp_path / name / "model.safetensors") for name in ("zero3", "plain"))
    assert {name: tensor.shape for name, tensor in saved.items()} == {n: t.shape for n, t in plain.items()}
    assert max(float((saved[name] - plain[name]).abs().max()) for name in plain) < 1e-5


def _experts_are_gathered_together(ranks: list[dict[str, Any]], routed: dict[str, Any], folder: Path) -> None:
    """Ranks that call different experts make the updates of one process, and their weights are saved whole."""
    whole = {**routed, "per_device_train_batch_size": 2}
    alone: Any = train_one(output_dir=folder / "experts-alone", **whole)
    assert ranks[0]["experts"] != ranks[1]["experts"]
    assert ranks[0]["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    saved, plain = (load_file(folder / name / "model.safetensors") for name in ("experts", "experts-alone"))
    assert max(float((saved[name] - plain[name]).abs().max()) for name in plain) < 1e-5
