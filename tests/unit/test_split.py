"""Held-out rows and sampling weights: decided by content and seed, never by position."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sft_toolkit.data.conversation import Conversation, Message, PlainText, TokenRow
from sft_toolkit.data.split import Keys, content_key, held_out, resampled


def keys(*values: int) -> Keys:
    return np.array(values, dtype=np.uint64)


def spread(rows: int, seed: int = 0) -> Keys:
    return np.random.default_rng(seed).integers(0, 2**64, rows, dtype=np.uint64)


def indices(rows: int) -> npt.NDArray[np.int64]:
    return np.arange(rows, dtype=np.int64)


def said(content: str, **message: float) -> Conversation:
    return Conversation((Message("user", "a"), Message("assistant", content, **message)))  # type: ignore[arg-type]


def test_rows_that_say_the_same_have_the_same_key() -> None:
    assert content_key(said("b")) == content_key(said("b", weight=0.5))
    assert content_key(said("b")) != content_key(said("c"))
    assert content_key(PlainText("ab", "c")) != content_key(PlainText("a", "bc"))
    assert content_key(TokenRow([1, 2], [-100, 2])) == content_key(TokenRow([1, 2], [1, 2]))


def test_a_key_is_the_same_in_every_process() -> None:
    assert content_key(PlainText("a", "b")) == 15624582798303165707


def test_a_share_holds_out_about_that_share_and_appended_rows_move_nobody() -> None:
    before = spread(5000)
    after = np.concatenate([before, spread(5000, seed=1)])
    (mask,) = held_out([before], 0.1)
    (longer,) = held_out([after], 0.1)
    assert 430 <= int(mask.sum()) <= 570
    assert (longer[:5000] == mask).all()


def test_a_share_that_would_hold_out_nothing_holds_out_one_row() -> None:
    assert [m.tolist() for m in held_out([keys(2**63, 2**62), keys(2**63 + 1)], 0.01)] == [[False, True], [False]]


def test_a_number_of_rows_is_shared_out_by_the_sizes_of_the_sources() -> None:
    masks = held_out([spread(90), spread(10, seed=1)], 20)
    assert [int(mask.sum()) for mask in masks] == [18, 2]
    masks = held_out([spread(50), spread(50, seed=1), spread(1, seed=2)], 2)
    assert [int(mask.sum()) for mask in masks] == [1, 1, 0]


def test_a_number_takes_the_smallest_keys() -> None:
    assert held_out([keys(5, 3, 9, 1)], 2)[0].tolist() == [False, True, False, True]


def test_rows_of_equal_content_lie_on_the_same_side_in_every_source() -> None:
    first, second = held_out([keys(1, 7, 1, 8), keys(7, 1, 9)], 2)
    assert first.tolist() == [True, False, True, False]
    assert second.tolist() == [False, True, False]
    share = held_out([keys(1, 2**63), keys(2**63, 1)], 0.5)
    assert [mask.tolist() for mask in share] == [[True, False], [False, True]]


def test_no_rows_hold_out_nothing() -> None:
    assert held_out([keys()], 0.5)[0].tolist() == []


def test_a_weight_of_one_keeps_every_row_once() -> None:
    assert resampled(indices(5), 1.0, seed=3).tolist() == [0, 1, 2, 3, 4]


def test_whole_weights_repeat_rows_and_fractions_sample_them_without_replacement() -> None:
    assert resampled(indices(3), 2.0, seed=3).tolist() == [0, 0, 1, 1, 2, 2]
    half = resampled(indices(1000), 0.5, seed=3)
    assert len(half) == len(set(half.tolist())) == 500
    more = resampled(indices(10), 2.3, seed=3)
    assert len(more) == 23
    assert sorted(np.bincount(more).tolist()) == [2, 2, 2, 2, 2, 2, 2, 3, 3, 3]
    assert resampled(indices(4), 0.0, seed=3).tolist() == []


def test_the_sample_is_fixed_by_the_seed() -> None:
    assert resampled(indices(8), 0.5, seed=42).tolist() == resampled(indices(8), 0.5, seed=42).tolist()
    assert resampled(indices(100), 0.5, seed=42).tolist() != resampled(indices(100), 0.5, seed=43).tolist()
