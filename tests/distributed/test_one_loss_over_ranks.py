"""Two ranks train as one: the same step, the same logged loss, every row once, and no rank waits for ever."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.distributed.launch import run_ranks
from tests.distributed.sft_worker import train_one

CASES: dict[str, dict[str, Any]] = {
    # 2 ranks x 1 row, with 1 and 15 labels: a mean per rank would weigh the single label 15 times too much.
    "uneven-labels": {"counts": [1, 15], "eval_counts": [4, 9, 2], "per_device_train_batch_size": 1},
    "lora": {"counts": [1, 15, 3, 25], "eval_counts": [4, 9, 2], "adapter": True, "per_device_train_batch_size": 2},
    "packed": {"counts": [1, 15, 3, 25], "eval_counts": [4, 9, 2], "packing": True, "max_length": 80},
    # 5 rows and 3 held-out rows do not divide; a save at every step.
    "rows-that-do-not-divide": {
        "counts": [1, 15, 3, 25, 7],
        "eval_counts": [4, 9, 2],
        "per_device_train_batch_size": 1,
        "per_device_eval_batch_size": 1,
        "max_steps": 3,
        "learning_rate": 0.1,
        "save_strategy": "steps",
        "save_steps": 1,
    },
}
ALONE: dict[str, dict[str, Any]] = {
    "uneven-labels": {"per_device_train_batch_size": 2},
    "lora": {"per_device_train_batch_size": 4},
    "packed": {"packing": False, "max_length": 256, "per_device_train_batch_size": 4},
    "rows-that-do-not-divide": {"per_device_train_batch_size": 2, "save_strategy": "no"},
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("ranks")
    arguments = {"folder": str(folder), "cases": CASES}
    return run_ranks("tests.distributed.sft_worker:train_all", arguments, timeout=240)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_make_the_step_of_one(ranks: list[dict[str, Any]], tmp_path: Path, name: str) -> None:
    alone = train_one(tmp_path, **{**CASES[name], **ALONE[name]})
    for rank in ranks:
        found = rank[name]
        assert found["world_size"] == 2
        for parameter, weights in alone["weights"].items():
            assert found["weights"][parameter] == pytest.approx(weights, abs=1e-6), parameter
        assert found["eval_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
        for key in ("loss", "grad_norm"):
            losses = [entry[key] for entry in found["history"] if key in entry]
            assert losses == pytest.approx([e[key] for e in alone["history"] if key in e], rel=1e-5)


@pytest.mark.slow
def test_every_row_is_read_once_over_all_ranks(ranks: list[dict[str, Any]]) -> None:
    read = [rank["rows-that-do-not-divide"]["supervised_read"] for rank in ranks]
    assert read == [[1, 3, 7], [15, 25, 0]]
    assert ranks[0]["rows-that-do-not-divide"]["checkpoints"] == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]


@pytest.mark.slow
def test_an_error_that_all_ranks_meet_leaves_the_last_update_to_go_on_from(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["after an error"]
        assert (found["said"], found["found"]) == ("out of ink", ["checkpoint-2", "checkpoint-3"])
        whole, resumed = found["losses"]
        assert len(whole) == 5
        # Step 3 had not been logged yet. The random states of both ranks are in the checkpoint: there is dropout.
        assert [*whole[:2], *whole[3:]] == resumed
