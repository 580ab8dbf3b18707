"""Prepared tokens as the map-style data sets that a DataLoader reads, unpacked and packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset
from torch.utils.data import Dataset as TorchDataset

from sft_toolkit.data.collate import IGNORED
from sft_toolkit.data.facts import RowFacts, row_lengths
from sft_toolkit.data.readers.raw import place
from sft_toolkit.data.sampler import BLANK

__all__ = ["PackedDataset", "RowsDataset", "TokenRowDict", "blank_row", "row_lengths", "row_numbers"]

TokenRowDict = dict[str, Any]
"""`input_ids` and `labels` of one document, and `loss_weights` where not every token weighs 1: lists."""

Transform = Callable[[TokenRowDict, int, int], TokenRowDict]
"""(row, epoch, index of the row) -> the row as it is trained on; see `transforms`."""

Parts = Sequence[tuple[str, int]]
"""Names and sizes of the sources that a held-out set holds, one behind the other."""


def row_numbers(tokens: Dataset) -> npt.NDArray[np.int64]:
    """Number of each row in its source, int64 (N,); 1, 2, 3, ... where the data set has no column `row`."""
    if "row" not in tokens.column_names:
        return np.arange(1, len(tokens) + 1)
    return np.asarray(tokens.with_format("numpy")["row"][:], dtype=np.int64)


class _TokenItems:
    """What both layouts share.

    Args:
        tokens: data set with the columns `input_ids` and `labels`; others serve samplers.
        transform: changes each row when it is read. The sampler then yields `index + epoch * len(self)`
            (`EpochSampler.stamps_epoch`), since a worker process learns nothing else of the epoch.
        parts: the sources of a held-out set, in items; their losses are reported one by one.

    Attributes:
        weighted: some tokens weigh otherwise than 1 in the loss.
    """

    bins: Sequence[Sequence[int]] | None = None

    def __init__(self, tokens: Dataset, transform: Transform | None = None, parts: Parts = ()) -> None:
        self.all_columns = tokens
        self.weighted = "loss_weights" in tokens.column_names
        self.tokens = tokens.select_columns(["input_ids", "labels", *(["loss_weights"] if self.weighted else [])])
        self.numbers = row_numbers(tokens)
        self.transform = transform
        self.parts = parts

    def facts(self, rows_per_update: int = 1) -> RowFacts:
        """What a sampler may know of the items."""
        return RowFacts(self.all_columns, rows_per_update, self.bins)

    def _names(self, rows: Sequence[int]) -> list[int] | list[str]:
        """Numbers of rows in their source; with the source where there are several."""
        if not self._has_several_sources:
            return [int(self.numbers[row]) for row in rows]
        sources = self.all_columns.select_columns(["source"])[list(rows)]["source"]
        return [place(source, int(self.numbers[row])) for source, row in zip(sources, rows, strict=True)]

    @cached_property
    def _has_several_sources(self) -> bool:
        if "source" not in self.all_columns.column_names:
            return False
        return len(self.all_columns.with_format("arrow")["source"][:].unique()) > 1

    def _changed(self, row: TokenRowDict, epoch: int, index: int) -> TokenRowDict:
        if self.weighted and row["loss_weights"] is None:
            row = {"input_ids": row["input_ids"], "labels": row["labels"]}
        return row if self.transform is None else self.transform(row, epoch, index)


class RowsDataset(_TokenItems, TorchDataset[TokenRowDict]):
    """What a model learns from a token data set, row by row; index -1 is a blank row (see `EpochSampler`)."""

    def __len__(self) -> int:
        return len(self.tokens)

    def row_numbers(self, index: int) -> list[int] | list[str]:
        """Number of the row in its source, as a list of one; "file, row N" where there are several sources."""
        return self._names([index])

    def __getitem__(self, index: int) -> TokenRowDict:
        if index == BLANK:
            return blank_row()
        epoch, row = divmod(int(index), len(self))
        return self._changed(self.tokens[row], epoch, row)


class PackedDataset(_TokenItems, TorchDataset[dict[str, list[TokenRowDict]]]):
    """Bin i of a packing plan as `{"documents": [row, ...]}`. Index -1 is a bin of one blank row.

    Args:
        tokens: data set with the columns `input_ids` and `labels`.
        bins: row indices per bin, from `plan.plan_bins`.
        transform, parts: as of `RowsDataset`.
    """

    bins: Sequence[Sequence[int]]

    def __init__(
        self, tokens: Dataset, bins: Sequence[Sequence[int]], transform: Transform | None = None, parts: Parts = ()
    ) -> None:
        super().__init__(tokens, transform, parts)
        self.bins = bins

    def __len__(self) -> int:
        return len(self.bins)

    def row_numbers(self, index: int) -> list[int] | list[str]:
        """Numbers, in their sources, of the rows in a bin; "file, row N" where there are several sources."""
        return self._names(self.bins[index])

    def __getitem__(self, index: int) -> dict[str, list[TokenRowDict]]:
        if index == BLANK:
            return {"documents": [blank_row()]}
        epoch, place = divmod(int(index), len(self))
        rows = list(self.bins[place])
        columns: dict[str, Any] = self.tokens[rows]
        documents = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        return {"documents": [self._changed(one, epoch, row) for row, one in zip(rows, documents, strict=True)]}


def blank_row() -> TokenRowDict:
    """One token that is not learned: it fills a batch and adds nothing to any sum or count."""
    return {"input_ids": [0], "labels": [IGNORED]}
