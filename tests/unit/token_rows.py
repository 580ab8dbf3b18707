"""Token data sets of given lengths, for tests of orders and plans."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset


def token_rows(*lengths: int, sources: Sequence[str] | None = None, **columns: Sequence[Any]) -> Dataset:
    """Row i has `lengths[i]` tokens, all of them i + 1, and the number i + 1."""
    ids = [[i + 1] * length for i, length in enumerate(lengths)]
    numbers = list(range(1, len(lengths) + 1))
    names = list(sources) if sources is not None else ["a.jsonl"] * len(lengths)
    return Dataset.from_dict({"input_ids": ids, "labels": ids, "row": numbers, "source": names, **columns})
