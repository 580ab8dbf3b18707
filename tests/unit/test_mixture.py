"""Interleaving by probability: which source comes next, when it ends, which rows a short or long source gives."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from sft_toolkit.data.mixture import Mixture, interleaved
from sft_toolkit.data.sampler import EpochSampler
from sft_toolkit.data.split import Indices, passes
from sft_toolkit.errors import ConfigError


def rows(*sizes: int) -> list[Indices]:
    return [np.arange(size, dtype=np.int64) for size in sizes]


def sequence(mixture: Mixture) -> list[tuple[int, int]]:
    """(source, row) in the order of training."""
    flat = [(number, int(row)) for number, chosen in enumerate(mixture.chosen) for row in chosen]
    assert mixture.order is not None
    return [flat[position] for position in mixture.order]


def test_the_order_is_fixed_for_ever() -> None:
    mixed = sequence(interleaved(rows(4, 4), [1, 1], "first_exhausted", seed=42))
    assert mixed == [(1, 0), (0, 1), (1, 1), (1, 2), (1, 3)]


def test_first_exhausted_ends_with_the_last_row_of_a_source_and_repeats_none() -> None:
    mixed = sequence(interleaved(rows(500, 1000), [1, 1], "first_exhausted", seed=1))
    counts = Counter(source for source, _ in mixed)
    assert len(set(mixed)) == len(mixed)
    assert counts[0] == 500
    assert mixed[-1][0] == 0
    assert 430 <= counts[1] <= 570
    of_second = [row for source, row in mixed if source == 1]
    assert of_second == sorted(of_second)  # a sample of the whole file, in its order
    assert max(of_second) > 900


def test_all_exhausted_ends_when_the_last_source_is_used_up() -> None:
    mixed = sequence(interleaved(rows(10, 200), [1, 1], "all_exhausted", seed=1))
    counts = Counter(source for source, _ in mixed)
    assert counts[1] == 200
    assert 150 <= counts[0] <= 250
    assert mixed[-1][0] == 1
    times = Counter(row for source, row in mixed if source == 0)
    assert set(times) == set(range(10))
    assert max(times.values()) - min(times.values()) <= 1


def test_weights_are_probabilities() -> None:
    mixed = sequence(interleaved(rows(5000, 5000, 5000), [6, 3, 1], "first_exhausted", seed=3))
    counts = Counter(source for source, _ in mixed)
    shares = [counts[source] / len(mixed) for source in range(3)]
    assert shares == pytest.approx([0.6, 0.3, 0.1], abs=0.02)


def test_a_source_of_weight_zero_gives_no_row_and_ends_nothing() -> None:
    mixed = sequence(interleaved(rows(5, 3), [0, 2], "first_exhausted", seed=0))
    assert mixed == [(1, 0), (1, 1), (1, 2)]
    assert sequence(interleaved(rows(0, 3), [1, 1], "all_exhausted", seed=0)) == [(1, 0), (1, 1), (1, 2)]


def test_the_seed_decides() -> None:
    first, again, other = (sequence(interleaved(rows(50, 50), [1, 2], "first_exhausted", s)) for s in (1, 1, 2))
    assert first == again != other


def test_an_epochs_shuffle_is_not_the_order_of_the_sources() -> None:
    mixed = sequence(interleaved(rows(500, 500), [1, 1], "first_exhausted", seed=42))
    for epoch in range(3):
        half = [mixed[i][0] for i in EpochSampler(len(mixed), 42).order(epoch)[: len(mixed) // 2]]
        assert 0.4 < np.mean(half) < 0.6


def test_what_can_not_be_interleaved_is_refused() -> None:
    with pytest.raises(ConfigError, match="interleave needs a source with rows and a weight above 0"):
        interleaved(rows(5, 3), [0, 0], "first_exhausted", seed=0)
    message = (
        r"all_exhausted would take more than 1,100 rows of 11; raise the smallest weights, or take first_exhausted"
    )
    with pytest.raises(ConfigError, match=message):
        interleaved(rows(10, 1), [0.0001, 1], "all_exhausted", seed=0)


def test_passes_are_whole_but_the_last() -> None:
    assert passes(np.arange(3), 6, seed=0).tolist() == [0, 1, 2, 0, 1, 2]
    long = passes(np.arange(10), 14, seed=0).tolist()
    assert long[:10] == list(range(10))
    assert long[10:] == sorted(set(long[10:]))
    assert passes(np.arange(0), 0, seed=0).tolist() == []
