"""Data files in the working directory, for tests."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit.args import SourceArguments
from sft_toolkit.data.sources import read_rows
from sft_toolkit.errors import DataError


def write(name: str, content: str | bytes) -> SourceArguments:
    """Writes a file, gzipped if its name says so, and names it as a source."""
    data = content if isinstance(content, bytes) else content.encode()
    Path(name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    return SourceArguments(path=name)


def rows_of(source: SourceArguments) -> list[dict[str, Any]]:
    """All rows of a source."""
    return [raw.row for raw in read_rows(source)]


def failure(source: SourceArguments) -> str:
    """Why the source can't be read."""
    with pytest.raises(DataError) as caught:
        list(read_rows(source))
    return str(caught.value)
