"""What a user hands to SFTTrainer -> what Trainer takes: model names and adapters; data sets: see `data_intake`."""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainerCallback, set_seed

from sft_toolkit.args import ModelArguments
from sft_toolkit.engines.distributed import start_engine
from sft_toolkit.errors import ConfigError
from sft_toolkit.model.freezing import lets_gradients_in, train_only
from sft_toolkit.model.modules import without_adapter
from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


def resolve_names(model: Any, tokenizer: Any) -> tuple[Any, Any]:
    """A path as text; the tokenizer passed in, or that of a model given by name: rows are read before any weight is."""
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if tokenizer is not None or not isinstance(model, str):
        return model, tokenizer
    from sft_toolkit.model.loading import load_tokenizer

    return model, load_tokenizer(ModelArguments(name_or_path=model))


def resolve_model(model: Any, args: Any, tokenizer: Any, peft_config: Any) -> tuple[Any, Any]:
    """Load a model given by name; make it and its tokenizer agree; wrap it into its adapter.

    Args:
        tokenizer: from `resolve_names`.

    Returns:
        The model and the tokenizer.

    Raises:
        ConfigError: the tokenizer has ids that a model passed in has no row for, or an engine that can't engage.
    """
    if isinstance(args, SFTArguments):
        start_engine(args, os.environ)  # ZeRO-3 takes the model apart while it is loaded
    if isinstance(model, str) and hasattr(args, "seed"):
        set_seed(args.seed)  # as Trainer does before model_init: weights that the folder lacks are random
    if isinstance(model, str):
        from sft_toolkit.model.loading import load_model

        source = ModelArguments(name_or_path=model)
        precision, packing = getattr(args, "mixed_precision", "no"), bool(getattr(args, "packing", False))
        model = load_model(source, trains_all_weights=peft_config is None, precision=precision, packing=packing)
        _agree(model, tokenizer)
    elif isinstance(args, SFTArguments) and isinstance(model, PreTrainedModel):
        _refuse_missing_rows(model, tokenizer)
        _agree(model, tokenizer)
    if model is not None:
        if peft_config is not None and hasattr(args, "seed"):
            set_seed(args.seed)  # whatever loading has drawn, which under ZeRO-3 is something else
        model = _adapted(model, args, peft_config)
    if isinstance(args, SFTArguments):
        _checkpoint_only_where_it_can(model, args)
    return model, tokenizer


def _agree(model: Any, tokenizer: Any) -> None:
    """Pad and end ids, and the end of an assistant turn as a stop: without it, generation would run on."""
    if not isinstance(tokenizer, PreTrainedTokenizerBase):
        return
    from sft_toolkit.data.render import Renderer
    from sft_toolkit.model.loading import align

    end_of_turn = Renderer(tokenizer, "assistant").end_of_turn
    for note in align(model, tokenizer, end_of_turn[1] if end_of_turn else None):
        logger.info("%s", note)


def _refuse_missing_rows(model: PreTrainedModel, tokenizer: Any) -> None:
    from sft_toolkit.model.loading import table_rows

    if isinstance(tokenizer, PreTrainedTokenizerBase) and len(tokenizer) > table_rows(model):
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} ids and the model's embedding {table_rows(model)} rows: call "
            "model.resize_token_embeddings(len(tokenizer)) first"
        )


def _checkpoint_only_where_it_can(model: Any, args: SFTArguments) -> None:
    # On by default here, while Trainer raises for a module that has no such method.
    base = without_adapter(model)
    prefix = (
        getattr(getattr(model, "active_peft_config", None), "peft_type", None) == "PREFIX_TUNING"
    )  # lives in the cache
    if args.activation_checkpointing and (prefix or not getattr(base, "supports_gradient_checkpointing", False)):
        kind = "prefix tuning" if prefix else type(base).__name__
        logger.warning("activation checkpointing is off: %s does not support it", kind)
        args.activation_checkpointing = args.gradient_checkpointing = False


def with_adapter(model_init: Callable[..., Any] | None, peft_config: Any, args: Any) -> Callable[..., Any] | None:
    """A `model_init` whose fresh model carries the adapter or is frozen as asked; takes the trial as Trainer's does."""
    trainable = getattr(args, "trainable", None)
    if model_init is None or (peft_config is None and not trainable):
        return model_init
    takes_trial = bool(inspect.signature(model_init).parameters)

    def fresh(trial: Any = None) -> nn.Module:
        made: nn.Module = model_init(trial) if takes_trial else model_init()
        return cast(nn.Module, _adapted(made, args, peft_config))

    return fresh


def _adapted(model: Any, args: Any, peft_config: Any) -> Any:
    if isinstance(peft_config, dict | str):
        raise ConfigError(f"peft_config is {peft_config!r}; expected a configuration: peft.LoraConfig(r=..., ...)")
    if peft_config is not None:
        from sft_toolkit.lora.inject import inject

        model = inject(model, peft_config)
    if getattr(args, "trainable", None):
        train_only(model, args.trainable)
        lets_gradients_in(model, args)
    return model


def with_first(first: TrainerCallback | None, callbacks: Any) -> list[Any] | None:
    """The user's callbacks behind one of ours.

    Raises:
        ConfigError: one of them is something else; Trainer would call it much later.
    """
    for number, callback in enumerate(callbacks or []):
        kind = callback if isinstance(callback, type) else type(callback)
        if not hasattr(kind, "on_init_end"):
            raise ConfigError(
                f"callbacks[{number}] is {callback!r}; expected a TrainerCallback, its class or an instance of it"
                + (" (names are for the YAML)" if isinstance(callback, str | dict) else "")
            )
    return callbacks if first is None else [first, *(callbacks or [])]


def adapter_callbacks(model: Any) -> list[TrainerCallback]:
    """What an adapter needs at every update; nothing for most."""
    if not hasattr(model, "peft_config"):
        return []
    from sft_toolkit.lora.adalora import schedule_of

    return schedule_of(model)


def complete_adapter(model: Any, output_dir: str | None, portable: bool) -> None:
    """What `lora.portable.finish` adds to an adapter just saved by Trainer; nothing where `model` carries none."""
    if output_dir is not None and hasattr(model, "peft_config"):
        from sft_toolkit.lora.portable import finish

        finish(model, Path(output_dir), portable)


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
        problems.append(
            "parallelism_config: context and sequence parallelism split a row's labels, which this loss can't follow"
        )
    if problems:
        raise ConfigError(problems)
