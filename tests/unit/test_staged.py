"""Staged mixtures: which files a stage draws from, by which weights, and for how long."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from sft_toolkit.data.facts import RowFacts
from sft_toolkit.data.orders import ordering_of
from sft_toolkit.data.staged import Staged
from sft_toolkit.errors import ConfigError
from tests.unit.token_rows import token_rows

GENERAL, CODE = "data/general.jsonl", "data/code.jsonl"
TOKENS = token_rows(*[3] * 100, sources=[GENERAL] * 60 + [CODE] * 40)
FACTS = RowFacts(TOKENS, rows_per_update=10)


def files(order: Any) -> list[str]:
    return [FACTS.sources[i] for i in order]


def test_stages_count_updates_and_draw_by_their_weights() -> None:
    stages: list[dict[str, Any]] = [{"sources": {"general": 1}, "steps": 3}, {"sources": {"general": 1, "code": 3}}]
    order = Staged(stages).order(FACTS, 42, 0)
    assert len(order) == 100
    assert set(files(order[:30])) == {GENERAL}
    late = Counter(files(order[30:]))
    assert 8 <= late[GENERAL] <= 26  # 70 draws at 1 : 3
    assert late[CODE] == 70 - late[GENERAL]
    second = Staged(stages).order(FACTS, 42, 1)
    assert CODE in files(second[:30])  # update 10 is in the second stage


def test_a_sources_rows_all_come_before_one_comes_again() -> None:
    order = Staged([{"sources": {"code": 1, "general": 0.000001}}]).order(FACTS, 42, 0)
    assert sorted(order[:40]) == list(range(60, 100))
    assert sorted(order[40:80]) == list(range(60, 100))
    assert order[:40] != order[40:80]


def test_a_list_weighs_by_rows_and_a_pattern_shares_its_weight_by_rows() -> None:
    listed = Counter(files(Staged([{"sources": ["general", "code"]}]).order(FACTS, 1, 0)))
    pattern = Counter(files(Staged([{"sources": {"data/*.jsonl": 7}}]).order(FACTS, 1, 0)))
    assert listed == pattern
    assert 48 <= listed[GENERAL] <= 72


def test_the_order_is_fixed_for_ever() -> None:
    few = RowFacts(token_rows(*[3] * 6, sources=["a"] * 3 + ["b"] * 3), rows_per_update=2)
    staged = Staged([{"sources": ["a"], "steps": 1}, {"sources": {"a": 1, "b": 1}}])
    assert list(staged.order(few, 42, 0)) == [2, 0, 3, 4, 1, 5]
    assert list(staged.order(few, 42, 1)) == [5, 2, 1, 3, 4, 4]


def test_bins_hold_rows_of_one_file() -> None:
    groups = Staged([{"sources": ["general", "code"]}]).bin_groups(FACTS)
    assert groups is not None
    assert len(set(groups[:60].tolist())) == len(set(groups[60:].tolist())) == 1
    assert groups[0] != groups[99]
    bins = RowFacts(TOKENS, 1, bins=[[0, 1], [60, 61]])
    assert bins.sources == [GENERAL, CODE]
    assert np.array(Staged([{"sources": ["code", "general"]}]).order(bins, 0, 0)).tolist() in (
        [0, 1],
        [1, 0],
        [0, 0],
        [1, 1],
    )


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([], "stages: expected a list of {sources: {name: weight}, steps: updates}"),
        ([{"steps": 3}], "stage 1: expected {sources: {name: weight}}, not {'steps': 3}"),
        ([{"sources": ["a"]}, {"sources": ["a"]}], "stage 1: steps: expected a number of updates, not 0"),
        ([{"sources": ["a"], "steps": 2}], "stage 1: the last stage lasts to the end of the run; take its steps out"),
        ([{"sources": {}}], "stage 1: sources: expected {name: weight} or a list of names, not {}"),
        ([{"sources": {"a": -1}}], "stage 1: sources: weights are numbers of at least 0, and one of them is above it"),
        ([{"sources": {"a": 0}}], "stage 1: sources: weights are numbers of at least 0, and one of them is above it"),
    ],
)
def test_stages_that_can_not_be_followed_are_refused(stages: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ordering_of({"staged": {"stages": stages}})
    assert str(caught.value) == f"sampler 'staged': {message}"


def test_a_name_that_is_no_file_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        Staged([{"sources": {"genral": 1, "code": 1}}]).order(FACTS, 0, 0)
    assert str(caught.value) == (
        f"sampler 'staged': stage 1: no file is called 'genral'; did you mean 'general'? (files: {CODE}, {GENERAL})"
    )


def test_a_file_that_no_stage_trains_on_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no stage trains on data/code\.jsonl; name it in one, or take it out"):
        Staged([{"sources": ["general"]}]).order(FACTS, 0, 0)
