"""JSONL: one JSON object a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from sft_toolkit.data.readers.json_text import parse_row
from sft_toolkit.data.readers.lines import invalid_utf8, numbered_lines
from sft_toolkit.data.readers.raw import RawRow

_BLANK = b" \t\r\n"


def read_jsonl(path: Path) -> Iterator[RawRow]:
    """Every line that is not blank; a line that is no JSON object carries its `error`. Memory: one line.

    Raises:
        DataError: the file can't be read at all.
    """
    first = True
    for number, line in numbered_lines(path):
        stripped = line.strip(_BLANK)
        if not stripped:
            continue
        try:
            raw = RawRow(str(path), number, parse_row(stripped.decode("utf-8")), unit="line")
        except UnicodeDecodeError as error:
            raw = RawRow(str(path), number, {}, invalid_utf8(error), unit="line")
        except ValueError as error:
            hint = "; this looks like one JSON list: name the file .json" if first and stripped[:1] == b"[" else ""
            raw = RawRow(str(path), number, {}, f"{error}{hint}", unit="line")
        first = False
        yield raw
