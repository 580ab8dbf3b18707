"""A search by section `sweep`: mistakes at once, a table, a picture, the best file; killed, it goes on."""

from __future__ import annotations

import csv
from typing import Any

import pytest
import yaml

import sft_toolkit.sweep.search as module
from sft_toolkit.config import load_config
from tests.e2e.workshop import Workshop

SWEEP: dict[str, Any] = {
    "trials": 2,
    "search": {"lora.r": [2, 4], "training.learning_rate": {"min": 1e-4, "max": 1e-1, "log": True}},
}


def table(shop: Workshop) -> list[dict[str, str]]:
    with (shop.out / "trials.csv").open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_every_mistake_of_the_section_at_once(workshop: Workshop) -> None:
    workshop.config["sweep"] = {
        "trails": 3,
        "sampler": "grid",
        "metric": "eval_los",
        "search": {"lora.r": [0, 8], "lora.rr": [1], "training.learning_rate": {"min": 2, "max": 1}, "lora.dropout": 1}
        | {"training.weight_decay": {"min": 0, "max": 0.1}},
    }
    found = workshop.run("check")
    assert found.code == 2
    for part in (
        "sweep.trails: unknown key; did you mean 'trials'?",
        "sweep.metric: an evaluation reports no 'los'; did you mean 'loss'?",
        "override 'lora.r=0': lora.r: 0 is below the minimum, 1",
        "sweep.search.lora.rr: unknown key",
        "sweep.search.training.learning_rate: min (2) is not below max (1)",
        "sweep.search.training.weight_decay: a grid takes a list of values; or write sampler: tpe",
        "sweep.search.lora.dropout: expected a list of values or {min: , max: }, not 1",
    ):
        assert part in found.err


def test_a_search_that_is_cut_goes_on_as_if_it_had_not_been(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    workshop.config["training"] |= {"max_steps": 1, "eval_strategy": "no", "save_strategy": "no"}
    workshop.config["sweep"] = SWEEP
    whole = workshop.run("train")
    assert whole.code == 0, whole.err
    expected = table(workshop)
    assert [row["trial"] for row in expected] == ["trial-000", "trial-001"]
    best = min((row for row in expected if row["state"] == "complete"), key=lambda row: float(row["eval_loss"]))
    chosen = load_config(workshop.out / "best.yaml")
    assert chosen.lora is not None
    assert (chosen.sweep, str(chosen.lora.r)) == (None, best["lora.r"])
    assert chosen.training["output_dir"] == str(workshop.out / "best")
    assert (workshop.out / "trials.png").read_bytes().startswith(b"\x89PNG")
    ran = yaml.safe_load((workshop.out / best["trial"] / "config.resolved.yaml").read_text(encoding="utf-8"))
    assert ran["lora"]["r"] == chosen.lora.r

    workshop.out = workshop.folder / "cut"
    workshop.config["training"]["output_dir"] = str(workshop.out)
    with monkeypatch.context() as patched:  # what kill -9 leaves: a trained trial that nobody was told about
        patched.setattr(module, "value_of", _killed)
        with pytest.raises(SystemExit):
            workshop.run("train")
    assert workshop.run("train").code == 0
    assert table(workshop) == expected
    again = workshop.run("train", "sweep.sampler_seed=1")
    assert again.code == 2
    assert "sweep.sampler_seed: was 42 when the search began, is 1 now" in again.err


def _killed(*args: Any) -> float:
    raise SystemExit(9)
