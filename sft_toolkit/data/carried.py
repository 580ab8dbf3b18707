"""Columns of the user's files that are kept beside the tokens: the key of the held-out split, numbers for samplers."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from sft_toolkit.data.conversation import RowError
from sft_toolkit.data.layouts.values import describe
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.errors import ConfigError

GROUP = "group"
_OURS = ("input_ids", "labels", "loss_weights", "row", "source", "content", GROUP)


@dataclass(frozen=True)
class Carried:
    """Which columns are kept.

    Args:
        group_by: column whose value names the group of a row; a row without it is in no group.
        numbers: columns that hold a number in every row.

    Raises:
        ConfigError: a name that a column of ours has.
    """

    group_by: str | None = None
    numbers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        taken = [name for name in self.numbers if name in _OURS]
        if taken:
            raise ConfigError(f"data.sampler: a column can't be called {taken[0]!r} here; rename it in the file")

    def fields(self) -> list[tuple[str, pa.DataType]]:
        """The columns that come behind those of every token row; `group` is a hash, null where a row has none."""
        group = [(GROUP, pa.uint64())] if self.group_by is not None else []
        return [*group, *((name, pa.float64()) for name in self.numbers)]

    def values(self, raw: RawRow) -> list[Any]:
        """The values of a row, one per field.

        Raises:
            RowError: a number that is missing or none.
        """
        group = [_key(raw.row.get(self.group_by))] if self.group_by is not None else []
        return [*group, *(_number(raw, name) for name in self.numbers)]


NOTHING = Carried()


def _key(value: Any) -> int | None:
    """64-bit hash of a value, the same in every process; None for null."""
    if value is None:
        return None
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, person=b"group").digest(), "big")


def _number(raw: RawRow, name: str) -> float:
    if name not in raw.row:
        raise RowError(f"{name!r}, which data.sampler orders by, is missing")
    value = raw.row[name]
    if isinstance(value, str):  # a CSV file has no numbers
        try:
            value = float(value)
        except ValueError:
            raise RowError(f"{name!r}, which data.sampler orders by, is {value!r}, not a number") from None
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RowError(f"{name!r}, which data.sampler orders by, is {describe(value)}, not a finite number")
    return float(value)
