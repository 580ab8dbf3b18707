"""Strict JSON: duplicate keys and text that is no Unicode are refused, everything else stays as written."""

from __future__ import annotations

import json
import re
from typing import Any

# A valid pair matches too (an emoji written as two escapes); only then is the slow test worth its time.
_MAYBE_LONE_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. A repeated key would silently lose a value, so it is refused."""
    unique = dict(pairs)
    if len(unique) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} appears twice in one object")
    return unique


_STRICT = json.JSONDecoder(object_pairs_hook=_unique_keys)
_LENIENT = json.JSONDecoder()


def parse_row(text: str) -> dict[str, Any]:
    """The JSON object that this text is.

    Raises:
        ValueError: the reason, with the 1-based column where the text is no JSON.
    """
    try:
        row, end, problem = scan_row(text, 0)
        behind = text[end:].lstrip()
        if problem is None and behind:
            raise json.JSONDecodeError("Extra data", text, len(text) - len(behind))
    except json.JSONDecodeError as error:
        raise ValueError(f"not valid JSON: {error.msg} (column {error.colno})") from None
    if problem is not None:
        raise ValueError(problem)
    return row


def parse_value(text: str) -> Any:
    """The JSON value that a text inside a row is: arguments of a call, a list that a table had to store as text.

    Raises:
        ValueError, RecursionError: it is no JSON, or an object with a key twice.
    """
    return _STRICT.decode(text)


def scan_row(text: str, start: int) -> tuple[dict[str, Any], int, str | None]:
    """Reads one JSON value of a longer text.

    Returns:
        The row, the index behind it, and None; or an empty row, that index, and why it can't be used.

    Raises:
        json.JSONDecodeError: what stands there is no JSON, so that nobody can tell where it ends.
    """
    try:
        value, end = _STRICT.raw_decode(text, start)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise json.JSONDecodeError("nested too deeply", text, start) from None
    except ValueError as error:
        return {}, _LENIENT.raw_decode(text, start)[1], str(error)
    if not isinstance(value, dict):
        kind = {list: "a list", str: "a string", type(None): "null"}.get(type(value), f"the value {value!r}")
        return {}, end, f"the row is {kind}, not an object"
    if _MAYBE_LONE_SURROGATE.search(text, start, end) and (lone := _lone_surrogate(value)):
        return {}, end, f"the text holds a lone surrogate (\\u{ord(lone):04x}), which is no character"
    return value, end, None


def _lone_surrogate(value: Any) -> str | None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return str(error.object[error.start])
    return None
