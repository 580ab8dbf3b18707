"""The data report of all sources together: counts, duplicates, held-out rows that are trained on too."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt
from datasets import Dataset, concatenate_datasets

from sft_toolkit.data.readers.raw import place
from sft_toolkit.data.report import EXAMPLES, Tally, total
from sft_toolkit.data.source_tokens import SourceTokens
from sft_toolkit.data.split import Indices, Keys

logger = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]

DUPLICATE = "says the same as an earlier row"
WEIGHTS = "loss_weights"
LEAKED = "held-out rows that are also trained on"


def report_of(
    sources: Sequence[SourceTokens],
    chosen: Sequence[Indices],
    masks: Sequence[Mask],
    evals: Mapping[str, Sequence[SourceTokens]],
) -> dict[str, Any]:
    """`data_report.json` without its fingerprints: the training data in all and by source, then the held-out sets.

    Args:
        sources: of the training data.
        chosen: the rows of each that are trained on, as often as they are.
        masks: the rows of each that are held out.
        evals: the sources of each held-out set.
    """
    tally = total(source.tally for source in sources)
    content = all_content(sources)
    repeated = np.setdiff1d(np.arange(len(content)), np.unique(content, return_index=True)[1])
    _warn(tally, DUPLICATE, sources, repeated)
    per_source: dict[str, Any] = {}
    for source, indices, mask in zip(sources, chosen, masks, strict=True):
        counts = {"weight": source.weight, "rows_held_out": int(mask.sum()), "rows_trained": len(indices)}
        per_source[_free_name(source.name, per_source)] = {**source.tally.as_dict(), **counts}
    return {
        **tally.as_dict(),
        "rows_held_out": sum(int(mask.sum()) for mask in masks),
        "rows_trained": sum(len(indices) for indices in chosen),
        "sources": per_source,
        "eval": {name: _held_out(group, content) for name, group in evals.items()},
    }


def _held_out(group: Sequence[SourceTokens], trained: Keys) -> dict[str, Any]:
    tally = total(source.tally for source in group)
    _warn(tally, LEAKED, group, np.flatnonzero(np.isin(all_content(group), trained)))
    per_source = zip(short_names(group), group, strict=True)
    return {**tally.as_dict(), "sources": {name: source.tally.as_dict() for name, source in per_source}}


def joined(sources: Sequence[SourceTokens], chosen: Sequence[Indices], order: Indices | None = None) -> Dataset:
    """The chosen rows of all sources, one source behind the other, or in an order of positions among these."""
    parts = []
    for source, indices in zip(sources, chosen, strict=True):
        whole = len(indices) == len(source.rows) and bool((indices == np.arange(len(indices))).all())
        parts.append(source.tokens if whole else source.tokens.select(indices))
    together = parts[0] if len(parts) == 1 else concatenate_datasets(parts)
    if together.data.column(WEIGHTS).null_count == len(together.data):
        together = together.remove_columns(WEIGHTS)
    return together if order is None else together.select(order)


def all_content(sources: Sequence[SourceTokens]) -> Keys:
    """Content keys of the rows of all sources, uint64 (rows,)."""
    return np.concatenate([np.zeros(0, dtype=np.uint64), *(source.content for source in sources)])


def short_names(sources: Sequence[SourceTokens]) -> list[str]:
    """Names of sources that can be part of a metric's name: the file without folder and suffix, numbered if taken."""
    names: dict[str, Any] = {}
    for source in sources:
        path = PurePath(source.name)
        stem = re.sub(r"\W+", "_", path.name.partition(".")[0]).strip("_")
        names[_free_name(stem or re.sub(r"\W+", "_", path.parent.name).strip("_") or "source", names, "{}_{}")] = None
    return list(names)


def _warn(tally: Tally, kind: str, sources: Sequence[SourceTokens], positions: Indices) -> None:
    """Count rows by their positions over all sources, naming the first few."""
    if not len(positions):
        return
    everything = joined(sources, [np.arange(len(source.rows)) for source in sources])
    named = [place(row["source"], row["row"]) for row in everything.select(positions[:EXAMPLES])]
    tally.warn(kind, named, len(positions))
    logger.warning("%s: %s rows, first %s", kind, f"{len(positions):,}", "; ".join(named))


def _free_name(name: str, taken: Mapping[str, Any], pattern: str = "{} ({})") -> str:
    """The name, numbered where two sources share it (two splits of a hub data set)."""
    if name not in taken:
        return name
    numbered = (pattern.format(name, n) for n in range(2, len(taken) + 3))
    return next(candidate for candidate in numbered if candidate not in taken)
