"""The whole preparation: sources -> tokens (cached) -> held-out split -> mixture -> one data set and one report.

It runs before any process group exists. Every process calls it; a file lock lets one build while the others wait.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, concatenate_datasets
from transformers import PreTrainedTokenizerBase

from sft_toolkit.args import DataArguments, PreparationArguments
from sft_toolkit.data.cache import cache_key, template_text
from sft_toolkit.data.formats import to_example
from sft_toolkit.data.packing import best_fit_decreasing, fill
from sft_toolkit.data.readers.columnar import drop_nulls
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer
from sft_toolkit.data.report import EXAMPLES, Tally, describe, nothing_left, total
from sft_toolkit.data.source_tokens import SourceReader, SourceTokens, formats_by_file
from sft_toolkit.data.split import Indices, Keys, held_out, resampled
from sft_toolkit.data.token_dataset import row_lengths
from sft_toolkit.data.tokenise import SCHEMA, SourceTokenizer
from sft_toolkit.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

VALIDATION = "eval"
"""Name of the held-out set that `val_split` makes."""

DUPLICATE = "says the same as an earlier row"
LEAKED = "held-out rows that are also trained on"


@dataclass
class Prepared:
    """Everything that training needs of the data.

    Attributes:
        train: columns `input_ids`, `labels` (list of int32), `row` (1-based in its source), `source`; None without
            `data.train`. Memory-mapped.
        evals: held-out sets by name, likewise.
        report: what `data_report.json` holds.
        fingerprint: changes with anything that changes a row of `train` or `evals`, or their order.
        end_of_turn: text and id of the token that closes an assistant turn, where the template has one.
    """

    train: Dataset | None
    evals: dict[str, Dataset]
    report: dict[str, Any]
    fingerprint: str
    end_of_turn: tuple[str, int] | None


def prepare(data: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 42) -> Prepared:
    """Prepare all sources of a configuration.

    Args:
        data: sources and policies.
        tokenizer: with the chat template that is trained with.
        seed: of the sample that a source's weight draws.

    Raises:
        ConfigError: options that contradict one another, or conversations without a chat template.
        DataError: a file or row that can't be used, or no row that is left (with every reason counted).
        OSError: the cache can't be written.
    """
    _check(data)
    reader = SourceReader(data, tokenizer)
    sources = [reader.read(source) for source in data.train]
    eval_sources = {name: [reader.read(source) for source in group] for name, group in data.eval.items()}
    for name, group in {"data.train": sources, **{f"data.eval.{n}": g for n, g in eval_sources.items()}}.items():
        _say_and_check(name, group)

    masks = _masks(sources, data.val_split)
    evals = {name: _joined(group, [np.arange(len(s.rows)) for s in group]) for name, group in eval_sources.items()}
    if data.val_split:
        evals[VALIDATION] = _joined(sources, [np.flatnonzero(mask) for mask in masks])
    chosen = [
        resampled(np.flatnonzero(~mask), source.weight, seed + number)
        for number, (source, mask) in enumerate(zip(sources, masks, strict=True))
    ]
    train = _joined(sources, chosen) if sources else None
    if train is not None and len(train) == 0:
        raise DataError("data.train: no row is left to train on after val_split and the sources' weights")

    content = {name: [source.key for source in group] for name, group in {"": sources, **eval_sources}.items()}
    mixture = {"content": content, "weights": [s.weight for s in sources], "val_split": data.val_split, "seed": seed}
    report = _report(sources, chosen, masks, eval_sources)
    report["template_fingerprint"] = hashlib.sha256(template_text(tokenizer).encode()).hexdigest()
    report["fingerprint"] = cache_key(mixture)
    if data.packing and train is not None:
        report["packing"] = _packing(train, data.max_length)
    return Prepared(train, evals, report, report["fingerprint"], reader.renderer.end_of_turn)


def tokenize_rows(
    rows: Iterable[Mapping[str, Any]] | Dataset,
    args: PreparationArguments,
    tokenizer: PreTrainedTokenizerBase,
    name: str = "train_dataset",
) -> tuple[Dataset, dict[str, Any]]:
    """Text rows that are in memory already, as tokens; nothing is written to disk.

    Args:
        rows: a `datasets.Dataset`, a list or another finite iterable of mappings, or a map-style torch data set.
            Their format is detected from the columns of all rows.
        args: policies.
        tokenizer: with the chat template that is trained with.
        name: what messages and the column `source` call these rows.

    Returns:
        A data set with the columns of `Prepared.train` (`row` is the position, counted from 1), and the report.

    Raises:
        ConfigError, DataError: as `prepare`.
    """
    rows = _reiterable(rows)
    formats = formats_by_file(_numbered(rows, name), {})
    reader = SourceTokenizer(args, Renderer(tokenizer, args.supervise), lambda raw: to_example(raw, formats[name]))
    table = pa.Table.from_batches(reader.batches(_numbered(rows, name)), schema=SCHEMA).drop_columns(["content"])
    logger.info("%s", describe(name, reader.tally))
    if not reader.tally.rows_kept:
        raise DataError(nothing_left(name, reader.tally))
    # Without a fingerprint, datasets would hash all the tokens to make one.
    tokens = Dataset(table, fingerprint=uuid.uuid4().hex)
    return tokens, {**reader.tally.as_dict(), "sources": {name: reader.tally.as_dict()}}


def _check(data: DataArguments) -> None:
    problems = []
    if data.streaming:
        problems.append("data.streaming: true is not available yet; leave it out, the token cache is read from disk")
    if not data.train and not data.eval:
        problems.append("data.train: names no source")
    if data.val_split and data.eval:
        problems.append("data.val_split and data.eval: held-out rows come from one of the two; take one out")
    if any(source.weight != 1.0 for group in data.eval.values() for source in group):
        problems.append("data.eval: a weight has no meaning for held-out rows, each counts once; take it out")
    if data.val_split and data.val_split > 1 and data.val_split != int(data.val_split):
        problems.append(f"data.val_split: {data.val_split} is neither a share below 1 nor a whole number of rows")
    if problems:
        raise ConfigError(problems)


def _say_and_check(name: str, group: Sequence[SourceTokens]) -> None:
    for source in group:
        logger.info("%s", describe(source.name, source.tally))
    tally = total(source.tally for source in group)
    if group and not tally.rows_kept:
        raise DataError(nothing_left(name, tally))


def _masks(sources: Sequence[SourceTokens], val_split: float | None) -> list[Any]:
    """Per source, which rows are held out."""
    if not val_split:
        return [np.zeros(len(source.rows), dtype=np.bool_) for source in sources]
    rows = sum(len(source.rows) for source in sources)
    if val_split >= 1 and val_split >= rows:
        raise DataError(f"data.val_split: {int(val_split)} rows can't be held out of {rows}: none would be trained on")
    return list(held_out([source.content for source in sources], val_split))


def _joined(sources: Sequence[SourceTokens], chosen: Sequence[Indices]) -> Dataset:
    """The chosen rows of all sources, one source behind the other."""
    parts = []
    for source, indices in zip(sources, chosen, strict=True):
        rows = source.rows.remove_columns(["content"])
        whole = len(indices) == len(rows) and bool((indices == np.arange(len(rows))).all())
        parts.append(rows if whole else rows.select(indices))
    return parts[0] if len(parts) == 1 else concatenate_datasets(parts)


def _report(
    sources: Sequence[SourceTokens],
    chosen: Sequence[Indices],
    masks: Sequence[Any],
    evals: Mapping[str, Sequence[SourceTokens]],
) -> dict[str, Any]:
    tally = total(source.tally for source in sources)
    content = _all_content(sources)
    repeated = np.setdiff1d(np.arange(len(content)), np.unique(content, return_index=True)[1])
    _warn(tally, DUPLICATE, sources, repeated)
    groups = {}
    for name, group in evals.items():
        groups[name] = total(source.tally for source in group)
        _warn(groups[name], LEAKED, group, np.flatnonzero(np.isin(_all_content(group), content)))
    per_source: dict[str, Any] = {}
    for source, indices, mask in zip(sources, chosen, masks, strict=True):
        counts = {"weight": source.weight, "rows_held_out": int(mask.sum()), "rows_trained": len(indices)}
        per_source[_free_name(source.name, per_source)] = {**source.tally.as_dict(), **counts}
    return {
        **tally.as_dict(),
        "rows_held_out": sum(int(mask.sum()) for mask in masks),
        "rows_trained": sum(len(indices) for indices in chosen),
        "sources": per_source,
        "eval": {name: group.as_dict() for name, group in groups.items()},
    }


def _all_content(sources: Sequence[SourceTokens]) -> Keys:
    return np.concatenate([np.zeros(0, dtype=np.uint64), *(source.content for source in sources)])


def _warn(tally: Tally, kind: str, sources: Sequence[SourceTokens], positions: Indices) -> None:
    """Count rows by their positions over all sources, naming the first few."""
    if not len(positions):
        return
    joined = _joined(sources, [np.arange(len(source.rows)) for source in sources])
    named = [f"{row['source']}, row {row['row']}" for row in joined.select(positions[:EXAMPLES])]
    tally.warn(kind, named, len(positions))
    logger.warning("%s: %s rows, first %s", kind, f"{len(positions):,}", "; ".join(named))


def _free_name(name: str, taken: Mapping[str, Any]) -> str:
    """The name, numbered where two sources share a path (two splits of a hub data set)."""
    if name not in taken:
        return name
    return next(f"{name} ({n})" for n in range(2, len(taken) + 3) if f"{name} ({n})" not in taken)


def _packing(train: Dataset, capacity: int) -> dict[str, Any]:
    lengths = row_lengths(train)
    bins = best_fit_decreasing(lengths, capacity)
    return {"bins": len(bins), "fill": round(fill(lengths, bins, capacity), 4)}


def _reiterable(rows: Any) -> Any:
    """Rows that can be gone through twice, without what a data set's format would make of them."""
    if isinstance(rows, Dataset):
        return rows if rows.format["type"] == "custom" else rows.with_format(None)
    if hasattr(rows, "__getitem__") and hasattr(rows, "__len__"):  # map-style: it need not stop by itself
        return [rows[i] for i in range(len(rows))]
    return list(rows)


def _numbered(rows: Any, name: str) -> Iterator[RawRow]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, Mapping):
            raise DataError(f"{name}, row {number}: is a {type(row).__name__}, expected a mapping of column to value")
        # Arrow gives each object of a column the keys of all of them, filled with null.
        yield RawRow(name, number, drop_nulls(dict(row)) if isinstance(rows, Dataset) else dict(row))
