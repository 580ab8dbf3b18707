"""How well a model answers held-out rows."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from sft_toolkit.args import EvaluationArguments
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.evaluation.generate import generate_answers, prompt_and_reference
from sft_toolkit.evaluation.metrics import compute

logger = logging.getLogger(__name__)


@dataclass
class ScoredAnswers:
    """Texts by row, and the scores over all rows.

    `prompts` are for people: decoded without special tokens. In `answers` and `references` only the token that ends
    them is left out, so that a special token in an answer is seen and counts as wrong.
    """

    prompts: list[str]
    answers: list[str]
    references: list[str]
    scores: dict[str, float]


def score(
    model: nn.Module,
    tokenizer: Any,
    dataset: Iterable[Mapping[str, Any]],
    args: EvaluationArguments,
    parts: Sequence[tuple[str, int]] = (),
) -> ScoredAnswers:
    """Answer `args.generate` rows of `dataset` greedily and compare them with what the rows teach.

    An answer ends at the tokenizer's end of sequence, at what the model's own generation config names, or at the
    special token that ends the references themselves (`<|im_end|>`, `<|eot_id|>`, ...).

    Args:
        dataset: token rows with `input_ids` and `labels`, not packed. Rows without a prompt or without a label can't
            be asked and are passed over.
        parts: sources of the set, each with its number of rows, in order. The first rows of each are asked, and
            scored by themselves as `<source>_<metric>` too. Without, the first rows of the set are.

    Raises:
        DataError: no row can be asked.
        ConfigError: an unknown metric.
    """
    chosen, of_part = _spread(dataset, args.generate, parts)
    asked = _asked(chosen, len(chosen))
    stops = _stop_ids(model, tokenizer, [reference for _, reference in asked])
    ids = generate_answers(
        model,
        tokenizer,
        [prompt for prompt, _ in asked],
        max_new_tokens=args.max_new_tokens,
        batch_size=args.batch_size,
        stop_ids=stops,
    )
    answers = [tokenizer.decode(answer, clean_up_tokenization_spaces=False) for answer in ids]
    references = [_without_end(tokenizer, reference, stops) for _, reference in asked]
    prompts = [tokenizer.decode(p, skip_special_tokens=True, clean_up_tokenization_spaces=False) for p, _ in asked]
    scores = compute(args.metrics, answers, references)
    kept = [part for part, row in zip(of_part, chosen, strict=True) if all(prompt_and_reference(row))]
    for part in dict.fromkeys(kept) if len(parts) > 1 else ():
        at = [i for i, name in enumerate(kept) if name == part]
        alone = compute(args.metrics, [answers[i] for i in at], [references[i] for i in at])
        scores |= {f"{part}_{name}": value for name, value in alone.items()}
    return ScoredAnswers(prompts, answers, references, scores)


def _spread(
    dataset: Iterable[Mapping[str, Any]], number: int, parts: Sequence[tuple[str, int]]
) -> tuple[list[Mapping[str, Any]], list[str]]:
    """The rows that are asked, and the source of each: as many of every source, the first one a few more."""
    if len(parts) < 2:
        rows = list(islice(dataset, number))
        return rows, [""] * len(rows)
    held: Any = dataset  # sources are known of sets that are held in full
    rows, names, start = [], [], 0
    for place, (name, length) in enumerate(parts):
        wanted = min(length, number // len(parts) + (place < number % len(parts)))
        rows += [held[start + i] for i in range(wanted)]
        names += [name] * wanted
        start += length
    return rows, names


def check_references(tokenizer: Any, dataset: Iterable[Mapping[str, Any]], args: EvaluationArguments) -> None:
    """Score the right answers against themselves, so that a metric that can't use them says it before a model is there.

    Raises:
        DataError: no row can be asked.
        ConfigError: an unknown metric, or one that fails on these answers.
    """
    references = [reference for _, reference in _asked(dataset, args.generate)]
    stops = _stop_ids(None, tokenizer, references)
    texts = [_without_end(tokenizer, reference, stops) for reference in references]
    for name in args.metrics:
        _try_metric(name, texts)


def _try_metric(name: str, texts: list[str]) -> None:
    try:
        compute([name], texts, texts)
    except ConfigError:
        raise
    except Exception as error:  # a metric may be anybody's code
        raise ConfigError(f"evaluation.metrics: '{name}' can't score the held-out answers: {error}") from error


def _asked(dataset: Iterable[Mapping[str, Any]], number: int) -> list[tuple[list[int], list[int]]]:
    """Prompt and reference of the first rows, where both are there."""
    rows = [prompt_and_reference(row) for row in islice(dataset, number)]
    asked = [(prompt, reference) for prompt, reference in rows if prompt and reference]
    if not asked:
        raise DataError("evaluation.generate: no held-out row has both a prompt and a supervised answer")
    if len(asked) < len(rows):
        passed_over = len(rows) - len(asked)
        logger.warning("%d of %d held-out rows have no prompt or no label: not asked", passed_over, len(rows))
    return asked


def _stop_ids(model: nn.Module | None, tokenizer: Any, references: list[list[int]]) -> set[int]:
    special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    ends = {reference[-1] for reference in references} & special
    configured = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    if configured is not None:
        ends |= {configured} if isinstance(configured, int) else set(configured)
    return ends | ({tokenizer.eos_token_id} - {None})


def _without_end(tokenizer: Any, reference: list[int], stops: set[int]) -> str:
    ids = reference[:-1] if reference[-1] in stops else reference
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
