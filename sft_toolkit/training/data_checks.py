"""What a model can't read or learn from is refused before the training: ids, columns, labels."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from datasets import Dataset

from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.model.modules import without_adapter
from sft_toolkit.training.data_intake import EVAL, TRAIN, columns_of, is_ours
from sft_toolkit.training_args import SFTArguments


def check_data(
    train_dataset: Any, eval_dataset: Any, model: Any, args: Any, compute_loss_func: Any, *, collates: bool
) -> None:
    """The data sets that a trainer is built with: that the model can read them.

    Args:
        args: with a plain `TrainingArguments`, ids are all that is looked at.
        collates: the rows go through a collator of ours or of Trainer.

    Raises:
        ConfigError: the weights of messages can't reach the loss.
        DataError: names the row or the columns.
    """
    labels = isinstance(args, SFTArguments) and compute_loss_func is None
    collates = collates and not getattr(args, "label_names", None)
    if not labels and getattr(train_dataset, "weighted", False):
        raise ConfigError("compute_loss_func: the weights of messages can't reach it; take the weights or it out")
    for dataset, name in ((train_dataset, TRAIN), (eval_dataset, EVAL)):
        if labels and collates:
            _check_columns(dataset, model, name)
        check_ids(dataset, model, name, labels)


def _check_columns(dataset: Any, model: Any, name: str) -> None:
    """Rows that no collator and no forward can make anything of, in words that name the columns."""
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            _check_columns(part, model, f"{name}[{key!r}]")
        return
    if not isinstance(dataset, list | tuple | Dataset) or not len(dataset) or not _predicts_tokens(model):
        return
    columns = columns_of(dataset)
    if not isinstance(dataset[0], Mapping):
        raise DataError(f"{name}, row 1: {dataset[0]!r} is no row; expected a mapping such as {{'messages': [...]}}")
    if not columns & {"input_ids", "inputs_embeds", *signature(type(without_adapter(model)).forward).parameters}:
        raise DataError(
            f"{name}: the rows have the columns {', '.join(sorted(columns))}; expected text (messages, conversations, "
            "instruction and output, prompt and completion, text) or tokens (input_ids and labels)"
        )
    if "input_ids" in columns and "labels" not in columns:
        raise DataError(
            f"{name}: the rows have input_ids and no labels; add them (-100 where nothing is learned; a copy of "
            "input_ids learns everything) or pass a data_collator that does"
        )


def check_ids(dataset: Any, model: Any, name: str, labels: bool) -> None:
    """Compare the ids of token rows with the model's embedding; a data set of the user's own class is not read.

    Args:
        labels: compare labels too, where the model predicts tokens from left to right.

    Raises:
        DataError: names the row.
    """
    if isinstance(dataset, Mapping):
        for key, part in dataset.items():
            check_ids(part, model, f"{name}[{key!r}]", labels)
        return
    if is_ours(dataset):
        dataset = getattr(dataset, "tokens", None)  # a stream has read nothing yet
    vocabulary = _embedding_rows(model)
    is_readable = isinstance(dataset, list | tuple) or (
        isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    )
    if vocabulary is None or not is_readable or "input_ids" not in columns_of(dataset):
        return
    from sft_toolkit.data.token_rows import check_token_rows

    check_token_rows(dataset, vocabulary, name, labels and _predicts_tokens(model))


def _embedding_rows(model: Any) -> int | None:
    """Rows of the input embedding, also where ZeRO-3 has taken it apart; None for models without a plain one."""
    base: Any = without_adapter(model)
    try:
        weight = base.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        return None
    shape = getattr(weight, "ds_shape", weight.shape)
    return int(shape[0]) if len(shape) == 2 else None


def _predicts_tokens(model: Any) -> bool:
    base: Any = without_adapter(model)
    config = getattr(base, "config", None)
    is_seq2seq = getattr(config, "is_encoder_decoder", False)
    head = getattr(base, "get_output_embeddings", None)
    return not is_seq2seq and head is not None and head() is not None
