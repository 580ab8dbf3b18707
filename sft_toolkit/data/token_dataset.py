"""Prepared tokens as the map-style data sets that a DataLoader reads, unpacked and packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset

from sft_toolkit.data.collate import IGNORED
from sft_toolkit.data.sampler import BLANK

TokenRowDict = dict[str, list[int]]
"""`input_ids` and `labels` of one document."""


def row_lengths(tokens: Dataset) -> npt.NDArray[np.int64]:
    """Tokens per row, int64 (N,), read from the list offsets without reading a token."""
    batches = tokens.select_columns(["input_ids"]).with_format("arrow").iter(batch_size=10_000)
    parts = [pc.list_value_length(batch["input_ids"]).to_numpy() for batch in batches]
    return np.concatenate(parts).astype(np.int64) if parts else np.zeros(0, dtype=np.int64)


def row_numbers(tokens: Dataset) -> npt.NDArray[np.int64]:
    """Number of each row in its source, int64 (N,); 1, 2, 3, ... where the data set has no column `row`."""
    if "row" not in tokens.column_names:
        return np.arange(1, len(tokens) + 1)
    return np.asarray(tokens.with_format("numpy")["row"][:], dtype=np.int64)


class RowsDataset(TorchDataset[TokenRowDict]):
    """Only `input_ids` and `labels` of a token data set, as lists. Index -1 is a blank row (see `EpochSampler`)."""

    def __init__(self, tokens: Dataset) -> None:
        self.tokens = tokens.select_columns(["input_ids", "labels"])
        self.numbers = row_numbers(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def row_numbers(self, index: int) -> list[int]:
        """Number of the row in its source, as a list of one (see `PackedDataset.row_numbers`)."""
        return [int(self.numbers[index])]

    def __getitem__(self, index: int) -> TokenRowDict:
        return blank_row() if index == BLANK else self.tokens[int(index)]


class PackedDataset(TorchDataset[dict[str, list[TokenRowDict]]]):
    """Bin i of a packing plan as `{"documents": [row, ...]}`. Index -1 is a bin of one blank row.

    Args:
        tokens: data set with the columns `input_ids` and `labels`.
        bins: row indices per bin, from `best_fit_decreasing`.
    """

    def __init__(self, tokens: Dataset, bins: Sequence[Sequence[int]]) -> None:
        self.tokens = tokens.select_columns(["input_ids", "labels"])
        self.bins = bins
        self.numbers = row_numbers(tokens)

    def __len__(self) -> int:
        return len(self.bins)

    def row_numbers(self, index: int) -> list[int]:
        """Numbers, in their sources, of the rows in a bin."""
        return [int(n) for n in self.numbers[list(self.bins[index])]]

    def __getitem__(self, index: int) -> dict[str, list[TokenRowDict]]:
        if index == BLANK:
            return {"documents": [blank_row()]}
        columns: dict[str, Any] = self.tokens[list(self.bins[index])]
        pairs = zip(columns["input_ids"], columns["labels"], strict=True)
        return {"documents": [{"input_ids": ids, "labels": labels} for ids, labels in pairs]}


def blank_row() -> TokenRowDict:
    """One token that is not learned: it fills a batch and adds nothing to any sum or count."""
    return {"input_ids": [0], "labels": [IGNORED]}
