"""What a user hands to SFTTrainer -> what Trainer takes: model names, text rows, adapters."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from datasets import Dataset
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, set_seed

from sft_toolkit.args import ModelArguments
from sft_toolkit.data.collate import PackedCollator, PaddedCollator
from sft_toolkit.data.loading import for_evaluation, for_training, seed_of
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset, row_lengths
from sft_toolkit.errors import ConfigError
from sft_toolkit.modules import without_adapter
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)

TRAIN = "train_dataset"
TOKEN_COLUMNS = frozenset({"input_ids", "labels", "attention_mask"})
TEXT_COLUMNS = frozenset({"messages", "conversations", "instruction", "prompt", "text"})
"""A row with one of these and without `input_ids` is text: it is rendered and tokenised."""


def resolve_model(model: Any, args: Any, tokenizer: Any, peft_config: Any) -> tuple[Any, Any]:
    """Load a model given by name, with its tokenizer; make the two agree; wrap the model into its adapter.

    Returns:
        The model and the tokenizer (the one passed in, where there is one).

    Raises:
        ConfigError: the tokenizer has ids that a model passed in has no row for.
    """
    if (isinstance(model, str) or peft_config is not None) and hasattr(args, "seed"):
        set_seed(args.seed)  # as Trainer does before model_init: an adapter starts from random values
    if isinstance(model, str):
        from sft_toolkit.model import load_model, load_tokenizer

        source = ModelArguments(name_or_path=model)
        tokenizer = tokenizer if tokenizer is not None else load_tokenizer(source)
        precision, packing = getattr(args, "mixed_precision", "no"), bool(getattr(args, "packing", False))
        model = load_model(source, trains_all_weights=peft_config is None, precision=precision, packing=packing)
        _agree(model, tokenizer)
    elif isinstance(args, SFTArguments) and isinstance(model, PreTrainedModel):
        _refuse_missing_rows(model, tokenizer)
        _agree(model, tokenizer)
    if peft_config is not None and model is not None:
        from sft_toolkit.lora.inject import inject

        model = inject(model, peft_config)
    if isinstance(args, SFTArguments):
        _checkpoint_only_where_it_can(model, args)
    return model, tokenizer


def _agree(model: Any, tokenizer: Any) -> None:
    """Pad and end ids, and the end of an assistant turn as a stop: without it, generation would run on."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    from sft_toolkit.data.render import Renderer
    from sft_toolkit.model import align

    end_of_turn = Renderer(tokenizer, "assistant").end_of_turn
    for note in align(model, tokenizer, end_of_turn[1] if end_of_turn else None):
        logger.info("%s", note)


def _refuse_missing_rows(model: PreTrainedModel, tokenizer: Any) -> None:
    from sft_toolkit.model import table_rows

    if isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) > table_rows(model):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} ids and the model's embedding {table_rows(model)} rows: call "
            "model.resize_token_embeddings(len(tokenizer)) first"
        )


def _checkpoint_only_where_it_can(model: Any, args: SFTArguments) -> None:
    # On by default here, while Trainer raises for a module that has no such method.
    if args.activation_checkpointing and not getattr(without_adapter(model), "supports_gradient_checkpointing", False):
        logger.warning("activation checkpointing is off: %s does not support it", type(without_adapter(model)).__name__)
        args.activation_checkpointing = args.gradient_checkpointing = False


def with_adapter(model_init: Callable[..., Any] | None, peft_config: Any) -> Callable[..., Any] | None:
    """A `model_init` whose fresh model carries the adapter; takes the trial as Trainer's own does."""
    if model_init is None or peft_config is None:
        return model_init
    from sft_toolkit.lora.inject import inject

    takes_trial = bool(model_init.__code__.co_argcount) if hasattr(model_init, "__code__") else False

    def fresh(trial: Any = None) -> nn.Module:
        wrapped: nn.Module = inject(model_init(trial) if takes_trial else model_init(), peft_config)
        return wrapped

    return fresh


def resolve_dataset(dataset: Any, args: SFTArguments, tokenizer: Any, name: str) -> Any:
    """Text rows -> tokens; everything else is returned as it is.

    Args:
        dataset: HF data set, list of mappings or map-style data set; a mapping {name: data set} is resolved per entry.

    Raises:
        ConfigError: text rows without a tokenizer, or a stream of text rows.
        DataError: a row that can't be rendered or masked with proof, with its number.
    """
    if isinstance(dataset, Mapping):
        return {key: resolve_dataset(part, args, tokenizer, f"{name}[{key!r}]") for key, part in dataset.items()}
    columns = _columns(dataset)
    if "input_ids" in columns:
        arranged = args.packing or (name == TRAIN and (args.sampler is not None or args.transform is not None))
        return _as_batches(_checked_tokens(dataset, args), args, name) if arranged and "labels" in columns else dataset
    if not columns & TEXT_COLUMNS:
        return dataset
    if not hasattr(dataset, "__len__"):
        raise ConfigError(f"{name}: a stream of text rows; only map-style data sets are tokenised by SFTTrainer so far")
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        raise ConfigError(f"{name} holds text rows ({', '.join(sorted(columns))}): pass processing_class=tokenizer")
    from sft_toolkit.data.prepare import tokenize_rows

    tokens, _ = tokenize_rows(dataset, args, tokenizer, name)
    return _as_batches(tokens, args, name)


def _as_batches(tokens: Dataset, args: SFTArguments, name: str) -> RowsDataset | PackedDataset:
    return for_training(tokens, args, seed_of(args)) if name == TRAIN else for_evaluation(tokens, args)


def collator_for(dataset: Any, tokenizer: Any) -> Any:
    """The collator of our own layouts, or of plain token rows with labels; None leaves the choice to Trainer."""
    if isinstance(dataset, PackedDataset):
        return PackedCollator()
    if isinstance(dataset, RowsDataset) or _is_token_rows(dataset):
        pad = getattr(tokenizer, "pad_token_id", None)
        # Without a tokenizer the pad id is never looked at: padding is masked and carries no label.
        return PaddedCollator(pad_token_id=0 if pad is None else pad)
    return None


def refuse_unsupported(args: Any) -> None:
    """Stop where an option of TrainingArguments would be ignored, or would break the loss, on tokens of ours.

    Raises:
        ConfigError: with every such option.
    """
    problems = []
    if args.n_gpu > 1:
        problems.append(
            f"{args.n_gpu} GPUs and one process would use DataParallel, which can't split packed rows: start with "
            "`accelerate launch`, or show one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    if args.train_sampling_strategy not in ("random", "sequential"):
        problems.append(
            f"train_sampling_strategy '{args.train_sampling_strategy}': rows are ordered by (seed, epoch) alone; use "
            "random or sequential; sampler: by_length and packing: true save padding"
        )
    parallel = args.parallelism_config
    if parallel is not None and (parallel.cp_enabled or parallel.sp_enabled):
        problems.append("context and sequence parallelism split a row's labels, which this loss can't follow yet")
    if problems:
        raise ConfigError(problems)


def _checked_tokens(dataset: Any, args: SFTArguments) -> Dataset:
    if not isinstance(dataset, Dataset):
        dataset = Dataset.from_list([dataset[i] for i in range(len(dataset))])
    if not args.packing:
        return dataset
    lengths = row_lengths(dataset)
    if int(lengths.max(initial=0)) > args.max_length:
        raise ConfigError(
            f"packing: the longest of the token rows has {int(lengths.max())} tokens, more than max_length "
            f"{args.max_length}; token rows are never cut: raise max_length or shorten them"
        )
    if "attention_mask" in dataset.column_names and any(0 in row for row in dataset["attention_mask"]):
        raise ConfigError("packing: the token rows are padded already (attention_mask holds zeros); leave padding out")
    return dataset


def _is_token_rows(dataset: Any) -> bool:
    """Rows of ids with a label for each: not the one class label of a classifier, nor anything beside text."""
    if not {"input_ids", "labels"} <= _columns(dataset) <= {*TOKEN_COLUMNS, "row", "source"}:
        return False
    first = dataset[0]
    return hasattr(first["labels"], "__len__") and len(first["labels"]) == len(first["input_ids"])


def _columns(dataset: Any) -> set[str]:
    if dataset is None or isinstance(dataset, RowsDataset | PackedDataset):
        return set()
    if getattr(dataset, "column_names", None):
        return set(dataset.column_names)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__") and len(dataset):
        first = dataset[0]
        return {str(key) for key in first} if isinstance(first, Mapping) else set()
    return set()
