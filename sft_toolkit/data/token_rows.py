"""Rows that come as tokens, checked before step 1: an id without a row in the embedding is an IndexError much later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from sft_toolkit.data.conversation import IGNORED
from sft_toolkit.errors import DataError

_BATCH_ROWS = 10_000
BESIDE = ("attention_mask", "loss_weights")


def check_token_rows(rows: Dataset | Sequence[Mapping[str, Any]], vocabulary: int, name: str, labels: bool) -> None:
    """Stop at the first row that a model with so many embedding rows can't read. Memory: 10,000 rows.

    Args:
        rows: with `input_ids` (L,); 2-dimensional ones are compared with the vocabulary alone.
        name: what messages call these rows.
        labels: also compare `labels`, one per token, each -100 or an id, and `attention_mask` and `loss_weights`, one
            per token.

    Raises:
        DataError: names the row, counted from 1.
    """
    for number, row in _suspects(rows, vocabulary, labels):
        if problem := _problem(row, vocabulary, labels):
            raise DataError(f"{name}, row {number}: {problem}")


def unsupervised_rows(rows: Dataset | Sequence[Mapping[str, Any]]) -> list[int]:
    """Indices of the rows of several tokens whose labels are all -100; a first label is never learned, and ignored."""
    if not isinstance(rows, Dataset):
        learned = (np.ravel(row["labels"])[1:] for row in rows)
        return [index for index, labels in enumerate(learned) if labels.size and (labels == IGNORED).all()]
    found: list[int] = []
    number = 0
    for table in rows.select_columns(["labels"]).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        labels = table["labels"].combine_chunks()
        lengths = pc.fill_null(pc.list_value_length(labels), 0).to_numpy()
        ends = np.cumsum(lengths)
        # Labels that count, summed up to each place; the difference between two places is what a row has.
        sums = np.concatenate([[0], np.cumsum(pc.list_flatten(labels).to_numpy(zero_copy_only=False) != IGNORED)])
        count = sums[ends] - sums[np.minimum(ends - lengths + 1, ends)]
        found += (number + np.flatnonzero((lengths > 1) & (count == 0))).tolist()
        number += len(labels)
    return found


def _problem(row: Mapping[str, Any], vocabulary: int, labels: bool) -> str | None:
    ids = np.asarray(row["input_ids"])
    if ids.size == 0:
        return "input_ids is empty"
    if ids.dtype.kind not in "iu":
        return "input_ids holds something other than whole numbers"
    if (bad := _outside(ids, vocabulary)) is not None:
        return f"input_ids holds {bad}; the model has the ids 0 to {vocabulary - 1}"
    if not labels or row.get("labels") is None or ids.ndim != 1:
        return None
    for column in BESIDE:
        if row.get(column) is not None and np.asarray(row[column]).shape != ids.shape:
            return f"input_ids has {len(ids)} tokens, {column} has {np.asarray(row[column]).size}"
    targets = np.asarray(row["labels"])
    if targets.shape != ids.shape:
        return f"input_ids has {len(ids)} tokens, labels has {targets.size}"
    if targets.dtype.kind not in "iu":
        return "labels holds something other than whole numbers"
    if (bad := _outside(targets[targets != IGNORED], vocabulary)) is not None:
        return f"labels holds {bad}; expected {IGNORED} or an id of 0 to {vocabulary - 1}"
    return None


def _outside(ids: Any, vocabulary: int) -> int | None:
    beyond = ids[(ids < 0) | (ids >= vocabulary)]
    return int(beyond.flat[0]) if beyond.size else None


def _suspects(
    rows: Dataset | Sequence[Mapping[str, Any]], vocabulary: int, labels: bool
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Rows that need a look, with their number: of a data set those of batches that are not right as a whole."""
    if not isinstance(rows, Dataset):
        yield from enumerate(rows, 1)
        return
    columns = ["input_ids", *(["labels"] if labels and "labels" in rows.column_names else [])]
    beside = [column for column in BESIDE if labels and column in rows.column_names]
    number, read = 1, columns
    for table in rows.select_columns([*columns, *beside]).with_format("arrow").iter(batch_size=_BATCH_ROWS):
        if not _is_right(table.select(read), vocabulary) or not _are_as_long(table):
            yield from enumerate(table.to_pylist(), number)
        number += table.num_rows


def _are_as_long(table: pa.Table) -> bool:
    """Whether every list of a row has as many items as its first."""
    lengths = pc.list_value_length(table.column(0))
    return all(
        pa.types.is_list(column.type) and pc.list_value_length(column).equals(lengths) for column in table.columns
    )


def _is_right(table: pa.Table, vocabulary: int) -> bool:
    """True if every row of a batch is right; False where it has to be asked row by row."""
    if not all(pa.types.is_list(kind) and pa.types.is_integer(kind.value_type) for kind in table.schema.types):
        return False
    lengths = pc.list_value_length(table["input_ids"])
    if lengths.null_count or (pc.min(lengths).as_py() or 0) < 1:
        return False
    for name in table.column_names:
        column = table[name]
        if not pc.list_value_length(column).equals(lengths):
            return False
        values = pc.list_flatten(column)
        learned = pc.filter(values, pc.not_equal(values, IGNORED)) if name == "labels" else values
        extremes = pc.min_max(learned).as_py()
        if values.null_count or (learned and not 0 <= extremes["min"] <= extremes["max"] < vocabulary):
            return False
    return True
