"""Several sources -> one order of rows: one behind the other, or interleaved by probability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sft_toolkit.args import StoppingStrategy
from sft_toolkit.data.sampler import random_bits
from sft_toolkit.data.split import Indices, passes, resampled
from sft_toolkit.errors import ConfigError

MOST_REPEATS = 100
"""Interleaving until all sources are exhausted may not make more than this many times the rows that there are."""

_STREAM = 0x6D6978  # the order of an epoch draws from (seed, epoch): with the same bits it would sort by source


@dataclass(frozen=True)
class Mixture:
    """Which rows are trained on.

    Attributes:
        chosen: indices of the rows of each source; a row may occur several times.
        order: positions among all chosen rows, the sources one behind the other; None is their own order.
    """

    chosen: list[Indices]
    order: Indices | None = None


def concatenated(kept: Sequence[Indices], weights: Sequence[float], seed: int) -> Mixture:
    """One source behind the other; its weight says how often each of its rows comes.

    Args:
        kept: indices of the rows of each source that are not held out.
        weights: 1.0 takes every row once.
        seed: of the sample that a weight draws; sources draw from different streams.
    """
    pairs = zip(kept, weights, strict=True)
    return Mixture([resampled(indices, weight, seed + number) for number, (indices, weight) in enumerate(pairs)])


def interleaved(kept: Sequence[Indices], weights: Sequence[float], until: StoppingStrategy, seed: int) -> Mixture:
    """The next row's source is drawn by the weights; ends as `datasets.interleave_datasets` does.

    Args:
        kept, seed: as for `concatenated`.
        weights: probabilities, up to a factor; a source of weight 0 gives no row.
        until: `first_exhausted` ends with the last row of the source that is used up first, so that no row repeats.
            `all_exhausted` goes on until every source is used up; the others begin anew.

    Raises:
        ConfigError: no weight is above 0, or a tiny weight would repeat the other sources' rows endlessly.
    """
    sizes = np.array([len(indices) if weight > 0 else 0 for indices, weight in zip(kept, weights, strict=True)])
    chances = np.where(sizes > 0, np.asarray(weights, dtype=np.float64), 0.0)
    if not chances.any():
        raise ConfigError("data.mixing: interleave needs a source with rows and a weight above 0")
    drawn = _draws(sizes, chances / chances.sum(), until, seed)
    counts = np.bincount(drawn, minlength=len(sizes))
    chosen = [
        passes(indices, int(count), seed + number)
        for number, (indices, count) in enumerate(zip(kept, counts, strict=True))
    ]
    # A stable sort of the draws lists the places of each source in turn: its inverse is the interleaving.
    order = np.empty(len(drawn), dtype=np.int64)
    order[np.argsort(drawn, kind="stable")] = np.arange(len(drawn))
    return Mixture(chosen, order)


def _draws(sizes: npt.NDArray[np.int64], chances: npt.NDArray[np.float64], until: str, seed: int) -> Indices:
    """The source of each row up to the end."""
    limits, used = np.cumsum(chances), np.flatnonzero(chances)
    rows, most = int(sizes.sum()), MOST_REPEATS * int(sizes.sum())
    while True:
        bits = random_bits(rows, seed, 0, _STREAM) / 2.0**64
        drawn: Indices = np.minimum(np.searchsorted(limits, bits, side="right"), used[-1])
        ends = [np.flatnonzero(drawn == source)[sizes[source] - 1 : sizes[source]] for source in used]
        found = [int(end[0]) + 1 for end in ends if len(end)]
        if found and (until == "first_exhausted" or len(found) == len(used)):
            return drawn[: min(found) if until == "first_exhausted" else max(found)]
        if rows >= most:
            raise ConfigError(
                f"data.stopping_strategy: all_exhausted would take more than {most:,} rows of {int(sizes.sum()):,}; "
                "raise the smallest weights, or take first_exhausted"
            )
        rows = min(2 * rows, most)
