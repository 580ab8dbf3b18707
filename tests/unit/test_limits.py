"""The words for a type, and the check of values that come from Python."""

from __future__ import annotations

from typing import Any, Literal, Optional

import numpy as np
import pytest

from sft_toolkit.args import (
    CallbackArguments,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SourceArguments,
    TrainingExtras,
)
from sft_toolkit.errors import ConfigError
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


def test_infinite_and_exclusive_limits() -> None:
    assert beyond(float("nan"), {}) == "nan is not a finite number"
    assert beyond(float("inf"), {"minimum": 0}) == "inf is not a finite number"
    assert beyond(float("inf"), {"minimum": 0, "infinite": True}) is None
    assert beyond(1.0, {"below": 1}) == "1.0 is not below 1"
    assert beyond(0.999, {"below": 1}) is None


def test_all_problems_of_a_section() -> None:
    section: Any = LoraArguments()
    section.r, section.dropout, section.variant, section.targets = 0, 2, "lore", 5
    problems = problems_in(section)
    assert problems[:3] == [
        "r: 0 is below the minimum, 1",
        "dropout: 2 is not below 1",
        "targets: expected text or a list of texts, not 5",
    ]
    assert problems[3].startswith("variant: expected one of lora, rslora, dora, pissa, olora")
    assert problems[3].endswith("not 'lore'")
    assert problems_in(LoraArguments()) == []
    assert problems_in(ModelArguments(name_or_path="x")) == []
    assert problems_in(TrainingExtras(global_batch_size=0)) == ["global_batch_size: 0 is below the minimum, 1"]


@pytest.mark.parametrize(
    ("section", "wrong", "problems"),
    [
        (LoraArguments, {"r": 0}, ["LoraArguments.r: 0 is below the minimum, 1"]),
        (LoraArguments, {"targets": 5, "dropout": -1}, [
            "LoraArguments.dropout: -1 is below the minimum, 0",
            "LoraArguments.targets: expected text or a list of texts, not 5",
        ]),
        (ModelArguments, {"name_or_path": 3}, ["ModelArguments.name_or_path: expected text, not 3"]),
        (SourceArguments, {"path": "x", "weight": -1.0}, ["SourceArguments.weight: -1.0 is below the minimum, 0"]),
        (DataArguments, {"max_length": 1}, ["DataArguments.max_length: 1 is below the minimum, 2"]),
        (DataArguments, {"train": "x.jsonl"}, ["DataArguments.train: expected a list of mappings, not 'x.jsonl'"]),
        (DistributedArguments, {"num_processes": 0}, ["DistributedArguments.num_processes: 0 is below the minimum, 1"]),
        (EvaluationArguments, {"metrics": "f1"}, ["EvaluationArguments.metrics: expected a list of texts, not 'f1'"]),
        (EvaluationArguments, {"generate": True}, ["EvaluationArguments.generate: expected a whole number, not True"]),
        (CallbackArguments, {"options": [1]}, ["CallbackArguments.options: expected a mapping, not [1]"]),
    ],
)  # fmt: skip
def test_a_section_refuses_wrong_values_when_it_is_made(
    section: Any, wrong: dict[str, Any], problems: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        section(**wrong)
    assert caught.value.problems == problems


def test_a_name_of_the_registry_may_stand_beside_the_choices() -> None:
    own: Any = {"path": "x", "format": "my_format"}
    assert problems_in(SourceArguments(**own)) == []
