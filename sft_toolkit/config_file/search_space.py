"""Section `sweep` held against the rest of the file: every value that may be tried is read as the run would read it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from sft_toolkit.args import DataArguments, EvaluationArguments, SweepArguments
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.config_file.names import explain_unknown
from sft_toolkit.config_file.overrides import apply_override
from sft_toolkit.config_file.schema import SECTIONS, section_keys
from sft_toolkit.config_file.training_rules import check_reported
from sft_toolkit.config_file.values import plain
from sft_toolkit.hints import did_you_mean
from sft_toolkit.limits import members

_SEARCHED = [name for name in SECTIONS if name not in ("sweep", "callbacks")]
_OF_THE_SEARCH = ("training.output_dir", "training.resume", "training.resume_from_checkpoint", "training.push_to_hub")
_OF_A_RANGE = ("min", "max", "log", "step")


@dataclass(frozen=True)
class Choices:
    """Values to choose from, each as it stands behind the `=` of an override."""

    values: tuple[str, ...]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`, both included."""

    low: float
    high: float
    log: bool = False
    step: float | None = None
    whole: bool = False

    @property
    def values(self) -> tuple[str, ...]:
        """Both ends: what lies between them is as good as they are."""
        return as_override(self.low), as_override(self.high)


def as_override(value: Any) -> str:
    """A value behind the `=` of an override that is read back as the same one."""
    if isinstance(value, str):
        is_plain = isinstance(plain(value), str) and not value.startswith(("[", "{", "'", '"')) and value.strip()
        return value if is_plain else json.dumps(value)
    return json.dumps(value)


def read_space(key: str, written: Any) -> Choices | Range:
    """What `sweep.search` says of one key.

    Raises:
        ValueError: it says nothing that can be searched; the message says what would.
    """
    if isinstance(written, dict):
        return _range(key, written)
    if not isinstance(written, list) or not written:
        raise ValueError(f"expected a list of values or {{min: , max: }}, not {written!r}")
    values = tuple(as_override(value) for value in written)
    twice = next((value for value in values if values.count(value) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} stands here twice")
    return Choices(values)


def check_sweep(
    sweep: SweepArguments,
    data: DataArguments,
    training: Mapping[str, Any],
    evaluation: EvaluationArguments,
    tree: yaml.MappingNode,
    read: Callable[[yaml.MappingNode, Findings], object],
    findings: Findings,
) -> None:
    """`sweep`: each key exists, each value is one of that key, the metric is reported by an evaluation."""
    for name, node in _written(tree):
        findings.seen(f"sweep.search.{name}", node)
    if not sweep.search and not findings.blames("sweep"):
        findings.add("sweep.search", "required: what is tried, such as {lora.r: [8, 16], training.learning_rate: ...}")
    if not (data.eval or data.val_split):
        findings.add("sweep.metric", "trials are compared on held-out rows; set data.eval or data.val_split")
    else:
        scores = evaluation.metrics if evaluation.generate and evaluation.while_training else []
        check_reported("sweep.metric", sweep.metric, data, scores, findings)
    if training.get("resume", "auto") != "auto":
        findings.add("training.resume", "a search goes on where it was stopped; for a new one name another output_dir")
    known = set(findings.texts())
    first: list[str] = []
    for key, written in sweep.search.items():
        space = _space(key, written, findings)
        if space is None:
            continue
        if sweep.sampler == "grid" and isinstance(space, Range):
            findings.add(f"sweep.search.{key}", "a grid takes a list of values; or write sampler: tpe")
        first.append(f"{key}={space.values[0]}")
        for value in space.values:
            for problem in _problems(tree, [f"{key}={value}"], read, findings.source, known):
                findings.add(f"sweep.search.{key}", problem)
    if not findings.blames("sweep"):  # values that contradict one another
        for problem in _problems(tree, first, read, findings.source, known):
            findings.add("sweep.search", problem)


def _written(tree: yaml.MappingNode) -> list[tuple[str, yaml.Node]]:
    node: Any = tree
    for key in ("sweep", "search"):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        node = next((value for name, value in pairs if name.value == key), None)
    return [(name.value, name) for name, _ in node.value] if isinstance(node, yaml.MappingNode) else []


def _space(key: str, written: Any, findings: Findings) -> Choices | Range | None:
    section, _, name = key.partition(".")
    problem = None
    if section not in _SEARCHED or not name:
        nested = (
            f"; write {section}.{next(iter(written))}" if section in _SEARCHED and isinstance(written, dict) else ""
        )
        problem = f"a key is written section.key{nested}" if section in SECTIONS else explain_unknown("", section)
    elif name.partition(".")[0] not in section_keys(section):
        problem = explain_unknown(section, name.partition(".")[0])
    elif key in _OF_THE_SEARCH:
        problem = "the search decides about it; every trial has a folder of its own"
    if problem is None:
        try:
            return read_space(key, written)
        except ValueError as error:
            problem = str(error)
    findings.add(f"sweep.search.{key}", problem)
    return None


def _problems(
    tree: yaml.MappingNode,
    overrides: list[str],
    read: Callable[[yaml.MappingNode, Findings], object],
    source: str,
    known: set[str],
) -> list[str]:
    """What is wrong with the run that has these values and was not wrong before."""
    tried, found = copy.deepcopy(tree), Findings(source)
    tried.value = [(name, node) for name, node in tried.value if name.value != "sweep"]
    for override in overrides:
        apply_override(tried, override, found)
    read(tried, found)
    return [text for text in found.texts() if text not in known]


def _range(key: str, written: dict[str, Any]) -> Range:
    for name in written:
        if name not in _OF_A_RANGE:
            raise ValueError(f"unknown key '{name}' of a range{did_you_mean(name, _OF_A_RANGE)}; min, max, log, step")
    low, high, step, log = written.get("min"), written.get("max"), written.get("step"), written.get("log", False)
    for name, value in (("min", low), ("max", high), *((("step", step),) if step is not None else ())):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: expected a number, not {value!r}")
    assert low is not None
    assert high is not None
    if not isinstance(log, bool):
        raise ValueError(f"log: expected true or false, not {log!r}")
    if low >= high:
        raise ValueError(f"min ({low:g}) is not below max ({high:g})")
    if log and low <= 0:
        raise ValueError(f"log needs a min above 0, not {low:g}")
    if step is not None and (log or step <= 0):
        raise ValueError("step goes with log: false and is above 0")
    section, _, name = key.partition(".")
    found = section_keys(section).get(name)
    kinds = set(members(found.hint)) if found is not None else {int if isinstance(low, int) else float}
    if not kinds & {int, float, Any}:
        raise ValueError("takes no number; write a list of values")
    whole = float not in kinds
    if whole and any(value is not None and value != int(value) for value in (low, high, step)):
        raise ValueError("takes whole numbers")
    ends = (int(low), int(high)) if whole else (float(low), float(high))
    return Range(ends[0], ends[1], log, step, whole)
