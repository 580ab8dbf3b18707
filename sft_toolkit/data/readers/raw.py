"""A row as it stands in its file, and where that is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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
