"""Scores of an answer against its reference, as `evaluate.Metric` classes that need no network.

Each is the mean over rows of a score between 0 and 1. `compute` runs them by their registered names.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from typing import Any

import datasets
import evaluate

from sft_toolkit.registry import lookup


class RowMetric(evaluate.Metric):  # type: ignore[misc]  # evaluate has no types
    """Mean of `row_score` over all rows, under the metric's registered name."""

    key = ""

    def row_score(self, prediction: str, reference: str) -> float:
        """The score of one answer, from 0 to 1."""
        raise NotImplementedError

    def _info(self) -> evaluate.MetricInfo:
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=type(self).__doc__ or "",
            citation="",
            inputs_description="",
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        scores = [self.row_score(p, r) for p, r in zip(predictions, references, strict=True)]
        return {self.key: sum(scores) / len(scores)}


class ExactMatch(RowMetric):
    """1 where answer and reference are the same text, white space around them apart."""

    key = "exact_match"

    def row_score(self, prediction: str, reference: str) -> float:
        return float(prediction.strip() == reference.strip())


class TokenF1(RowMetric):
    """Overlap of words and punctuation marks: the harmonic mean of precision and recall, in any order.

    As in SQuAD (Rajpurkar et al., 2016), but case, articles and punctuation count.
    """

    key = "token_f1"

    def row_score(self, prediction: str, reference: str) -> float:
        answered, expected = Counter(_words(prediction)), Counter(_words(reference))
        return _f1((answered & expected).total(), answered.total(), expected.total())


class RougeL(RowMetric):
    """Longest common subsequence of words and punctuation marks, as F1 (Lin, 2004): overlap that keeps the order."""

    key = "rouge_l"

    def row_score(self, prediction: str, reference: str) -> float:
        answered, expected = _words(prediction), _words(reference)
        return _f1(_common_subsequence(answered, expected), len(answered), len(expected))


class Bleu(RowMetric):
    """Corpus BLEU-4 (Papineni et al., 2002) over words and punctuation marks, from 0 to 1.

    n-grams are counted over all rows before they are compared, so it is no mean over rows. Beyond words, 1 is added to
    both counts (Lin and Och, 2004): short answers would otherwise score 0 for want of a 4-gram.
    """

    key = "bleu"

    def _compute(self, predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
        pairs = [(_words(p), _words(r)) for p, r in zip(predictions, references, strict=True)]
        answered, expected = sum(len(p) for p, _ in pairs), sum(len(r) for _, r in pairs)
        matched = [sum((_grams(p, n) & _grams(r, n)).total() for p, r in pairs) for n in range(1, 5)]
        offered = [sum(_grams(p, n).total() for p, _ in pairs) for n in range(1, 5)]
        if not matched[0]:
            return {self.key: float(answered == expected == 0)}
        logs = [math.log((m + (n > 0)) / (o + (n > 0))) for n, (m, o) in enumerate(zip(matched, offered, strict=True))]
        shortness = min(0.0, 1 - expected / answered)
        return {self.key: math.exp(shortness + sum(logs) / len(logs))}


class JsonValidity(RowMetric):
    """1 where the answer as a whole is JSON."""

    key = "json_validity"

    def row_score(self, prediction: str, reference: str) -> float:
        return float(_json(prediction) is not _NOT_JSON)


class JsonFields(RowMetric):
    """Share of the reference's fields that the answer has with exactly the same value; 0 where it is no JSON.

    A field of an object inside the object counts by itself; a list counts as one value. Further fields of the answer
    cost nothing here: `exact_match` sees them.
    """

    key = "json_fields"

    def row_score(self, prediction: str, reference: str) -> float:
        expected = _json(reference)
        if not isinstance(expected, dict):
            raise ValueError(f"json_fields needs references that are JSON objects, but one is {reference[:80]!r}")
        answered = _json(prediction)
        if not isinstance(answered, dict):
            return 0.0
        fields, given = _leaves(expected), _leaves(answered)
        return sum(given.get(path) == value for path, value in fields.items()) / len(fields) if fields else 1.0


def compute(names: Sequence[str], predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Every named metric over all rows.

    Args:
        names: registered names or dotted paths: `evaluate.Metric` classes, or functions of `predictions` and
            `references` that return a number or a dict of numbers.

    Returns:
        Score by name, in the order asked for.

    Raises:
        ConfigError: an unknown name.
        ValueError: no rows, or a reference that a metric can't use.
    """
    if not predictions:
        raise ValueError("there are no answers to score")
    scores: dict[str, float] = {}
    # evaluate makes a folder for its tables in the user's cache; nothing of this run belongs there.
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            metric: Any = lookup("metric", name)
            if isinstance(metric, type) and issubclass(metric, evaluate.EvaluationModule):
                metric = metric(cache_dir=folder, keep_in_memory=True).compute
            elif isinstance(metric, evaluate.EvaluationModule):
                metric = metric.compute
            result = metric(predictions=list(predictions), references=list(references))
            scores.update(result if isinstance(result, dict) else {name: result})
    return {name: float(score) for name, score in scores.items()}


def _words(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def _grams(words: list[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def _f1(common: int, answered: int, expected: int) -> float:
    if answered == 0 and expected == 0:
        return 1.0
    return 2 * common / (answered + expected)


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    best = [0] * (len(b) + 1)
    for word in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            diagonal, best[j] = best[j], diagonal + 1 if word == other else max(best[j], best[j - 1])
    return best[-1]


_NOT_JSON = object()


def _json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return _NOT_JSON


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _leaves(value: dict[str, Any], path: tuple[str, ...] = ()) -> dict[tuple[str, ...], str]:
    """Canonical JSON text of every value that is no object, by its path; text, so that 1 and true stay apart."""
    leaves: dict[tuple[str, ...], str] = {}
    for key, item in value.items():
        if isinstance(item, dict) and item:
            leaves.update(_leaves(item, (*path, key)))
        else:
            leaves[(*path, key)] = json.dumps(item, sort_keys=True)
    return leaves
