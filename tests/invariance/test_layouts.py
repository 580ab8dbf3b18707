"""Loss, gradient norm and weights of three updates are those of a plain full batch, in every layout."""

from __future__ import annotations

import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from tests.invariance.layouts import LAYOUTS, STRATEGIES, TOLERANCE, Difference, compare, run_everything, table

DOCUMENT = Path(__file__).parents[2] / "docs" / "invariance.md"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_everything(tmp_path_factory.mktemp("layouts"))


@pytest.mark.slow
def test_every_layout_makes_the_updates_of_a_plain_full_batch(found: dict[str, Any]) -> None:
    differences = compare(found)
    sys.stdout.write(f"\n{table(differences)}")
    assert {name: d for name, d in differences.items() if max(d) > TOLERANCE} == {}


@pytest.mark.slow
def test_the_layouts_are_what_they_say(found: dict[str, Any]) -> None:
    assert {name: run["world"] for name, run in found.items()} == {str(layout): layout.ranks for layout in LAYOUTS}
    labels = {8: 70, 16: 162}  # of the first 8 rows, and of all
    assert {name: run["supervised_tokens"][0] for name, run in found.items()} == {
        str(layout): labels[len(layout.updates[0])] for layout in LAYOUTS
    }
    assert {name: run["engine"] for name, run in found.items()} == {
        str(layout): layout.strategy.startswith("ZeRO") for layout in LAYOUTS
    }


def test_every_pair_of_options_is_met_under_every_strategy() -> None:
    options = ("micro_batch", "packed", "adapter", "checkpointing", "chunked")
    for strategy in STRATEGIES:
        runs = [layout for layout in LAYOUTS if layout.strategy == strategy and not layout.weighted]
        for one, other in combinations(options, 2):
            met = {(getattr(run, one), getattr(run, other)) for run in runs}
            assert len(met) == len({a for a, _ in met}) * len({b for _, b in met}), (strategy, one, other)


def test_the_document_lists_these_layouts_and_nothing_above_the_tolerance() -> None:
    rows = [line.strip("| ").split(" | ") for line in DOCUMENT.read_text("utf-8").splitlines() if "x" in line[:30]]
    measured = {row[0]: Difference(*map(float, row[1:])) for row in rows if len(row) == 4}
    assert list(measured) == [str(layout) for layout in LAYOUTS]
    assert max(max(difference) for difference in measured.values()) <= TOLERANCE
