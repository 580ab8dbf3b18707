"""What a field accepts, in words, and the check of a value that came from Python.

Values from a YAML file are read by `config_values`, with the same words and the same limits.
"""

from __future__ import annotations

import math
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from numbers import Integral, Real
from os import PathLike
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SHOWN_CHOICES = 12
LISTS: tuple[Any, ...] = (list, tuple, set, frozenset, Sequence, Collection, Iterable)


def members(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the hint alone: `str | None` -> `(str, NoneType)`."""
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def is_optional(hint: Any) -> bool:
    """Whether null is a value of this field."""
    return hint is Any or types.NoneType in members(hint)


def choices(hint: Any) -> list[Any]:
    """The values of all literals in a hint, in order: `Literal["a", "b"] | None` -> `["a", "b"]`."""
    return [value for member in members(hint) if get_origin(member) is Literal for value in get_args(member)]


def in_yaml(value: Any) -> str:
    """A choice as one writes it in the file: `False` -> `false`."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def expected(hint: Any) -> str:
    """A type in the words of the user: `int | str | None` -> "a whole number, text or null"."""
    in_order = sorted(members(hint), key=lambda member: member is types.NoneType)
    parts = [part for member in in_order for part in (["true", "false"] if member is bool else [_in_words(member)])]
    return " or ".join(part for part in (", ".join(parts[:-1]), parts[-1]) if part)


def _in_words(hint: Any) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        types.NoneType: "null",
        Any: "any value",
    }
    if get_origin(hint) is Literal:
        names = [in_yaml(value) for value in get_args(hint)]
        more = len(names) - _SHOWN_CHOICES
        listed = ", ".join(names[:_SHOWN_CHOICES]) + (f" and {more} more" if more > 0 else "")
        return listed if len(names) == 1 else f"one of {listed}"
    if (get_origin(hint) or hint) in LISTS:
        inner = get_args(hint)
        return f"a list of {_plural(inner[0])}" if inner and inner[0] is not Any else "a list"
    if get_origin(hint) is dict or hint is dict:
        return "a mapping"
    if isinstance(hint, type) and issubclass(hint, PathLike):
        return "a path"
    return words.get(hint, "a mapping")


def _plural(hint: Any) -> str:
    plurals = {str: "texts", int: "whole numbers", float: "numbers", bool: "true or false"}
    if get_origin(hint) is list:
        return "lists"
    return plurals.get(hint, "mappings" if expected(hint) == "a mapping" else expected(hint))


def beyond(value: Any, limits: Mapping[str, Any]) -> str | None:
    """Why a number is outside `minimum` and `maximum` (both inclusive) and `below` (exclusive), or None."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    if not math.isfinite(value) and not limits.get("infinite", False):
        return f"{value} is not a finite number"
    if value < limits.get("minimum", value):
        return f"{value} is below the minimum, {limits['minimum']:g}"
    if value > limits.get("maximum", value):
        return f"{value} is above the maximum, {limits['maximum']:g}"
    if "below" in limits and value >= limits["below"]:
        return f"{value} is not below {limits['below']:g}"
    return None


def accepts(hint: Any, value: Any) -> bool:
    """Whether a Python value is one of this type; whole numbers are numbers, true and false are not."""
    if hint is Any:
        return True
    if len(members(hint)) > 1:
        return any(accepts(member, value) for member in members(hint))
    if get_origin(hint) is Literal:
        return any(value == choice and isinstance(value, bool) == isinstance(choice, bool) for choice in get_args(hint))
    if hint in (int, float):
        return isinstance(value, Integral if hint is int else Real) and not isinstance(value, bool)
    inner = get_args(hint)
    if get_origin(hint) is list:
        return isinstance(value, list) and all(accepts(inner[0], item) for item in value)
    if get_origin(hint) is dict:
        return isinstance(value, dict) and all(accepts(inner[1], item) for item in value.values())
    return isinstance(value, hint)


def problems_in(section: Any, *classes: type) -> list[str]:
    """What is wrong with the values of a dataclass instance, one sentence each, naming the field.

    Args:
        section: an instance of one of the dataclasses of `args`, or of a class derived from them.
        classes: look only at the fields that these classes declare; by default at all fields.
    """
    found = []
    for cls in classes or (type(section),):
        hints = get_type_hints(cls)
        for knob in fields(cls):
            value = getattr(section, knob.name)
            # A registered name or a dotted path stands beside the choices of the type.
            named = "kind" in knob.metadata and isinstance(value, str) and bool(choices(hints[knob.name]))
            if not accepts(hints[knob.name], value) and not named:
                found.append(f"{knob.name}: expected {expected(hints[knob.name])}, not {value!r}")
            elif reason := beyond(value, knob.metadata):
                found.append(f"{knob.name}: {reason}")
    return found
