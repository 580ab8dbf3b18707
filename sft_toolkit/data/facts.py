"""What the order of rows may depend on: their lengths, their files, a column of theirs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from sft_toolkit.errors import ConfigError

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


def row_lengths(tokens: Dataset) -> Ints:
    """Tokens per row, int64 (N,), read from the list offsets without reading a token."""
    batches = tokens.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    parts = [pc.list_value_length(batch["input_ids"]).to_numpy() for batch in batches]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


class RowFacts:
    """Facts about the items that a sampler orders: the rows of a token data set or, packed, its bins.

    Args:
        tokens: data set with the column `input_ids`.
        rows_per_update: items of one update over all ranks.
        bins: row indices per bin, where the items are bins.

    Attributes:
        size: number of items.
    """

    def __init__(self, tokens: Dataset, rows_per_update: int = 1, bins: Sequence[Sequence[int]] | None = None) -> None:
        self.tokens = tokens
        self.rows_per_update = max(1, rows_per_update)
        self.bins = bins
        self.size = len(tokens) if bins is None else len(bins)

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one pass over the items; the last one may be smaller."""
        return -(-self.size // self.rows_per_update)

    def updates(self, epoch: int) -> Ints:
        """The 0-based update, counted from the start of the run, that trains on each position of an epoch."""
        return epoch * self.updates_per_epoch + np.arange(self.size) // self.rows_per_update

    @cached_property
    def lengths(self) -> Floats:
        """Tokens of each item, float64 (size,); of a bin, the mean over its rows."""
        return self._means(row_lengths(self.tokens))

    @cached_property
    def sources(self) -> list[str]:
        """The file of each item; of a bin, that of its first row."""
        if "source" not in self.tokens.column_names:
            return [""] * self.size
        of_row = self.tokens.with_format("arrow")["source"][:]
        names: list[str] = of_row.to_pylist()
        return names if self.bins is None else [names[rows[0]] for rows in self.bins]

    def column(self, name: str) -> Floats:
        """A number column of the files, float64 (size,); of a bin, the mean over its rows.

        Raises:
            ConfigError: the rows have no such column of numbers.
        """
        found = self.tokens.column_names
        if name not in found:
            raise ConfigError(f"sampler: the rows have no column {name!r}; they have {', '.join(found)}")
        values = self.tokens.with_format("arrow")[name][:]
        if not (pa.types.is_integer(values.type) or pa.types.is_floating(values.type)) or values.null_count:
            raise ConfigError(f"sampler: the column {name!r} holds something other than numbers")
        return self._means(values.to_numpy())

    def score(self, function: Callable[[Mapping[str, Any]], float]) -> Floats:
        """`function(row)` of each token row (`input_ids`, `labels`, ...), float64 (size,); of a bin, the mean."""
        return self._means(np.array([float(function(row)) for row in self.tokens], dtype=np.float64))

    def _means(self, of_rows: npt.NDArray[Any]) -> Floats:
        if self.bins is None:
            return of_rows.astype(np.float64)
        return np.array([of_rows[list(rows)].mean() for rows in self.bins], dtype=np.float64)
