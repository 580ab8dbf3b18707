"""Options by the signature that takes them: unknown, missing, and of another type than is declared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Optional, cast

import pytest
from transformers import EarlyStoppingCallback

from sft_toolkit.options import may_be, option_problems

if TYPE_CHECKING:
    from nowhere import Thing  # type: ignore[import-not-found]


class Declared:
    def __init__(
        self,
        n: int = 1,
        rate: float = 0.1,
        note: str = "",
        on: bool = False,
        path: Path = Path(),
        late: int = cast(int, None),
    ) -> None:
        pass


class Unresolvable:
    def __init__(self, n: int = 1, thing: Thing | None = None) -> None:
        pass


def undeclared(n=1):  # type: ignore[no-untyped-def]
    return n


@pytest.mark.parametrize(
    ("thing", "options", "problems"),
    [
        (Declared, {"n": 2, "rate": 1, "note": "x", "on": True, "path": "a/b", "late": None}, []),
        (Declared, {"n": "abc"}, ["option 'n': expected a whole number, not 'abc'"]),
        (Declared, {"n": True}, ["option 'n': expected a whole number, not True"]),
        (Declared, {"n": None}, ["option 'n': expected a whole number, not None"]),
        (Declared, {"rate": [1]}, ["option 'rate': expected a number, not [1]"]),
        (Declared, {"note": 5}, ["option 'note': expected text, not 5; in quotes it is text"]),
        (Declared, {"on": "no"}, ["option 'on': expected true or false, not 'no'"]),
        (Declared, {"path": 3}, ["option 'path': expected a path, not 3"]),
        (Unresolvable, {"n": "x", "thing": "anything"}, ["option 'n': expected a whole number, not 'x'"]),
        (undeclared, {"n": object}, []),
        (EarlyStoppingCallback, {"early_stopping_patience": "abc"},
         ["option 'early_stopping_patience': expected a whole number, not 'abc'"]),
        (EarlyStoppingCallback, {"early_stopping_patience": 2, "early_stopping_threshold": None}, []),
        (EarlyStoppingCallback, {"patience": 2},
         ["unknown option 'patience' (accepted: early_stopping_patience, early_stopping_threshold)"]),
    ],
)  # fmt: skip
def test_problems(thing: Any, options: dict[str, Any], problems: list[str]) -> None:
    assert option_problems(thing, options) == problems


@pytest.mark.parametrize(
    ("hint", "yes", "no"),
    [
        (list[str], [[], ["a"]], ["a", [1], {}]),
        (Sequence[str], ["a", ["a"]], [1, [1], {}]),
        (Mapping[Any, Sequence[str]], [{}, {"0": "a", "1": ["b"]}], ["abc", ["a"], {"0": 5}]),
        (dict[str, float], [{"a": 1}], [{"a": "x"}, 1]),
        (tuple[float, float], [[0.9, 0.99]], [0.9, "0.9"]),
        (Literal["a", "b"], ["a"], ["c", 1]),
        (Optional[int], [None, 1], [1.5]),  # noqa: UP045  (as upstream writes it)
        (int | Path, [1, "a"], [1.5]),
        (Declared, ["what", 1, None], []),  # no file can give one, but a class may convert
    ],
)
def test_what_may_be_of_a_type(hint: Any, yes: list[Any], no: list[Any]) -> None:
    assert [may_be(hint, value) for value in yes] == [True] * len(yes)
    assert [may_be(hint, value) for value in no] == [False] * len(no)
