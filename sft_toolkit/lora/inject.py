"""Put an adapter on a model: a new one, or a saved one to continue."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from peft import (
    LoraConfig,
    PeftConfig,
    PeftModel,
    PromptLearningConfig,
    get_peft_model,
    get_peft_model_state_dict,
    load_peft_weights,
    set_peft_model_state_dict,
)
from torch import nn

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora import origin
from sft_toolkit.lora.checks import check_config, warn_of_large_ranks
from sft_toolkit.lora.config import check_continues, to_peft
from sft_toolkit.lora.embedding import (
    OUT_OF_REACH,
    grow_table,
    is_tied,
    names_a_table,
    rows_are_out_of_reach,
    tables,
)
from sft_toolkit.lora.origin import check_base
from sft_toolkit.lora.portable import on_plain_base, start_of, takes_from_base
from sft_toolkit.lora.saved import adapter_folder, read_config, tensor_shapes
from sft_toolkit.lora.targets import check_names, left_out, resolve_targets, summary
from sft_toolkit.model.source import first_mismatch

logger = logging.getLogger(__name__)


def inject(model: Any, lora: LoraArguments | PeftConfig, new_token_ids: Sequence[int] = ()) -> PeftModel:
    """Wrap `model` into exactly one trainable adapter; the base is frozen.

    Everything that is trained is in fp32, also on a bf16 or fp16 base: an fp16 gradient can't be unscaled, and small
    updates are rounded away in bf16.

    Args:
        model: the base model; changed in place, as peft does.
        lora: section `lora` (`adapter: DIR` continues a saved adapter), or any configuration of peft, which is
            taken as it is.
        new_token_ids: rows of the embedding that hold nothing learned yet; a new LoRA adapter learns and saves them,
            unless its embedding is trained anyway.

    Raises:
        ConfigError: the model has an adapter already; names that match nothing; a saved adapter that contradicts the
            section or does not fit the model.
    """
    if isinstance(model, PeftModel) or getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "the model carries an adapter already: pass it alone, or its base with the adapter's configuration"
        )
    base, spared = origin.of_model(model), left_out(model)
    if isinstance(lora, LoraArguments) and lora.adapter:
        base.started_from = began = _began(adapter_folder(lora.adapter))
        wrapped = _continue(model, lora, adapter_folder(lora.adapter), began)
    else:
        config = to_peft(lora, model) if isinstance(lora, LoraArguments) else deepcopy(lora)
        if base.revision and not config.revision:
            config.revision = base.revision
        wrapped = _start(model, _with_new_tokens(model, config, new_token_ids))
        if takes_from_base(config):
            base.start = start_of(wrapped)
        warn_of_large_ranks(wrapped)
    origin.remember(wrapped, base)
    _train_in_fp32(wrapped)
    logger.info("adapter on these modules (name, how many, out x in):\n%s", summary(wrapped))
    if isinstance(lora, LoraArguments) and lora.targets == "auto" and not lora.adapter and spared:
        logger.info("lora.targets: auto leaves these alone:\n%s", "\n".join(spared))
    trainable, total = trainable_share(wrapped)
    logger.info("trainable: %s of %s parameters (%.2f %%)", f"{trainable:,}", f"{total:,}", 100 * trainable / total)
    return wrapped


def trainable_share(model: nn.Module) -> tuple[int, int]:
    """How many parameters are trained, and how many there are; shared ones count once, ZeRO-3 shards in full."""
    sizes = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)


def _start(model: Any, config: PeftConfig) -> PeftModel:
    targets = getattr(config, "target_modules", None)
    if isinstance(targets, (list, set, tuple)) and targets:
        resolve_targets(model, sorted(targets), key="target_modules")
    check_names(model, getattr(config, "modules_to_save", None) or (), "modules_to_save")
    check_config(model, config)
    try:
        return get_peft_model(model, config)
    except (
        ValueError, TypeError, LookupError, AttributeError, ImportError, AssertionError, NotImplementedError
    ) as error:  # fmt: skip
        # peft meets most of its fields here for the first time, and some without a word of explanation.
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"lora: peft can't build this adapter: {said}") from error


def _with_new_tokens(model: Any, config: PeftConfig, ids: Sequence[int]) -> PeftConfig:
    if ids and not isinstance(config, LoraConfig):
        logger.warning(
            "%s does not train the rows of %d new tokens, which stay random", type(config).__name__, len(ids)
        )
    if not ids or not isinstance(config, LoraConfig) or config.trainable_token_indices:
        return config
    names = list(tables(model))[: 1 if is_tied(model) else None]  # a tied head follows the embedding by itself
    if any(name == kept or name.endswith(f".{kept}") for name in names for kept in config.modules_to_save or ()):
        return config
    if rows_are_out_of_reach():
        config.modules_to_save = [*(config.modules_to_save or ()), *names]
        config.ensure_weight_tying = is_tied(model)
        logger.warning("the whole of %s is trained for %d new tokens: %s", " and ".join(names), len(ids), OUT_OF_REACH)
        return config
    config.trainable_token_indices = {name: list(ids) for name in names}
    logger.info("the rows of %d new tokens are trained and saved with the adapter", len(ids))
    return config


def _began(folder: Path) -> dict[str, Any]:
    saved = origin.read(folder)
    return {} if saved is None else saved.started_from


def _continue(model: Any, args: LoraArguments, folder: Path, began: dict[str, Any]) -> PeftModel:
    force = None if args.allow_other_base else "lora.allow_other_base: true"
    check_base(folder, model, "lora.adapter", force)
    if isinstance(config := read_config(folder), LoraConfig):
        check_continues(args, config, model, began)
    with on_plain_base(folder) as plain:
        return _load(model, args, folder, plain)


def _load(model: Any, args: LoraArguments, folder: Path, plain: Path) -> PeftModel:
    config = read_config(plain)
    if isinstance(config, LoraConfig) and args.dropout:
        config.lora_dropout = args.dropout
    shapes = tensor_shapes(plain)
    grow_table(model, config, shapes)
    in_table = names_a_table(model)
    try:
        if isinstance(config, PromptLearningConfig):  # peft loads these for inference only
            config.inference_mode = False
            wrapped = get_peft_model(model, config)
            set_peft_model_state_dict(wrapped, load_peft_weights(str(plain), device="cpu"))
        else:
            wrapped = PeftModel.from_pretrained(model, str(plain), is_trainable=True, config=config)
    except (RuntimeError, ValueError) as error:
        reason = first_mismatch(error) or str(error)
        raise ConfigError(f"lora.adapter: '{folder}' does not fit {type(model).__name__}: {reason}") from error
    # A table that was only resized is saved with the adapter although it is no part of it.
    live = {name for name in get_peft_model_state_dict(wrapped, save_embedding_layers=False) if not in_table(name)}
    one_sided = sorted(live ^ {name for name in shapes if not in_table(name)})
    if one_sided:
        raise ConfigError(
            f"lora.adapter: '{folder}' does not fit {type(model).__name__}: {len(one_sided)} tensors are on one side "
            f"only, such as {one_sided[0]}; its base is '{config.base_model_name_or_path}'"
        )
    logger.info("continuing the adapter in %s", folder)
    return wrapped


def _train_in_fp32(model: nn.Module) -> None:
    for parameter in model.parameters():
        # ZeRO-3 keeps its shards in a dtype of its own and has an fp32 copy of what it trains.
        if (
            parameter.requires_grad
            and parameter.dtype in (torch.float16, torch.bfloat16)
            and not hasattr(parameter, "ds_id")
        ):
            parameter.data = parameter.data.float()
