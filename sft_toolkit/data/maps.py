"""The `columns` and `roles` maps of a source: names that no row has are typing errors, not something to pass over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sft_toolkit.args import SourceArguments
from sft_toolkit.data.conversation import Example
from sft_toolkit.data.formats import converter
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.report import Tally
from sft_toolkit.errors import DataError
from sft_toolkit.hints import did_you_mean

Read = Callable[[RawRow], Example]


class Roles(dict[str, str]):
    """A map of roles {theirs: ours} that knows which of its names were never asked for."""

    def __init__(self, roles: dict[str, str]) -> None:
        super().__init__(roles)
        self.unseen = set(roles)

    def get(self, key: str, default: Any = None) -> Any:
        """As of a dict."""
        self.unseen.discard(key)
        return super().get(key, default)


class WatchedMaps:
    """Reads the rows of a source under its maps, and says afterwards what in these was of no use.

    Args:
        source: with `columns` and `roles`.
        formats: the format of the whole source, or of each file.
    """

    def __init__(self, source: SourceArguments, formats: dict[str, str] | str) -> None:
        self._source = source
        self._roles = Roles(source.roles)
        self._unseen = set(source.columns.values())
        self._found: set[str] = set()
        self._formats = formats
        self._readers: dict[str, Read] = {}

    def __call__(self, raw: RawRow) -> Example:
        """The row as an example; RowError with the reason where it is none."""
        if self._unseen:
            self._unseen -= raw.row.keys()
            self._found |= raw.row.keys()
        return self._reader(raw.source)(raw)

    def _reader(self, file: str) -> Read:
        format = self._formats if isinstance(self._formats, str) else self._formats[file]
        if format not in self._readers:
            self._readers[format] = converter(format, self._source.columns, self._roles)
        return self._readers[format]

    def report(self, tally: Tally) -> None:
        """Count roles that no message has.

        Raises:
            DataError: a mapped column that no row has; nobody asked for it to be absent.
        """
        for ours, theirs in self._source.columns.items():
            if theirs in self._unseen and tally.rows_read:
                hint = did_you_mean(theirs, sorted(self._found))
                found = ", ".join(sorted(self._found)) or "none"
                raise DataError(
                    f"{self._source.path}: columns: {theirs!r}, mapped to {ours!r}, is in no row{hint}; found: {found}"
                )
        for theirs in sorted(self._roles.unseen):
            tally.warn(f"roles: {theirs!r} is the role of no message", [self._source.path])
