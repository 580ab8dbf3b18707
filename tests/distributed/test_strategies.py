"""Two real ranks under each strategy make the update of one rank, and save weights that load without DeepSpeed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.distributed.launch import build_operators, run_ranks
from tests.distributed.workers import train
from tests.tiny import tiny_model

pytestmark = pytest.mark.slow
LABELS = [1, 15, 3, 25, 2, 9, 4, 11]
# Adam with settings that are all away from their defaults, so that one that gets lost on the way shows.
ADAM: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 0.01,
    "adam_beta1": 0.8,
    "adam_beta2": 0.9,
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.5,
    "max_steps": 2,
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    build_operators()
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    return str(folder)


def weights(output_dir: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(output_dir / "final" / name)


def largest_difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    assert {name: tensor.shape for name, tensor in one.items()} == {n: t.shape for n, t in other.items()}
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def one_rank(model_dir: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("one_rank")
    layout = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
    return train(model_dir, str(folder), LABELS, **layout, **ADAM), folder


@pytest.mark.parametrize(
    ("asked", "through"),
    [
        ({"strategy": "ddp", "num_processes": 2, "backend": "gloo"}, "accelerate"),
        ({"strategy": "zero1"}, "torchrun"),
        ({"strategy": "zero2"}, "deepspeed"),
        ({"strategy": "zero2", "offload_optimizer": "cpu"}, "torchrun"),
        ({"strategy": "zero3"}, "torchrun"),
        ({"strategy": "zero3", "offload_optimizer": "cpu", "offload_param": "cpu"}, "deepspeed"),
    ],
    ids=lambda value: "-".join(str(v) for v in value.values()) if isinstance(value, dict) else value,
)
def test_two_ranks_make_the_updates_of_one(
    asked: dict[str, Any], through: str, model_dir: str, one_rank: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    reference, folder = one_rank
    arguments = {"model_dir": model_dir, "output_dir": str(tmp_path), "labels": LABELS, "distributed": asked}
    layout = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    first, second = run_ranks("tests.distributed.workers:train", {**arguments, **layout, **ADAM}, through=through)
    assert first["engaged"] == second["engaged"]
    assert first["engaged"]["strategy"] == asked["strategy"]
    offload = {name.removeprefix("offload_"): device for name, device in asked.items() if "offload" in name}
    assert first["engaged"]["offload"] == offload
    assert (first["engaged"]["world_size"], first["engaged"]["global_batch"]) == (2, 4)
    assert first["engaged"]["parameters_total"] == tiny_model().num_parameters()
    assert first["supervised_tokens"] == reference["supervised_tokens"] == [44, 70]
    for name in ("loss", "grad_norm"):
        assert first[name] == pytest.approx(reference[name], rel=1e-5), name
    assert largest_difference(weights(folder), weights(tmp_path)) < 1e-5


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_one_label_and_fifteen_weigh_by_their_tokens(strategy: str, model_dir: str, tmp_path: Path) -> None:
    alone = train(model_dir, str(tmp_path / "one"), [1, 15], per_device_train_batch_size=2)
    asked = {"distributed": {"strategy": strategy}, "per_device_train_batch_size": 1}
    arguments = {"model_dir": model_dir, "output_dir": str(tmp_path / "two"), "labels": [1, 15], **asked}
    first, _ = run_ranks("tests.distributed.workers:train", arguments)
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    assert largest_difference(weights(tmp_path / "one"), weights(tmp_path / "two")) < 1e-6


def test_an_adapter_under_zero3_is_saved_whole(model_dir: str, tmp_path: Path) -> None:
    alone = train(model_dir, str(tmp_path / "one"), [1, 15], adapter=True, per_device_train_batch_size=2)
    asked = {"distributed": {"strategy": "zero3"}, "adapter": True, "per_device_train_batch_size": 1}
    arguments = {"model_dir": model_dir, "output_dir": str(tmp_path / "two"), "labels": [1, 15], **asked}
    first, _ = run_ranks("tests.distributed.workers:train", arguments)
    assert first["engaged"]["parameters_trainable"] == alone["engaged"]["parameters_trainable"] == 2 * 4 * (64 + 48)
    one, two = (weights(tmp_path / name, "adapter_model.safetensors") for name in ("one", "two"))
    assert largest_difference(one, two) < 1e-6


def test_uneven_rows_end_and_count_once(model_dir: str, tmp_path: Path) -> None:
    """5 rows and 3 held-out rows on 2 ranks: the last update has one row, and nobody waits for the other."""
    labels, held_out = [1, 15, 3, 25, 2], [7, 2, 20]
    layout = {"eval_strategy": "epoch", "save_strategy": "steps", "save_steps": 1, "max_steps": 3, "learning_rate": 0.1}
    alone = train(model_dir, str(tmp_path / "one"), labels, evaluate=held_out, per_device_train_batch_size=2, **layout)
    arguments = {"model_dir": model_dir, "output_dir": str(tmp_path / "two"), "labels": labels, "evaluate": held_out}
    first, _ = run_ranks(
        "tests.distributed.workers:train",
        {**arguments, **layout, "per_device_train_batch_size": 1, "per_device_eval_batch_size": 1},
    )
    assert (first["steps"], alone["steps"]) == (3, 3)
    assert first["supervised_tokens"] == alone["supervised_tokens"] == [16, 44, 46]
    assert first["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert first["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-5)
    assert sorted(path.name for path in (tmp_path / "two").glob("checkpoint-*")) == [
        f"checkpoint-{n}" for n in (1, 2, 3)
    ]
