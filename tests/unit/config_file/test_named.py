"""A name of the registry, with or without options: `data.sampler` and `data.transform`."""

from __future__ import annotations

from typing import Any

import pytest

from sft_toolkit.config import load_config, resolved_yaml
from tests.unit.config_file.texts import MODEL, TRAINING, Load, Problems


def text(line: str) -> str:
    """A configuration whose fifth line is a key of section data."""
    return f"{MODEL}{TRAINING}data:\n  train: train.jsonl\n  {line}\n"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("sampler: by_length", "by_length"),
        ("sampler: tests.tiny.Order", "tests.tiny.Order"),
        ("sampler: null", None),
        ("sampler: {by_length: {window: 8}}", {"by_length": {"window": 8}}),
        (
            "sampler: {staged: {stages: [{sources: {a: 0.5, b: 1}, steps: 10}, {sources: [b]}]}}",
            {"staged": {"stages": [{"sources": {"a": 0.5, "b": 1}, "steps": 10}, {"sources": ["b"]}]}},
        ),
    ],
)
def test_names_and_options_are_read_and_written_back(load: Load, line: str, value: Any, tmp_path: Any) -> None:
    config = load(text(line))
    assert config.data.sampler == value
    (tmp_path / "again.yaml").write_text(resolved_yaml(config))
    assert load_config(tmp_path / "again.yaml").data == config.data


def test_an_option_can_be_overridden(load: Load) -> None:
    config = load(text("sampler: {curriculum: {steps: 5}}"), "data.sampler.curriculum.steps=7", "data.max_refused=0.05")
    assert config.data.sampler == {"curriculum": {"steps": 7}}
    assert config.data.max_refused == 0.05
    assert load(text("packing: true"), "data.sampler={by_length: {window: 3}}").data.sampler == {
        "by_length": {"window": 3}
    }


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "sampler: by_lenght",
            "data.sampler: unknown sampler 'by_lenght'; did you mean 'by_length'? (known: by_length, curriculum, "
            "sequential, shuffle, staged; or a dotted path such as my.module.Thing)",
        ),
        ("sampler: [shuffle]", "data.sampler: expected a mapping, text or null, not a list"),
        (
            "sampler: {shuffle: {}, by_length: {}}",
            "data.sampler: expected one name, with its options below it: {name: {option: value}}, not shuffle, by_l",
        ),
        ("sampler: {by_length: 8}", "data.sampler: expected a mapping of options under 'by_length', not 8"),
        ("max_refused: 5", "data.max_refused: 5 is above the maximum, 1"),
        ("mixing: blend", "data.mixing: expected one of concatenate, interleave, not blend"),
    ],
)
def test_what_names_nothing_is_refused_with_its_line(problems: Problems, line: str, message: str) -> None:
    (found,) = problems(text(line))
    assert found.startswith(f"run.yaml:5: {message}")
