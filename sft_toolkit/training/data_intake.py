"""The data sets that a user hands to SFTTrainer -> what Trainer takes: text rows become tokens, tokens are checked."""

from __future__ import annotations

import datetime
import logging
from collections.abc import Iterator, Mapping
from os import PathLike
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from sft_toolkit.data.collate import PackedCollator, PaddedCollator
from sft_toolkit.data.conversation import IGNORED
from sft_toolkit.data.loading import for_evaluation, for_training, seed_of
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset, row_lengths
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)

TRAIN, EVAL = "train_dataset", "eval_dataset"
TOKEN_COLUMNS = frozenset({"input_ids", "labels", "attention_mask"})
EXPECTED = "expected a datasets.Dataset, a list of rows ({'messages': [...]}, ...), or a map-style torch data set"


def resolve_dataset(dataset: Any, args: Any, tokenizer: Any, name: str) -> Any:
    """Text rows -> tokens; everything else is returned as it is.

    Args:
        dataset: HF data set, list of mappings or map-style data set; held-out sets may be a mapping {name: data set},
            which is resolved per entry.
        args: a plain `TrainingArguments` renders nothing; text rows are refused then, since no collator takes them.

    Raises:
        ConfigError: what was handed over is no data set, text rows without a tokenizer, or a stream of text rows.
        DataError: no rows, or a row that can't be rendered or masked with proof, with its number.
    """
    if isinstance(dataset, Mapping):
        if name == TRAIN:
            raise ConfigError(f"{TRAIN} is {_called(dataset)} with the parts {', '.join(map(str, dataset))}: pass one")
        return {key: resolve_dataset(part, args, tokenizer, f"{name}[{key!r}]") for key, part in dataset.items()}
    if isinstance(dataset, str | PathLike):
        raise ConfigError(
            f"{name} is {_called(dataset)} ({str(dataset)!r}), {EXPECTED}. A file is read by `data.train` of a YAML "
            f"or by datasets.load_dataset('json', data_files={str(dataset)!r}, split='train')"
        )
    if dataset is None or is_ours(dataset):
        return dataset
    if isinstance(dataset, Iterator) and isinstance(args, SFTArguments):
        raise ConfigError(f"{name} is {_called(dataset)}, which ends after one pass, {EXPECTED}; list(...) makes one")
    first, columns = _first_row(dataset), columns_of(dataset)
    if not isinstance(args, SFTArguments):
        if "input_ids" not in columns and _is_text(first):
            raise ConfigError(
                f"{name} holds text rows ({', '.join(sorted(columns))}): render them with args=SFTArguments"
            )
        return dataset
    if first is None and hasattr(dataset, "__len__"):
        raise DataError(f"{name}: there are no rows")
    if isinstance(dataset, list | tuple):
        _refuse_mixed(dataset, "input_ids" in columns, name)
    if "input_ids" in columns:
        return _arranged(_with_labels(dataset, args, name), args, name) if "labels" in columns else dataset
    if not _is_text(first):
        return dataset
    return _tokenised(dataset, args, tokenizer, name, columns)


def _refuse_mixed(rows: list[Any] | tuple[Any, ...], are_tokens: bool, name: str) -> None:
    for number, row in enumerate(rows, 1):
        if (isinstance(row, Mapping) and "input_ids" in row) is not are_tokens:
            first, this = ("tokens", "none") if are_tokens else ("no tokens", "some")
            raise DataError(f"{name}, row {number}: the rows before hold {first} (input_ids), and this one {this}")


def _with_labels(dataset: Any, args: SFTArguments, name: str) -> Any:
    """Token rows that teach something; an update of rows without a label would be 0 / 0."""
    is_transformed = isinstance(dataset, Dataset) and dataset.format["type"] == "custom"
    if not isinstance(dataset, list | tuple | Dataset) or is_transformed or not _is_token_rows(dataset):
        return dataset
    from sft_toolkit.data.token_rows import unsupervised_rows

    silent = unsupervised_rows(dataset)
    if not silent:
        return dataset
    if len(silent) == len(dataset):
        raise DataError(f"{name}: there is nothing to learn, all labels of all {len(dataset)} rows are {IGNORED}")
    found = f"{len(silent)} of {len(dataset)} rows have no supervised token; the first is row {silent[0] + 1}"
    if args.on_bad_row == "error":
        raise DataError(f"{name}: {found}. on_bad_row='drop' leaves them out")
    logger.warning("%s: %s. They are left out", name, found)
    left_out = set(silent)
    kept = [index for index in range(len(dataset)) if index not in left_out]
    return dataset.select(kept) if isinstance(dataset, Dataset) else [dataset[index] for index in kept]


def _tokenised(dataset: Any, args: SFTArguments, tokenizer: Any, name: str, columns: set[str]) -> Any:
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"{name} holds text rows ({', '.join(sorted(columns))}): pass processing_class=tokenizer")
    if not hasattr(dataset, "__len__"):
        if name != TRAIN:
            raise ConfigError(f"{name}: a stream of text rows; held-out rows are a data set that has an end")
        from sft_toolkit.data.streaming import stream_iterable

        return stream_iterable(dataset, args, tokenizer, name)
    from sft_toolkit.data.prepare import tokenize_rows

    tokens, _ = tokenize_rows(dataset, args, tokenizer, name)
    return _as_batches(tokens, args, name)


def _as_batches(tokens: Dataset, args: SFTArguments, name: str) -> RowsDataset | PackedDataset:
    return for_training(tokens, args, seed_of(args)) if name == TRAIN else for_evaluation(tokens, args)


def _arranged(dataset: Any, args: SFTArguments, name: str) -> Any:
    """Token rows packed, weighted, or in the order that `sampler` names; else as they are."""
    ordered = name == TRAIN and (args.sampler is not None or args.transform is not None)
    if not (args.packing or ordered or "loss_weights" in columns_of(dataset)):
        return dataset
    if not isinstance(dataset, Dataset):
        dataset = Dataset.from_list([dataset[i] for i in range(len(dataset))])
    if args.packing:
        _check_packable(dataset, args, name)
    return _as_batches(dataset, args, name)


def _check_packable(dataset: Dataset, args: SFTArguments, name: str) -> None:
    lengths = row_lengths(dataset)
    longest = int(lengths.max(initial=0))
    if not lengths.all():
        raise DataError(f"{name}, row {int(lengths.argmin()) + 1}: input_ids is empty")
    if longest > args.max_length:
        raise ConfigError(
            f"packing: the longest of the token rows has {longest} tokens, more than max_length {args.max_length}; "
            "token rows are never cut: raise max_length or shorten them"
        )
    if "attention_mask" in dataset.column_names and any(0 in row for row in dataset["attention_mask"]):
        raise ConfigError("packing: the token rows are padded already (attention_mask holds zeros); leave padding out")


def is_ours(dataset: Any) -> bool:
    """Rows in one of our layouts, on which our loss, order and counters work; else Trainer's own hold."""
    return isinstance(dataset, RowsDataset | PackedDataset)


def collator_for(dataset: Any, tokenizer: Any) -> Any:
    """The collator of our own layouts, or of plain token rows with labels; None leaves the choice to Trainer."""
    if isinstance(dataset, PackedDataset):
        return PackedCollator(dataset.weighted)
    if isinstance(dataset, RowsDataset) or _is_token_rows(dataset):
        pad = getattr(tokenizer, "pad_token_id", None)
        # Without a tokenizer the pad id is never looked at: padding is masked and carries no label.
        weighted = isinstance(dataset, RowsDataset) and dataset.weighted
        return PaddedCollator(pad_token_id=0 if pad is None else pad, weighted=weighted)
    return None


def _is_token_rows(dataset: Any) -> bool:
    """Rows of ids with a label for each: not the one class label of a classifier, nor anything beside text."""
    if not {"input_ids", "labels"} <= columns_of(dataset) <= {*TOKEN_COLUMNS, "row", "source"}:
        return False
    first = dataset[0]
    return hasattr(first["labels"], "__len__") and len(first["labels"]) == len(first["input_ids"])


def columns_of(dataset: Any) -> set[str]:
    """The columns of a data set, as far as they can be known without reading more than its first row."""
    if dataset is None or is_ours(dataset):
        return set()
    if getattr(dataset, "column_names", None):
        return set(dataset.column_names)
    first = _first_row(dataset)
    return {str(key) for key in first} if isinstance(first, Mapping) else set()


def _first_row(dataset: Any) -> Any:
    """None where there is none, or where reading it could use it up."""
    if isinstance(dataset, IterableDataset):
        return next(iter(dataset), None)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        return dataset[0]
    return None


def _is_text(row: Any) -> bool:
    """A row for `data.formats`, or what was meant as one: nothing but texts, turns and single numbers."""
    if not isinstance(row, Mapping):
        return isinstance(row, str)
    values = [*row.values()]
    return any(map(_says_something, values)) and all(_says_something(v) or _is_aside(v) for v in values)


def _says_something(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], str | Mapping | list)
    return isinstance(value, str | Mapping)


def _is_aside(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | datetime.date) or value == []


def _called(value: Any) -> str:
    kind = type(value).__name__
    return "text" if isinstance(value, str) else f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind}"
