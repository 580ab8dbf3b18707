"""CSV and TSV: every cell stays text, whatever it looks like ("NA", "007", "2020-01-01")."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sft_toolkit.data.readers.lines import numbered_lines
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.errors import DataError

_LONGEST_CELL = 2**31 - 1  # the largest that a C long holds everywhere
_ENDLESS = "unexpected end of data"
_NO_UTF8 = re.compile(r"[\udc80-\udcff]")


def read_csv(path: Path, delimiter: str = ",") -> Iterator[RawRow]:
    """The records below the header; quoted cells may hold line ends. Memory: one record.

    Raises:
        DataError: the file can't be read, its header is unusable, or a quote is never closed.
    """
    records = _records(path, delimiter)
    line, header, problem = next(records, (1, [], None))
    _check_header(path, header, problem)
    for number, (line, cells, problem) in enumerate(records, 1):
        problem = problem or _misfit(header, cells)
        if problem:
            yield RawRow(str(path), number, {}, f"line {line}: {problem}")
        else:
            yield RawRow(str(path), number, dict(zip(header, cells, strict=True)))


def read_tsv(path: Path) -> Iterator[RawRow]:
    """`read_csv` with tabs between the cells."""
    return read_csv(path, delimiter="\t")


def _records(path: Path, delimiter: str) -> Iterator[tuple[int, list[str], str | None]]:
    """(first line, cells, problem) of each record; blank lines are left out."""
    # surrogateescape keeps a byte that is no UTF-8 visible, so that only its own record is refused.
    lines = (line.decode("utf-8", "surrogateescape") for _, line in numbered_lines(path))
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    while True:
        line = reader.line_num + 1
        cells, problem = _next_record(reader)
        if cells is None:
            return
        if problem == _ENDLESS:
            raise DataError(f"{path}, line {line}: the record that starts here has a quote without end")
        if cells or problem:
            yield line, cells, problem


def _next_record(reader: Any) -> tuple[list[str] | None, str | None]:
    """The next cells, or why there are none, or None at the end.

    The csv module refuses cells of more than 131,072 characters; its limit is lifted for the duration of the call.
    """
    limit = csv.field_size_limit(_LONGEST_CELL)
    try:
        return next(reader, None), None
    except csv.Error as error:
        return [], str(error)
    finally:
        csv.field_size_limit(limit)


def _check_header(path: Path, names: list[str], problem: str | None) -> None:
    repeated = sorted({name for name in names if names.count(name) > 1})
    if any(map(_NO_UTF8.search, names)):
        problem = "invalid UTF-8; save the file as UTF-8"
    elif repeated:
        problem = f"the header names {', '.join(map(repr, repeated))} more than once"
    if problem is not None:
        raise DataError(f"{path}, header: {problem}")


def _misfit(header: list[str], cells: list[str]) -> str | None:
    if any(map(_NO_UTF8.search, cells)):
        return "invalid UTF-8; save the file as UTF-8"
    if len(cells) != len(header):
        return f"{len(cells)} cells, but the header has {len(header)} ({', '.join(header)})"
    return None
