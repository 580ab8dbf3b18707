"""Each order is a function of (facts, seed, epoch); what it promises is checked on exact indices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from sft_toolkit.data.facts import RowFacts
from sft_toolkit.data.orders import ByLength, Curriculum, Ordering, Sequential, Shuffle, ordering_of
from sft_toolkit.data.sampler import EpochSampler
from sft_toolkit.errors import ConfigError
from tests.unit.token_rows import token_rows

MIXED = token_rows(*(1 + (7 * i) % 40 for i in range(40)))


def facts(rows_per_update: int = 4, **columns: Any) -> RowFacts:
    tokens = MIXED
    for name, values in columns.items():
        tokens = tokens.add_column(name, values)
    return RowFacts(tokens, rows_per_update)


def lengths(order: Sequence[int]) -> list[int]:
    return [len(MIXED[i]["input_ids"]) for i in order]


@pytest.mark.parametrize("ordering", [Shuffle(), Sequential(), ByLength(window=3), Curriculum(), Curriculum(steps=25)])
@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_every_row_comes_once_an_epoch(ordering: Ordering, epoch: int) -> None:
    assert sorted(ordering.order(facts(), 42, epoch)) == list(range(40))
    assert list(ordering.order(facts(), 42, epoch)) == list(ordering.order(facts(), 42, epoch))


def test_shuffle_is_the_order_that_old_checkpoints_know() -> None:
    eight = RowFacts(token_rows(*[1] * 8))
    assert list(Shuffle().order(eight, 42, 0)) == EpochSampler(8, 42).order(0) == [4, 1, 3, 6, 0, 7, 2, 5]
    assert list(Shuffle().order(eight, 42, 1)) == EpochSampler(8, 42).order(1) == [1, 2, 5, 3, 6, 0, 4, 7]


def test_sequential_is_the_order_of_the_files() -> None:
    assert list(Sequential().order(facts(), 42, 3)) == list(range(40))


# ---- By length -------------------------------------------------------------------------------------------------------


def test_by_length_puts_similar_rows_into_one_update_and_shuffles_the_updates() -> None:
    order = lengths(ByLength(window=10).order(facts(), 42, 0))
    updates = [order[i : i + 4] for i in range(0, 40, 4)]
    assert sorted(updates) == [[n, n - 1, n - 2, n - 3] for n in range(4, 41, 4)]
    assert updates != sorted(updates)
    assert updates != sorted(updates, reverse=True)
    assert order != lengths(ByLength(window=10).order(facts(), 42, 1))


def test_the_smaller_last_update_stays_last() -> None:
    order = ByLength(window=2).order(RowFacts(MIXED.select(range(10)), 4), 1, 0)
    drawn = EpochSampler(10, 1).order(0)
    assert set(order[8:]) == set(drawn[8:])  # the last window holds these two alone


def test_by_length_is_refused_for_bins() -> None:
    with pytest.raises(ConfigError, match=r"^by_length saves padding, and packed rows have none; take sampler or"):
        ByLength().check_packing()


# ---- Curriculum ------------------------------------------------------------------------------------------------------


def test_a_curriculum_draws_from_the_easiest_share_that_grows() -> None:
    order = Curriculum(start=0.2, steps=10).order(facts(), 42, 0)
    by_length = sorted(range(40), key=lambda i: len(MIXED[i]["input_ids"]))
    for position, index in enumerate(order):
        share = 0.2 + 0.8 * (position // 4) / 10
        assert by_length.index(index) < max(np.ceil(share * 40), position + 1)
    assert np.mean(lengths(order[:10])) < 15 < 25 < np.mean(lengths(order[-10:]))


def test_without_a_start_the_order_is_from_easy_to_hard() -> None:
    assert lengths(Curriculum(start=0.0, steps=1000).order(facts(), 42, 0)) == list(range(1, 41))


def test_behind_the_pacing_epochs_are_shuffled() -> None:
    ordering = Curriculum(steps=10)
    first, second = ordering.order(facts(), 42, 0), ordering.order(facts(), 42, 1)
    assert abs(np.mean(lengths(second[:20])) - 20.5) < 5
    assert np.mean(lengths(first[:20])) < np.mean(lengths(second[:20]))


def test_pacing_goes_on_over_epochs() -> None:
    early, late = (Curriculum(start=0.0, steps=40).order(facts(), 42, epoch) for epoch in (0, 3))
    assert np.mean(lengths(early[:10])) < np.mean(lengths(late[:10]))


def test_square_root_pacing_takes_harder_rows_earlier() -> None:
    linear, root = (Curriculum(pacing=p).order(facts(1), 42, 0) for p in ("linear", "sqrt"))
    assert np.mean(lengths(root[:10])) > np.mean(lengths(linear[:10]))


def test_a_column_says_what_is_easy() -> None:
    ordering = Curriculum(by="difficulty", start=0.0, steps=1000)
    assert ordering.columns() == ["difficulty"]
    hard_first = facts(difficulty=list(range(40, 0, -1)))
    assert list(ordering.order(hard_first, 42, 0)) == list(range(39, -1, -1))
    reverse = Curriculum(by="difficulty", start=0.0, steps=1000, reverse=True)
    assert list(reverse.order(hard_first, 42, 0)) == list(range(40))


def test_a_column_that_is_missing_or_holds_no_numbers_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no column 'difficulty'; they have input_ids, labels, row, source$"):
        Curriculum(by="difficulty").order(facts(), 42, 0)
    with pytest.raises(ConfigError, match="the column 'source' holds something other than numbers"):
        Curriculum(by="source").order(facts(), 42, 0)


def first_token(row: Mapping[str, Any]) -> float:
    return -float(row["input_ids"][0])


def test_a_function_says_what_is_easy() -> None:
    ordering = Curriculum(score=f"{__name__}.first_token", start=0.0, steps=1000)
    assert list(ordering.order(facts(), 42, 0)) == list(range(39, -1, -1))
    assert ordering.columns() == []


def test_a_curriculum_packs_rows_of_one_difficulty_together() -> None:
    groups = Curriculum().bin_groups(facts())
    assert groups is not None
    by_length = sorted(range(40), key=lambda i: len(MIXED[i]["input_ids"]))
    assert [int(groups[i]) for i in by_length] == [16 * rank // 40 for rank in range(40)]


def test_a_bin_is_as_hard_as_its_rows_are_on_average() -> None:
    bins = RowFacts(token_rows(2, 4, 9, 1, difficulty=[1.0, 3.0, 5.0, 0.0]), 1, bins=[[0, 1], [2], [3, 1]])
    assert bins.size == 3
    assert bins.lengths.tolist() == [3.0, 9.0, 2.5]
    assert bins.column("difficulty").tolist() == [2.0, 5.0, 1.5]
    assert list(Curriculum(start=0.0, steps=99).order(bins, 0, 0)) == [2, 0, 1]


# ---- Names and options -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("curiculum", "unknown sampler 'curiculum'; did you mean 'curriculum'?"),
        ({"curriculum": {"step": 3}}, "sampler 'curriculum': unknown option 'step'; did you mean 'steps'?"),
        ({"curriculum": {"start": 2}}, "sampler 'curriculum': start is 2; expected a share from 0 to 1"),
        ({"curriculum": {"steps": 0}}, "sampler 'curriculum': steps is 0; at least 1 update"),
        (
            {"curriculum": {"pacing": "log"}},
            "sampler 'curriculum': option 'pacing': expected one of linear, sqrt, not 'log'",
        ),
        (
            {"curriculum": {"pacing": "sqr"}},
            "sampler 'curriculum': option 'pacing': expected one of linear, sqrt, not 'sqr'; did you mean 'sqrt'?",
        ),
        ({"curriculum": {"score": "os.getcwd"}}, "sampler 'os.getcwd': it is called with 1 argument, but: too many"),
        ({"by_length": {"window": 0}}, "sampler 'by_length': window is 0; at least 1 update"),
        ("builtins.dict", "sampler 'builtins.dict' makes a dict; expected an orders.Ordering"),
    ],
)
def test_what_can_not_be_an_order_is_refused(named: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ordering_of(named)
    assert str(caught.value).startswith(message)


def test_no_name_is_the_default() -> None:
    assert isinstance(ordering_of(None), Shuffle)
    assert isinstance(ordering_of(None, "sequential"), Sequential)
    assert isinstance(ordering_of("by_length"), ByLength)


class Backwards(Ordering):
    """A user's own order: one method."""

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        return range(facts.size)[::-1]


def test_a_users_order_is_one_method() -> None:
    ordering = ordering_of("tests.unit.test_orders.Backwards")
    assert list(ordering.order(facts(), 1, 0)) == list(range(39, -1, -1))
    assert ordering.bin_groups(facts()) is None


def test_an_order_of_the_wrong_length_is_refused() -> None:
    with pytest.raises(ValueError, match="the order of an epoch needs 3 indices from 0 to 2: "):
        EpochSampler(3, 0, ordering=lambda epoch: [0, 1]).order(0)
    with pytest.raises(ValueError, match="the order of an epoch needs 3 indices from 0 to 2: "):
        EpochSampler(3, 0, ordering=lambda epoch: [0, 1, 3]).order(0)
