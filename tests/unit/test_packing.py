"""Bins hold every row once, whole, and are nearly full."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest

from sft_toolkit.data.packing import best_fit_decreasing, fill


def chat_lengths(rows: int, capacity: int) -> npt.NDArray[np.int64]:
    """Lengths distributed like those of chat data: many short rows, a long tail cut at the capacity."""
    lengths = np.random.default_rng(0).lognormal(5.5, 0.8, rows)
    return np.clip(lengths, 1, capacity).astype(np.int64)


def test_each_row_goes_into_the_fullest_bin_that_has_room() -> None:
    assert best_fit_decreasing([3, 6, 4, 7], 10) == [[3, 0], [1, 2]]
    # 5 opens a bin, 4 leaves 1 free in it; 3 opens a second one; both 1s go where only 1 is free, then to the other.
    assert best_fit_decreasing([1, 3, 5, 4, 1], 10) == [[2, 3, 0], [1, 4]]


def test_rows_of_equal_length_keep_their_order() -> None:
    assert best_fit_decreasing([2, 2, 2, 2, 2], 4) == [[0, 1], [2, 3], [4]]


def test_a_row_as_long_as_the_bin_fills_it_alone() -> None:
    assert best_fit_decreasing([8, 1, 8], 8) == [[0], [2], [1]]


def test_no_rows_make_no_bins() -> None:
    assert best_fit_decreasing([], 16) == []
    assert fill([], [], 16) == 1.0


def test_every_row_occurs_once_and_no_bin_overflows() -> None:
    lengths = chat_lengths(20_000, 2048)
    bins = best_fit_decreasing(lengths, 2048)
    assert sorted(row for members in bins for row in members) == list(range(20_000))
    assert max(int(lengths[members].sum()) for members in bins) <= 2048
    assert fill(lengths, bins, 2048) > 0.999


def test_the_plan_depends_on_the_lengths_alone() -> None:
    lengths = chat_lengths(500, 512)
    assert best_fit_decreasing(lengths, 512) == best_fit_decreasing(lengths.tolist(), 512)


def test_twenty_thousand_rows_take_a_blink() -> None:
    lengths = chat_lengths(20_000, 2048)
    start = time.process_time()
    best_fit_decreasing(lengths, 2048)
    assert time.process_time() - start < 0.5  # 0.024 s on an idle core; an accidental quadratic scan takes minutes


def test_a_row_longer_than_a_bin_is_named() -> None:
    with pytest.raises(
        ValueError, match=r"^row 1 has 11 tokens and a bin holds 10; 2 of 3 rows are longer than a bin$"
    ):
        best_fit_decreasing([10, 11, 12], 10)


def test_an_empty_row_is_named() -> None:
    with pytest.raises(ValueError, match=r"^row 2 has no token; 1 of 3 rows are empty$"):
        best_fit_decreasing([1, 2, 0], 10)
