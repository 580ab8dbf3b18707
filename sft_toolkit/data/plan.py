"""The packing plan of a token data set: which rows share a bin, as plain data that can be saved and looked at."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset

from sft_toolkit.data.facts import Ints, RowFacts, row_lengths
from sft_toolkit.data.orders import Ordering
from sft_toolkit.data.packing import best_fit_decreasing, fill

PLAN = "packing_plan.json"
"""Name of the file in the output folder."""


@dataclass(frozen=True)
class PackingPlan:
    """Which rows share a bin. It depends on the rows' lengths and the order's groups: not on seed, epoch or ranks.

    Attributes:
        capacity: tokens that a bin holds.
        bins: row indices per bin, longest row first; every row occurs exactly once.
        lengths: tokens per row, int64 (N,).
    """

    capacity: int
    bins: list[list[int]]
    lengths: Ints

    @property
    def fill(self) -> float:
        """Share of the bins' room that holds tokens."""
        return fill(self.lengths, self.bins, self.capacity)

    def tokens_of(self, number: int) -> int:
        """Tokens in a bin."""
        return int(self.lengths[self.bins[number]].sum())


def plan_packing(tokens: Dataset, capacity: int, ordering: Ordering | None = None) -> PackingPlan:
    """Pack all rows of a token data set.

    Args:
        tokens: data set with the column `input_ids`.
        capacity: tokens per bin; no row is longer.
        ordering: whose `bin_groups` say which rows must not share a bin.

    Raises:
        ValueError: as `best_fit_decreasing`.
        ConfigError: an order that makes no sense on bins.
    """
    lengths = row_lengths(tokens)
    if ordering is not None:
        ordering.check_packing()
    groups = None if ordering is None else ordering.bin_groups(RowFacts(tokens))
    if groups is None:
        return PackingPlan(capacity, best_fit_decreasing(lengths, capacity), lengths)
    bins: list[list[int]] = []
    for group in np.unique(groups):
        bins += _packed(np.flatnonzero(groups == group), lengths, capacity)
    return PackingPlan(capacity, bins, lengths)


def plan_parts(tokens: Dataset, capacity: int, sizes: list[int]) -> tuple[PackingPlan, list[int]]:
    """Pack the parts of a data set, one behind the other, each by itself.

    Returns:
        The plan, and the number of bins of each part.
    """
    lengths, ends = row_lengths(tokens), np.cumsum(sizes)
    parts = [_packed(np.arange(end - size, end), lengths, capacity) for size, end in zip(sizes, ends, strict=True)]
    return PackingPlan(capacity, [rows for part in parts for rows in part], lengths), [len(part) for part in parts]


def _packed(rows: npt.NDArray[np.int64], lengths: Ints, capacity: int) -> list[list[int]]:
    return [rows[members].tolist() for members in best_fit_decreasing(lengths[rows], capacity)]


def described_bins(plan: PackingPlan, tokens: Dataset, limit: int | None = None) -> Iterator[dict[str, Any]]:
    """The bins in words of the user: `{"tokens": T, "rows": [[source, row number, tokens], ...]}`, the first `limit`.

    Args:
        plan: of `tokens`, a data set with the columns `row` and `source`.
    """
    places = tokens.select_columns(["row", "source"])
    for number, rows in enumerate(plan.bins[:limit]):
        of_bin = places[rows]
        named = zip(of_bin["source"], of_bin["row"], plan.lengths[rows].tolist(), strict=True)
        yield {"tokens": plan.tokens_of(number), "rows": [list(row) for row in named]}


def to_json(plan: PackingPlan, tokens: Dataset) -> str:
    """`packing_plan.json`, a bin a line: `{"tokens": T, "rows": [[source, row], ...]}`, source counted in `sources`."""
    table = tokens.select_columns(["row", "source"]).with_format("arrow")[:]
    sources, numbers = table["source"].combine_chunks().dictionary_encode(), table["row"].to_numpy()
    codes = sources.indices.to_numpy()
    head = {
        "capacity": plan.capacity,
        "rows": len(plan.lengths),
        "tokens": int(plan.lengths.sum()),
        "fill": round(plan.fill, 4),
        "sources": sources.dictionary.to_pylist(),
    }
    opening = json.dumps(head, ensure_ascii=False, indent=1).removesuffix("\n}")
    lines = []
    for number, rows in enumerate(plan.bins):
        pairs = np.stack([codes[rows], numbers[rows]], axis=1).tolist()
        lines.append(json.dumps({"tokens": plan.tokens_of(number), "rows": pairs}, separators=(",", ":")))
    return f'{opening},\n "bins": [\n  ' + ",\n  ".join(lines) + "\n ]\n}\n"
