"""Reading single values of a row. Nothing is coerced: a number where text belongs is an error, not "42"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from sft_toolkit.data.conversation import RowError
from sft_toolkit.data.readers.json_text import parse_value

Row = Mapping[str, Any]


@contextmanager
def located(place: str) -> Iterator[None]:
    """Puts the place before the reason of a `RowError` raised inside: `message 2: ...`."""
    try:
        yield
    except RowError as error:
        raise RowError(f"{place}: {error}") from None


def required(row: Row, column: str) -> Any:
    """The value of a column, null included.

    Raises:
        RowError: missing; lists the columns that are there.
    """
    if column not in row:
        raise RowError(f"{column!r} is missing; the row has {', '.join(map(repr, row)) or 'no columns'}")
    return row[column]


def text(row: Row, column: str) -> str:
    """The text of a column.

    Raises:
        RowError: missing, null, not text, or text that is no Unicode.
    """
    return as_text(required(row, column), column)


def optional_text(row: Row, column: str) -> str | None:
    """As `text`, but None where the column is absent, null or empty."""
    value = row.get(column)
    return None if value is None else as_text(value, column) or None


def as_text(value: Any, name: str) -> str:
    """The value, if it is text; `name` is what the message calls it."""
    if not isinstance(value, str):
        raise RowError(f"{name!r} is {describe(value)}, not text")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            lone = ord(error.object[error.start])
            raise RowError(f"{name!r} holds a lone surrogate (\\u{lone:04x}), which is no character") from None
    return value


def list_of(value: Any, name: str) -> list[Any]:
    """A list, or the JSON text of one (as tables must store it). Null and "" are an empty list."""
    value = _decoded(value, name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise RowError(f"{name!r} is {describe(value)}, not a list")
    return value


def mapping(value: Any, name: str) -> dict[str, Any]:
    """An object, or the JSON text of one. Null and "" are an empty object."""
    value = _decoded(value, name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise RowError(f"{name!r} is {describe(value)}, not an object")
    return value


def describe(value: Any) -> str:
    """What a value is, in words: `the number 42`, `a list`, `null`."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return f"the number {value}"
    names: dict[type, str] = {str: "text", list: "a list", dict: "an object"}
    return names.get(type(value), f"a value of type {type(value).__name__}")


def _decoded(value: Any, name: str) -> Any:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    try:
        return parse_value(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{name!r} is text that is not valid JSON: {error}") from None
