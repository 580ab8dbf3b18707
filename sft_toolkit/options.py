"""Options that a configuration gives to a class or a function: those it does not take, misses, or takes otherwise."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from os import PathLike
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from sft_toolkit.hints import did_you_mean
from sft_toolkit.limits import LISTS, accepts, choices, expected, members

_PLAIN = (int, float, str, bool, NoneType)
_MAPPINGS = (dict, Mapping, MutableMapping)


def option_problems(thing: Callable[..., Any], options: Mapping[str, Any], given: Collection[str] = ()) -> list[str]:
    """Options that a class or function does not take, that it misses, or whose value is of no type that it declares.

    Args:
        given: parameters that the caller fills in itself.
    """
    try:
        parameters = inspect.signature(thing).parameters.values()
    except ValueError:  # some types written in C have none
        return []
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name not in given]
    accepted = [p.name for p in named]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    listed = f"accepted: {', '.join(accepted)}" if accepted else "it takes no options"
    problems = [
        f"unknown option '{option}'{did_you_mean(option, accepted)} ({listed})"
        for option in options
        if option not in accepted and not takes_any
    ]
    required = [p.name for p in named if p.default is p.empty]
    problems += [f"missing option '{option}' ({listed})" for option in required if option not in options]
    return [*problems, *_wrong_types(thing, [p for p in named if p.name in options], options)]


def _wrong_types(
    thing: Callable[..., Any], named: Iterable[inspect.Parameter], options: Mapping[str, Any]
) -> Iterator[str]:
    hints = _hints(thing)
    for parameter in named:
        hint, value = hints.get(parameter.name, Any), options[parameter.name]
        if value is None and parameter.default is None:
            continue  # `n: int = None` means `int | None`
        if not may_be(hint, value):
            advice = "; in quotes it is text" if str in members(hint) and isinstance(value, int | float) else ""
            advice = did_you_mean(value, map(str, choices(hint))) if isinstance(value, str) else advice
            yield f"option '{parameter.name}': expected {expected(hint)}, not {value!r}{advice}"


def may_be(hint: Any, value: Any) -> bool:
    """Whether a value from a file can be of a declared type; where that can't be told, it can."""
    if len(members(hint)) > 1:
        return any(may_be(member, value) for member in members(hint))
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind in _PLAIN or kind is Literal:
        return accepts(hint, value)
    if kind in _MAPPINGS:
        return isinstance(value, dict) and all(may_be(inner[1], item) for item in value.values() if inner)
    if kind in LISTS:
        if isinstance(value, str):
            return kind in (Sequence, Collection, Iterable)
        return isinstance(value, list | tuple) and all(may_be(inner[0], item) for item in value if len(inner) == 1)
    return not (isinstance(kind, type) and issubclass(kind, PathLike)) or isinstance(value, str)


def _hints(thing: Callable[..., Any]) -> dict[str, Any]:
    """Declared types by parameter, as far as they can be known."""
    target: Any = cast(Any, thing).__init__ if isinstance(thing, type) else thing
    try:
        return get_type_hints(target)
    except Exception:  # anybody's annotations, such as names that are there for a type checker alone
        plain = {kind.__name__: kind for kind in (int, float, str, bool)}
        written = getattr(target, "__annotations__", {}).items()
        return {name: plain.get(hint, hint) for name, hint in written if hint in plain or hint in _PLAIN}
