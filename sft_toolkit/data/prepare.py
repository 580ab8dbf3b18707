"""The whole preparation: sources -> tokens (cached) -> held-out split -> mixture -> one data set and one report.

It runs before any process group exists. Every process calls it; a file lock lets one build while the others wait.
"""

from __future__ import annotations

import hashlib
import logging
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from sft_toolkit.args import DataArguments, PreparationArguments, SourceArguments
from sft_toolkit.data.cache import cache_key, template_text
from sft_toolkit.data.carried import Carried
from sft_toolkit.data.formats import RENAMING, converter
from sft_toolkit.data.layouts.values import describe as describe_value
from sft_toolkit.data.mixture import Mixture, concatenated, interleaved
from sft_toolkit.data.orders import Ordering, ordering_of
from sft_toolkit.data.plan import PLAN, PackingPlan, plan_packing, to_json
from sft_toolkit.data.readers.columnar import drop_nulls
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer
from sft_toolkit.data.report import Tally, describe, nothing_left, too_many_refused, total
from sft_toolkit.data.source_tokens import SourceReader, SourceTokens, formats_by_file
from sft_toolkit.data.sources import is_local
from sft_toolkit.data.split import Indices, Keys, held_out, linked
from sft_toolkit.data.streaming import streaming_problems
from sft_toolkit.data.summary import WEIGHTS, Mask, all_content, joined, report_of, short_names
from sft_toolkit.data.tokenise import SourceTokenizer
from sft_toolkit.data.transforms import transform_of
from sft_toolkit.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

VALIDATION = "eval"
"""Name of the held-out set that `val_split` makes."""


@dataclass
class Prepared:
    """Everything that training needs of the data.

    Attributes:
        train: columns `input_ids`, `labels` (list of int32), `row` (1-based in its source), `source`, and the number
            columns that the sampler reads; None without `data.train`. Memory-mapped.
        evals: held-out sets by name, without those number columns.
        report: what `data_report.json` holds.
        fingerprint: changes with anything that changes a row of `train` or `evals`, or their order.
        end_of_turn: text and id of the token that closes an assistant turn, where the template has one.
        plan: which rows of `train` share a bin, with `packing: true`.
        eval_parts: names and rows of the sources of each held-out set that has several, in order.
    """

    train: Dataset | None
    evals: dict[str, Dataset]
    report: dict[str, Any]
    fingerprint: str
    end_of_turn: tuple[str, int] | None
    plan: PackingPlan | None = None
    eval_parts: dict[str, list[tuple[str, int]]] = field(default_factory=dict)

    def write_plan(self, folder: Path) -> None:
        """`packing_plan.json` (see `plan.to_json`); without packing, that of an earlier run is taken away."""
        path = folder / PLAN
        if self.plan is None or self.train is None:
            path.unlink(missing_ok=True)
        else:
            path.write_text(to_json(self.plan, self.train), encoding="utf-8")


def prepare(data: DataArguments, tokenizer: PreTrainedTokenizerBase, seed: int = 42) -> Prepared:
    """Prepare all sources of a configuration.

    Args:
        data: sources and policies.
        tokenizer: with the chat template that is trained with.
        seed: of the mixture: which rows a weight draws, and which source comes next.

    Raises:
        ConfigError: options that contradict one another, or conversations without a chat template.
        DataError: a file or row that can't be used, too many refused rows, or no row that is left (with every reason
            counted).
        OSError: the cache can't be written.
    """
    ordering = check_options(data)
    reader = SourceReader(data, tokenizer)
    carried = Carried(data.group_by, tuple(ordering.columns()))
    sources = [] if data.streaming else [reader.read(source, carried) for source in data.train]
    eval_sources = {name: [reader.read(source) for source in group] for name, group in data.eval.items()}
    for name, group in {"data.train": sources, **{f"data.eval.{n}": g for n, g in eval_sources.items()}}.items():
        _say_and_check(name, group, data.max_refused)

    masks = _masks(sources, data)
    mixture = _mixture(sources, [np.flatnonzero(~mask) for mask in masks], data, seed)
    train = joined(sources, mixture.chosen, mixture.order) if sources else None
    if train is not None and len(train) == 0:
        raise DataError("data.train: no row is left to train on after val_split and the sources' weights")

    report = report_of(sources, mixture.chosen, masks, eval_sources)
    report |= {"streaming": True} if data.streaming else {}
    report["template_fingerprint"] = hashlib.sha256(template_text(tokenizer).encode()).hexdigest()
    report["fingerprint"] = _fingerprint(data, {"": sources, **eval_sources}, seed)
    prepared = Prepared(train, {}, report, report["fingerprint"], reader.renderer.end_of_turn)
    for name, group in eval_sources.items():
        _hold_out(prepared, name, group, [np.arange(len(source.rows)) for source in group])
    if data.val_split:
        _hold_out(prepared, VALIDATION, sources, [np.flatnonzero(mask) for mask in masks])
    if data.packing and train is not None:
        prepared.plan = plan_packing(train, data.max_length, ordering)
        report["packing"] = {"bins": len(prepared.plan.bins), "fill": round(prepared.plan.fill, 4)}
    return prepared


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
    try:
        formats = formats_by_file(_numbered(rows, name), {})
    except DataError as error:
        raise DataError(str(error).replace(RENAMING, "dataset.rename_columns({theirs: ours})")) from None
    if not formats:
        raise DataError(nothing_left(name, Tally()))
    reader = SourceTokenizer(
        args,
        Renderer(tokenizer, args.supervise, cuts=args.too_long not in ("drop", "error")),
        converter(formats[name]),
        Carried(numbers=tuple(ordering_of(args.sampler).columns())),
    )
    table = pa.Table.from_batches(reader.batches(_numbered(rows, name)), schema=reader.schema).drop_columns(["content"])
    if table.column(WEIGHTS).null_count == len(table):
        table = table.drop_columns([WEIGHTS])
    logger.info("%s", describe(name, reader.tally))
    if not reader.tally.rows_kept:
        raise DataError(nothing_left(name, reader.tally))
    if refused := too_many_refused(name, reader.tally, args.max_refused):
        raise DataError(refused)
    # Without a fingerprint, datasets would hash all the tokens to make one.
    tokens = Dataset(table, fingerprint=uuid.uuid4().hex)
    return tokens, {**reader.tally.as_dict(), "sources": {name: reader.tally.as_dict()}}


def check_options(data: DataArguments) -> Ordering:
    """What is wrong with the options, found before a file is read; the order that `sampler` names.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems = []
    problems += streaming_problems(data)
    if not data.train and not data.eval:
        problems.append("data.train: names no source")
    if data.val_split and data.eval:
        problems.append("data.val_split and data.eval: held-out rows come from one of the two; take one out")
    if any(source.weight != 1.0 for group in data.eval.values() for source in group):
        problems.append("data.eval: a weight has no meaning for held-out rows, each counts once; take it out")
    if data.val_split and data.val_split > 1 and data.val_split != int(data.val_split):
        problems.append(f"data.val_split: {data.val_split} is neither a share below 1 nor a whole number of rows")
    if data.group_by is not None and not data.val_split:
        problems.append("data.group_by: has a meaning for val_split only; take it out, or set val_split")
    problems += _hub_options_of_files(data)
    problems += _problems("data.sampler", lambda: ordering_of(data.sampler))
    problems += _problems("data.transform", lambda: transform_of(data.transform, 0, None))
    if not problems and data.packing:
        problems += _problems("data.sampler", lambda: ordering_of(data.sampler).check_packing())
    if problems:
        raise ConfigError(problems)
    return ordering_of(data.sampler)


def _hub_options_of_files(data: DataArguments) -> list[str]:
    """Options that only a hub data set has, given for files, where they would be passed over."""
    named = [("data.train", data.train), *((f"data.eval.{name}", group) for name, group in data.eval.items())]
    return [
        f"{key}: {source.path} is a file, and {', '.join(options)} a matter of hub data sets; take it out"
        for key, group in named
        for source in group
        if (options := _hub_options(source)) and is_local(source)
    ]


def _hub_options(source: SourceArguments) -> list[str]:
    chosen = {"split": source.split != "train", "subset": source.subset, "revision": source.revision}
    return [name for name, on in chosen.items() if on]


def _problems(key: str, build: Callable[[], object]) -> list[str]:
    try:
        build()
    except ConfigError as error:
        return [f"{key}: {problem}" for problem in error.problems]
    return []


def _say_and_check(name: str, group: Sequence[SourceTokens], max_refused: float | None) -> None:
    for source in group:
        logger.info("%s", describe(source.name, source.tally))
    tally = total(source.tally for source in group)
    if group and not tally.rows_kept:
        raise DataError(nothing_left(name, tally))
    refused = [too_many_refused(source.name, source.tally, max_refused) for source in group]
    if any(refused):
        raise DataError("\n".join(filter(None, refused)))


def _masks(sources: Sequence[SourceTokens], data: DataArguments) -> list[Mask]:
    """Per source, which rows are held out."""
    if not data.val_split:
        return [np.zeros(len(source.rows), dtype=np.bool_) for source in sources]
    sizes = [len(source.rows) for source in sources]
    if data.val_split >= 1 and data.val_split >= sum(sizes):
        rows = f"{int(data.val_split)} rows can't be held out of {sum(sizes)}"
        raise DataError(f"data.val_split: {rows}: none would be trained on")
    keys = [source.content for source in sources] if data.group_by is None else _grouped(sources, data.group_by, sizes)
    return list(held_out(keys, data.val_split))


def _grouped(sources: Sequence[SourceTokens], column: str, sizes: list[int]) -> list[Keys]:
    """Keys by which rows of one group, and rows that say the same, lie on one side."""
    groups = [source.groups for source in sources]
    with_group = sum(count for _, count in groups)
    if not with_group:
        raise DataError(f"data.group_by: no row of data.train has a value in a column {column!r}")
    if with_group < sum(sizes):
        logger.warning(
            "data.group_by: %s rows have no value in %r; each is a group of its own", sum(sizes) - with_group, column
        )
    keys = linked(np.concatenate([of_source for of_source, _ in groups]), all_content(sources))
    return np.split(keys, np.cumsum(sizes)[:-1])


def _mixture(sources: Sequence[SourceTokens], kept: list[Indices], data: DataArguments, seed: int) -> Mixture:
    weights = [source.weight for source in sources]
    if data.mixing == "interleave" and sources:
        return interleaved(kept, weights, data.stopping_strategy, seed)
    return concatenated(kept, weights, seed)


def _hold_out(prepared: Prepared, name: str, sources: Sequence[SourceTokens], chosen: list[Indices]) -> None:
    rows = joined(sources, chosen)
    wanted = ("input_ids", "labels", WEIGHTS, "row", "source")
    prepared.evals[name] = rows.select_columns([column for column in wanted if column in rows.column_names])
    parts = [(part, len(rows)) for part, rows in zip(short_names(sources), chosen, strict=True) if len(rows)]
    if len(parts) > 1:
        prepared.eval_parts[name] = parts


def _fingerprint(data: DataArguments, groups: Mapping[str, Sequence[SourceTokens]], seed: int) -> str:
    content = {name: [source.key for source in group] for name, group in groups.items()}
    split = {
        "weights": [source.weight for source in groups[""]],
        "val_split": data.val_split,
        "group_by": data.group_by,
    }
    return cache_key({"content": content, **split, "mixing": [data.mixing, data.stopping_strategy], "seed": seed})


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
            raise DataError(f"{name}, row {number}: is {describe_value(row)}, expected a mapping of column to value")
        # Arrow gives each object of a column the keys of all of them, filled with null.
        yield RawRow(name, number, drop_nulls(dict(row)) if isinstance(rows, Dataset) else dict(row))
