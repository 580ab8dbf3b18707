"""Two ranks read the mixture, order and transforms that one rank reads, and report the same losses by source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit import run
from tests.distributed.launch import run_ranks
from tests.tiny import chat, tiny_model, tiny_tokenizer

pytestmark = pytest.mark.slow


def written(folder: Path, name: str, count: int, answer: str) -> str:
    rows = [{"messages": chat(f"{name} {i}", answer * (1 + i % 7)), "level": i % 5} for i in range(count)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def config(folder: Path, ranks: int, packing: bool) -> Path:
    sections = {
        "model": {"name_or_path": str(folder / "model")},
        "data": {
            "train": [written(folder, "first", 23, "x"), written(folder, "second", 17, "yz")],
            "eval": [written(folder, "third", 5, "x"), written(folder, "fourth", 3, "qr")],
            "mixing": "interleave",
            "stopping_strategy": "all_exhausted",
            "sampler": {"curriculum": {"by": "level", "steps": 6}},
            "transform": "tests.unit.test_loading.masked",
            "packing": packing,
            "max_length": 96,
            "cache_dir": str(folder / "cache"),
        },
        "training": {
            "output_dir": str(folder / f"out-{ranks}"),
            "max_steps": 8,
            "per_device_train_batch_size": 4 // ranks,
            "per_device_eval_batch_size": 2,
            "learning_rate": 0.01,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "eval_strategy": "steps",
            "eval_steps": 8,
            "save_strategy": "no",
        },
    }
    path = folder / f"run-{ranks}.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")  # JSON is YAML
    return path


def metrics(folder: Path, ranks: int) -> list[dict[str, Any]]:
    lines = (folder / f"out-{ranks}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    kept = ("step", "loss", "supervised_tokens", "eval_loss", "eval_third_loss", "eval_fourth_loss")
    return [{key: value for key, value in json.loads(line).items() if key in kept} for line in lines]


def stream(folder: Path, ranks: int) -> Path:
    """Prepared rows for one rank, a stream of the same rows for two."""
    path = config(folder, ranks, packing=False)
    sections = json.loads(path.read_text(encoding="utf-8"))
    sections["data"] |= {"train": written(folder, "rows", 8, "x"), "mixing": "concatenate"}
    sections["data"] |= {"sampler": "sequential", "streaming": ranks == 2}
    sections["training"] |= {"max_steps": 6, "per_device_train_batch_size": 2 // ranks, "eval_strategy": "no"}
    sections["training"] |= {"dataloader_num_workers": ranks - 1, "save_strategy": "steps" if ranks == 2 else "no"}
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`padded`, `packed` and `stream`, each trained by one rank and by two; all of the latter in one launch."""
    root = tmp_path_factory.mktemp("data")
    of_two = []
    for name in ("padded", "packed", "stream"):
        case = root / name
        tiny_model().save_pretrained(case / "model")
        tiny_tokenizer().save_pretrained(case / "model")
        one, two = (stream(case, n) if name == "stream" else config(case, n, name == "packed") for n in (1, 2))
        run(one)
        of_two.append(str(two))
    run_ranks("tests.distributed.workers:run_all", {"configs": of_two}, timeout=240)
    return root


@pytest.mark.parametrize("name", ["padded", "packed"])
def test_two_ranks_train_on_the_rows_of_one(folder: Path, name: str) -> None:
    case = folder / name
    one, two = metrics(case, 1), metrics(case, 2)
    assert len(one) == len(two) == 8
    assert set(one[-1]) == {"step", "loss", "supervised_tokens", "eval_loss", "eval_third_loss", "eval_fourth_loss"}
    for left, right in zip(one, two, strict=True):
        assert left == pytest.approx(right, abs=2e-5)
    if name == "packed":
        plans = [(case / f"out-{ranks}" / "packing_plan.json").read_text() for ranks in (1, 2)]
        assert plans[0] == plans[1]
    built = list((case / "cache" / "tokens").glob("*/tokens.arrow"))
    assert len(built) == 4  # each of the four files was tokenised once


def test_two_ranks_read_a_stream_as_one_rank_reads_prepared_rows(folder: Path) -> None:
    case = folder / "stream"
    losses = [[entry["loss"] for entry in metrics(case, ranks) if "loss" in entry] for ranks in (1, 2)]
    assert len(losses[0]) == 6
    assert losses[0] == pytest.approx(losses[1], abs=2e-5)
    out = case / "out-2"
    report = json.loads((out / "data_report.json").read_text(encoding="utf-8"))
    assert (report["streaming"], report["rows_kept"]) == (True, 16)  # both ranks have read their second pass
    places = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(out.glob("checkpoint-*/stream-?.json"))]
    assert [(place["ranks"], place["index"], place["epoch"]) for place in places] == [(2, 4, 1), (2, 4, 1)]
