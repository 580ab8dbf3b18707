"""A checkpoint of two ranks goes on with one, one of one with two, with the losses of the run that never stopped."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import build_operators, run_ranks
from tests.tiny import tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow
CASES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero2-offload": {"zero_stage": 2, "offload_optimizer": True},
    "zero3": {"zero_stage": 3},
    "zero3-adapter": {"zero_stage": 3, "adapter": True},
}
BATCH = {"global_batch_size": 4}


WORKER = "tests.distributed.world_worker:train_all"


@pytest.fixture
def model_dir(tmp_path: Path) -> str:
    build_operators()
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def runs(folder: Path, names: Iterable[str], suffix: str, resume: str | None = None) -> list[dict[str, Any]]:
    """Those cases, written to `NAME-SUFFIX`, from checkpoint 2 of `NAME-RESUME`."""
    return [
        {"output_dir": str(folder / f"{name}-{suffix}"), **BATCH, **CASES[name]}
        | ({"resume": str(folder / f"{name}-{resume}" / "checkpoint-2")} if resume else {})
        for name in names
    ]


def by_name(names: Iterable[str], found: list[dict[str, Any]]) -> dict[str, list[float]]:
    return {name: run["loss"] for name, run in zip(names, found, strict=False)}


def test_others_go_on_where_some_have_stopped(model_dir: str, tmp_path: Path) -> None:
    zero = [name for name in CASES if name != "ddp"]
    first, _ = run_ranks(WORKER, {"model_dir": model_dir, "runs": runs(tmp_path, CASES, "two")}, timeout=180)
    refused = [
        {"output_dir": str(tmp_path / "other"), "zero_stage": 3, "global_batch_size": 2}
        | {"resume": str(tmp_path / "zero3-two" / "checkpoint-2")},
        {"output_dir": str(tmp_path / "other"), **BATCH, "adapter": True}
        | {"resume": str(tmp_path / "zero3-adapter-two" / "checkpoint-2")},
    ]
    of_one = [*runs(tmp_path, CASES, "one-after-two", "two"), *refused, *runs(tmp_path, zero, "one")]
    (found,) = run_ranks(WORKER, {"model_dir": model_dir, "runs": of_one}, processes=1, timeout=300)
    whole, carried = by_name(CASES, first), by_name(CASES, found)
    for name in CASES:
        assert len(whole[name]) == 4
        assert carried[name] == pytest.approx(whole[name], abs=2e-6), name  # two of them are the checkpoint's history
    _says_how_to_go_on(tmp_path, *found[len(CASES) : len(CASES) + 2])

    # `--use_deepspeed` alone leaves the settings to the arguments.
    of_two = {"model_dir": model_dir, "runs": runs(tmp_path, zero, "two-after-one", "one")}
    again, _ = run_ranks(WORKER, of_two, timeout=240, through="deepspeed")
    alone, carried = by_name(zero, found[len(CASES) + 2 :]), by_name(zero, again)
    for name in zero:
        assert carried[name] == pytest.approx(alone[name], abs=2e-6), name
    assert again[zero.index("zero3")]["block"].splitlines()[:4] == [
        "processes   2 processes on 1 node, device cpu",
        "strategy    zero3",
        "precision   fp32",
        "batch       1 x 2 accumulated x 2 ranks = 4",
    ]


def _says_how_to_go_on(folder: Path, other_batch: str, other_strategy: str) -> None:
    checkpoint = folder / "zero3-two" / "checkpoint-2"
    assert other_batch == (
        f"{checkpoint} was written with 4 rows an update over 2 ranks, and now 1 make it 2: the schedule and the place "
        f"in the data would be wrong. Set training.global_batch_size: 4, or start anew from its weights: "
        f"model.name_or_path: {checkpoint} and another training.output_dir"
    )
    checkpoint = folder / "zero3-adapter-two" / "checkpoint-2"
    assert other_strategy == (
        f"{checkpoint} was written under zero3, and this is ddp: the optimizer state of one is of no use to the other. "
        f"Set the strategy back, or start anew from its weights: lora.adapter: {checkpoint} and another "
        "training.output_dir"
    )
