"""Two real ranks under each strategy make the updates of one rank, and save weights that load without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.launch import build_operators, run_ranks
from tests.distributed.workers import train
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
# Adam with settings that are all away from their defaults, so that one that gets lost on the way shows.
UPDATES: dict[str, Any] = {
    "labels": [1, 15, 3, 25, 2, 9, 4, 11],
    "gradient_accumulation_steps": 2,
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "max_steps": 2,
    # Rows of 31 to 55 tokens: in some micro-batches one rank scores in chunks and the other does not.
    "loss_chunk": 40,
}
# 5 rows and 3 held-out rows do not divide by 2, and every step is saved.
UNEVEN: dict[str, Any] = {
    "labels": [1, 15, 3, 25, 2],
    "evaluate": [7, 2, 20],
    "eval_strategy": "epoch",
    "per_device_eval_batch_size": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "max_steps": 3,
    "learning_rate": 0.1,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp", "num_processes": 2, "backend": "gloo"},
    "zero1": {"strategy": "zero1"},
    "zero2": {"strategy": "zero2"},
    "zero2-offload": {"strategy": "zero2", "offload_optimizer": "cpu"},
    "zero3": {"strategy": "zero3"},
    "zero3-offload": {"strategy": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"},
}
OTHERS: dict[str, dict[str, Any]] = {
    # A mean per rank would weigh the single label 15 times too much.
    "labels": {"distributed": {"strategy": "zero3"}, "labels": [1, 15]},
    "adapter": {"distributed": {"strategy": "zero3"}, "labels": [1, 15], "adapter": True},
    "uneven": {"distributed": {"strategy": "zero2"}, **UNEVEN},
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    build_operators()
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(model_dir: str, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """What both ranks returned, by case; all in one launch, since most of its time is imports."""
    cases = {name: {"distributed": asked, **UPDATES} for name, asked in STRATEGIES.items()} | OTHERS
    shared = {"model_dir": model_dir, "per_device_train_batch_size": 1}
    runs = [{"output_dir": str(folder / name), **shared, **case} for name, case in cases.items()]
    returned = run_ranks("tests.distributed.workers:train_all", {"cases": runs}, timeout=240)
    return {name: [rank[i] for rank in returned] for i, name in enumerate(cases)}


@pytest.fixture(scope="module")
def alone(model_dir: str, folder: Path) -> dict[str, Any]:
    """The same updates on one rank, with batches twice as large."""
    return train(model_dir, str(folder / "alone"), per_device_train_batch_size=2, **UPDATES)


def weights(output_dir: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(output_dir / "final" / name)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert {name: tensor.shape for name, tensor in one.items()} == {n: t.shape for n, t in other.items()}
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_ranks_make_the_updates_of_one(
    name: str, ranks: dict[str, list[dict[str, Any]]], alone: dict[str, Any], folder: Path
) -> None:
    first, second = ranks[name]
    assert first["loss"] == second["loss"]
    assert first["supervised_tokens"] == alone["supervised_tokens"] == [44, 70]
    for key in ("loss", "grad_norm"):
        assert first[key] == pytest.approx(alone[key], rel=1e-5), key
    assert largest_difference(weights(folder / "alone"), weights(folder / name)) < 1e-5


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_was_asked_for_engaged(name: str, ranks: dict[str, list[dict[str, Any]]]) -> None:
    asked, found = STRATEGIES[name], ranks[name][0]["engaged"]
    offload = {key.removeprefix("offload_"): device for key, device in asked.items() if key.startswith("offload")}
    size = tiny_model().num_parameters()
    held, predicted = found.pop("parameters_on_rank"), found.pop("predicted_memory")
    # ZeRO-3 pads each weight to a multiple of the ranks.
    assert size / 2 <= held < 1.01 * size / 2 if asked["strategy"] == "zero3" else held == size
    assert sum(predicted.values()) > 0
    assert found == {
        "strategy": asked["strategy"],
        "world_size": 2,
        "local_world_size": 2,
        "nodes": 1,
        "device": "cpu",
        "precision": "fp32",
        "micro_batch": 1,
        "accumulation": 2,
        "global_batch": 4,
        "parameters_total": size,
        "parameters_trainable": size,
        "offload": offload,
    }


@pytest.mark.parametrize("name", ["zero2", "zero3-offload"])
def test_what_was_saved_loads_without_deepspeed(
    name: str, ranks: dict[str, list[dict[str, Any]]], folder: Path
) -> None:
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder / name / "final", output_loading_info=True)
    model, info = loaded
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert largest_difference(weights(folder / name), model.state_dict()) == 0


def test_one_label_and_fifteen_weigh_by_their_tokens(
    ranks: dict[str, list[dict[str, Any]]], model_dir: str, folder: Path, tmp_path: Path
) -> None:
    alone = train(model_dir, str(tmp_path), [1, 15], per_device_train_batch_size=2)
    assert ranks["labels"][0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert largest_difference(weights(tmp_path), weights(folder / "labels")) < 1e-6


def test_an_adapter_under_zero3_is_saved_whole(
    ranks: dict[str, list[dict[str, Any]]], model_dir: str, folder: Path, tmp_path: Path
) -> None:
    alone = train(model_dir, str(tmp_path), [1, 15], adapter=True, per_device_train_batch_size=2)
    trainable = 2 * 4 * ((32 + 32) + (32 + 16))  # layers x rank x (q_proj, v_proj: inputs + outputs)
    assert ranks["adapter"][0]["engaged"]["parameters_trainable"] == trainable
    name = "adapter_model.safetensors"
    assert largest_difference(weights(tmp_path, name), weights(folder / "adapter", name)) < 1e-6
    assert ranks["adapter"][0]["loss"] == pytest.approx(alone["loss"], rel=1e-6)


def test_rows_that_do_not_divide_are_counted_once(
    ranks: dict[str, list[dict[str, Any]]], model_dir: str, folder: Path, tmp_path: Path
) -> None:
    alone = train(model_dir, str(tmp_path), **{**UNEVEN, "save_strategy": "no"}, per_device_train_batch_size=2)
    found = ranks["uneven"][0]
    assert (found["steps"], found["supervised_tokens"]) == (3, [16, 44, 46])
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    saved = sorted(path.name for path in (folder / "uneven").glob("checkpoint-*"))
    assert saved == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
