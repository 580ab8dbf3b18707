"""The words for a type, and the check of values that come from Python."""

from __future__ import annotations

from typing import Any, Literal, Optional

import numpy as np
import pytest

from sft_toolkit.args import LoraArguments, ModelArguments, SourceArguments, TrainingExtras
from sft_toolkit.limits import accepts, beyond, expected, problems_in


@pytest.mark.parametrize(
    ("hint", "words"),
    [
        (bool, "true or false"),
        (Optional[bool], "true, false or null"),  # noqa: UP045  (as upstream writes it)
        (int | None, "a whole number or null"),
        (float, "a number"),
        (None | str | list[str], "text, a list of texts or null"),
        (dict[str, Any] | str | None, "a mapping, text or null"),
        (list[Any], "a list"),
        (Any, "any value"),
        (Literal[False, "cpu"], "one of false, cpu"),
        (Literal["x"], "x"),
        (list[list[int]], "a list of lists"),
        (Literal[tuple(f"c{n}" for n in range(14))], f"one of {', '.join(f'c{n}' for n in range(12))} and 2 more"),
    ],
)
def test_a_type_in_words(hint: Any, words: str) -> None:
    assert expected(hint) == words


@pytest.mark.parametrize(
    ("hint", "value", "accepted"),
    [
        (int, 3, True),
        (int, np.int64(3), True),
        (int, True, False),
        (int, 3.0, False),
        (float, 3, True),
        (float, "3", False),
        (bool, 1, False),
        (Literal[False, "cpu"], False, True),
        (Literal[False, "cpu"], 0, False),
        (Literal[False, "cpu"], "gpu", False),
        (str | None, None, True),
        (list[str], ["a"], True),
        (list[str], ["a", 1], False),
        (list[str], "a", False),
        (dict[str, int], {"a": 1}, True),
        (dict[str, int], {"a": "b"}, False),
        (Any, object(), True),
    ],
)
def test_accepted(hint: Any, value: Any, accepted: bool) -> None:
    assert accepts(hint, value) is accepted


def test_limits_include_their_bounds() -> None:
    limits = {"minimum": 0, "maximum": 1.5}
    assert [beyond(value, limits) for value in (0, 1.5, True, None, "x")] == [None] * 5
    assert beyond(-1, limits) == "-1 is below the minimum, 0"
    assert beyond(2, limits) == "2 is above the maximum, 1.5"


def test_all_problems_of_a_section() -> None:
    wrong: Any = {"r": 0, "dropout": 2, "variant": "lore", "targets": 5}
    assert problems_in(LoraArguments(**wrong)) == [
        "r: 0 is below the minimum, 1",
        "dropout: 2 is above the maximum, 1",
        "targets: expected text or a list of texts, not 5",
        "variant: expected one of lora, rslora, dora, pissa, olora, not 'lore'",
    ]
    assert problems_in(LoraArguments()) == []
    assert problems_in(ModelArguments(name_or_path="x")) == []
    assert problems_in(TrainingExtras(global_batch_size=0)) == ["global_batch_size: 0 is below the minimum, 1"]


def test_a_name_of_the_registry_may_stand_beside_the_choices() -> None:
    own: Any = {"path": "x", "format": "my_format"}
    assert problems_in(SourceArguments(**own)) == []
