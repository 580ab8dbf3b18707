"""A row as it stands in its file, and where that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


def place(source: str, number: int) -> str:
    """Where a row is, for messages, from what is kept of it: `train.jsonl, line 7`."""
    by_line = source.removesuffix(".gz").endswith((".jsonl", ".ndjson"))
    return f"{source}, {'line' if by_line else 'row'} {number}"


@dataclass(frozen=True)
class RawRow:
    """One row of a source.

    Args:
        source: the file, or the hub id.
        number: 1-based; the line of a JSONL file, else the row (a CSV header is not counted).
        row: the row's columns; empty when it can't be read.
        error: why the row can't be read, else None.
        unit: what `number` counts.
    """

    source: str
    number: int
    row: dict[str, Any]
    error: str | None = None
    unit: Literal["row", "line"] = "row"

    @property
    def place(self) -> str:
        """Where the row is, for messages: `train.jsonl, line 7`."""
        return f"{self.source}, {self.unit} {self.number}"
