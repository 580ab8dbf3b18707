"""Classes that say which keyword was meant where one is unknown, instead of Python's bare TypeError."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from sft_toolkit.errors import UnknownKeywordError

if TYPE_CHECKING:
    from typing_extensions import Self


class KnownKeywords:
    """Refuses unknown keywords when an instance is made, all at once, each with the name that is right.

    In `__new__`, so that the signature of `__init__` stays closed: editors and type checkers go by it.

    Raises:
        UnknownKeywordError: a ConfigError, and a TypeError.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """As `object.__new__`."""
        if unknown := _unknown(cls, kwargs):
            from sft_toolkit.config_file.in_python import explain_keyword

            known = list(_parameters(cls))[1:]
            raise UnknownKeywordError([explain_keyword(cls.__name__, known, name) for name in unknown])
        return super().__new__(cls)


def _unknown(cls: type, given: dict[str, Any]) -> list[str]:
    parameters = _parameters(cls) if given else {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return []  # a subclass that takes any passes them on or keeps them
    return [name for name in given if name not in parameters]


def _parameters(cls: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(cls.__init__).parameters)  # type: ignore[misc]
