"""JSON: one list of objects. Many tools write JSONL under this name, so that is read too."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Literal

from sft_toolkit.data.readers.json_text import parse_row, scan_row
from sft_toolkit.data.readers.jsonl import read_jsonl
from sft_toolkit.data.readers.lines import numbered_lines
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.errors import DataError

_SPACE = re.compile(r"[ \t\r\n]*")
_SURROGATE = re.compile(r"[\udc80-\udcff]")


def read_json(path: Path) -> Iterator[RawRow]:
    """The objects of the list, one at a time. Memory: the file's text, since JSON can't be read by lines.

    Raises:
        DataError: no list at the top level, or a place behind which nothing can be read, with its line.
    """
    content = _content(path)
    if content == "list":
        yield from _read_list(path)
    elif content == "lines":
        yield from read_jsonl(path)
    elif content == "other":
        raise DataError(_explain_top_level(path))


def _content(path: Path) -> Literal["nothing", "list", "lines", "other"]:
    """What the file holds, judged by its first two lines that are not blank."""
    opening = list(islice((line for _, line in numbered_lines(path) if line.strip()), 2))
    if not opening:
        return "nothing"
    if opening[0].lstrip().startswith(b"["):
        return "list"
    return "lines" if len(opening) == 2 and _is_object(opening[0]) else "other"


def _is_object(line: bytes) -> bool:
    try:
        parse_row(line.decode("utf-8"))
    except ValueError:
        return False
    return True


def _read_list(path: Path) -> Iterator[RawRow]:
    text = _text(path)
    at = _skip(text, text.index("[") + 1)
    number, line, counted = 0, 1, 0
    closed = text.startswith("]", at)
    while not closed:
        number += 1
        line, counted = line + text.count("\n", counted, at), at
        try:
            row, end, error = scan_row(text, at)
            at = _skip(text, end)
            closed = text.startswith("]", at)
            if not closed and not text.startswith(",", at):
                raise json.JSONDecodeError("Expecting ',' or ']' behind the row", text, at)
        except json.JSONDecodeError as broken:
            raise _no_json(path, broken, f" in row {number}") from None
        if _SURROGATE.search(text, counted, end):
            row, error = {}, "invalid UTF-8; save the file as UTF-8"
        yield RawRow(str(path), number, row, error and f"line {line}: {error}")
        at = at if closed else _skip(text, at + 1)
    behind = _skip(text, at + 1)
    if behind < len(text):
        raise _no_json(path, json.JSONDecodeError("Extra data", text, behind), " behind the list")


def _text(path: Path) -> str:
    # surrogateescape keeps a byte that is no UTF-8 visible, so that only its own row is refused.
    return b"".join(line for _, line in numbered_lines(path)).decode("utf-8", "surrogateescape")


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _no_json(path: Path, error: json.JSONDecodeError, where: str) -> DataError:
    return DataError(f"{path}, line {error.lineno}: not valid JSON{where}: {error.msg} (column {error.colno})")


def _explain_top_level(path: Path) -> str:
    try:
        top = json.loads(_text(path))
    except json.JSONDecodeError as error:
        return str(_no_json(path, error, ""))
    expected = "expected a list of rows: [{...}, {...}]"
    if not isinstance(top, dict):
        return f"{path}: the top level is {json.dumps(top)[:40]}; {expected}"
    problem = f"{path}: the top level is one object with the keys {', '.join(map(repr, top))}; {expected}"
    for key, value in top.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return f"{problem}. If the rows are the {len(value)} under {key!r}, save that list alone as the file"
    return f"{problem}. If the file is one row, put it into brackets"
