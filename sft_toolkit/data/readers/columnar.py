"""Parquet files and hub data sets: typed columns, in which an absent key is stored as null."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_toolkit.args import SourceArguments
from sft_toolkit.data.readers.lines import hash_file
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.errors import DataError

_BATCH_ROWS = 256


def drop_nulls(value: Any) -> Any:
    """The value without null entries of objects, at any depth.

    Arrow gives each object of a column the keys of all of them and fills with null; a tool schema would show the
    model parameters of other tools.
    """
    if isinstance(value, dict):
        return {key: drop_nulls(item) for key, item in value.items() if item is not None}
    return [drop_nulls(item) for item in value] if isinstance(value, list) else value


def read_parquet(path: Path) -> Iterator[RawRow]:
    """The rows of a Parquet file. Memory: one row group's pages at most, 256 rows as objects.

    Raises:
        DataError: the file is no Parquet file, or damaged.
    """
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, pre_buffer=False) as file:
            number = 0
            for batch in file.iter_batches(batch_size=_BATCH_ROWS):
                for row, error in _rows(batch):
                    number += 1
                    yield RawRow(str(path), number, drop_nulls(row), error)
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}") from None


def _rows(batch: Any) -> Iterator[tuple[dict[str, Any], str | None]]:
    try:
        yield from ((row, None) for row in batch.to_pylist())
    except UnicodeDecodeError:
        # to_pylist is all or nothing: only the rows that really hold such bytes are refused.
        yield from (_single_row(batch.slice(index, 1)) for index in range(batch.num_rows))


def _single_row(batch: Any) -> tuple[dict[str, Any], str | None]:
    try:
        return batch.to_pylist()[0], None
    except UnicodeDecodeError as error:
        return {}, f"invalid UTF-8: byte 0x{error.object[error.start]:02X}"


def load_hub(source: SourceArguments, streaming: bool = False) -> Any:
    """The `datasets.Dataset` of a hub id, memory-mapped from the Hugging Face cache.

    Raises:
        DataError: it doesn't exist, can't be reached, or lacks the split or subset.
    """
    from datasets import load_dataset

    try:
        return load_dataset(
            source.path, name=source.subset, split=source.split, revision=source.revision, streaming=streaming
        )
    except (OSError, ValueError) as error:
        raise DataError(
            f"{source.path}: no file of this name exists here, and as a hub data set (split '{source.split}') "
            f"it can't be loaded: {error}"
        ) from None


def read_hub(source: SourceArguments, streaming: bool = False) -> Iterator[RawRow]:
    """The rows of one split of a hub data set."""
    for number, row in enumerate(load_hub(source, streaming), 1):
        yield RawRow(source.path, number, drop_nulls(row))


def hub_digest(source: SourceArguments) -> str:
    """sha256 over the content of the split, in hexadecimal: of its Arrow files, or of its rows where it has none."""
    dataset = load_hub(source)
    digest = hashlib.sha256()
    for file in dataset.cache_files:
        hash_file(Path(file["filename"]), digest)
    if not dataset.cache_files:
        for row in dataset:
            digest.update(json.dumps(row, sort_keys=True, default=str).encode())
    return digest.hexdigest()
