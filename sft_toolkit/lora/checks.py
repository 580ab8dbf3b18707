"""What peft takes without a word, or fails on later in words of its own: patterns in vain, ids without a row, ranks."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.lora.embedding import OUT_OF_REACH, rows_are_out_of_reach, table_rows, tables
from sft_toolkit.lora.portable import takes_from_base

logger = logging.getLogger(__name__)


def check_config(model: nn.Module, config: PeftConfig, key: str = "lora.") -> None:
    """Raise ConfigError for every setting of `config` that this model can't follow.

    Args:
        key: what stands before a field's name in the messages.
    """
    problems = [
        *_vain_patterns(model, config, key),
        *_vain_parameters(model, config, key),
        *_missing_rows(model, config, key),
        *_starts_that_fail(model, config, key),
    ]
    if problems:
        raise ConfigError(problems)


def refuse_loftq_without_its_packages() -> None:
    """Raise ConfigError where LoftQ can't quantise: peft fails on each reason by itself, in the words of others."""
    absent = [name for name in ("bitsandbytes", "scipy") if find_spec(name) is None]
    if absent:
        raise ConfigError(
            f"lora.variant: loftq quantises with packages that are missing: pip install {' '.join(absent)}"
        )
    if not torch.accelerator.is_available():
        raise ConfigError("lora.variant: loftq quantises on a GPU, and there is none here")


def warn_of_large_ranks(model: nn.Module) -> None:
    """A rank above a layer's smaller side costs more than the layer itself and can learn nothing more."""
    from sft_toolkit.lora.targets import adapted_modules

    for name, layer in adapted_modules(model).items():
        sides = (getattr(layer, "in_features", None), getattr(layer, "out_features", None))
        smaller = min((side for side in sides if isinstance(side, int)), default=0)
        ranks = [rank for rank in getattr(layer, "r", {}).values() if isinstance(rank, int)]
        if smaller and ranks and max(ranks) > smaller:
            logger.warning(
                "lora: rank %d is more than the smaller side of %s (%d): it can learn no more than rank %d does",
                max(ranks),
                name,
                smaller,
                smaller,
            )
            return


def _vain_patterns(model: nn.Module, config: PeftConfig, key: str) -> Iterable[str]:
    """`rank_pattern`, `alpha_pattern` and `exclude_modules` name modules; peft ignores an entry that matches none."""
    names = [name for name, _ in model.named_modules() if name]
    last_names = {name.rsplit(".", 1)[-1] for name in names}
    excluded = getattr(config, "exclude_modules", None) or []
    if isinstance(excluded, str):
        excluded = [] if any(re.fullmatch(excluded, name) for name in names) else [excluded]
    for option, patterns in (
        ("rank_pattern", getattr(config, "rank_pattern", None) or {}),
        ("alpha_pattern", getattr(config, "alpha_pattern", None) or {}),
        ("exclude_modules", excluded),
    ):
        for pattern in sorted(patterns):
            try:
                wanted = re.compile(pattern).pattern
                matched = any(re.match(rf"(.*\.)?({wanted})$", name) for name in names)
            except re.error as error:
                yield f"{key}{option}: '{pattern}' is no regular expression: {error}"
                continue
            if not matched:
                near = did_you_mean(pattern.rsplit(".", 1)[-1], last_names)
                yield f"{key}{option}: '{pattern}' matches no module{near}"


def _vain_parameters(model: nn.Module, config: PeftConfig, key: str) -> Iterable[str]:
    """`target_parameters` are weights that are no linear layer's, such as the experts of a mixture."""
    names = [name for name, _ in model.named_parameters()]
    for target in getattr(config, "target_parameters", None) or ():
        if not any(name == target or name.endswith(f".{target}") for name in names):
            stacked = sorted({".".join(n.split(".")[-2:]) for n, p in model.named_parameters() if _dims(p) == 3})
            known = f" (this model has {', '.join(stacked)})" if stacked else " (this model has no stacked experts)"
            yield f"{key}target_parameters: '{target}' matches no parameter{did_you_mean(target, stacked)}{known}"


def _missing_rows(model: nn.Module, config: PeftConfig, key: str) -> Iterable[str]:
    asked = getattr(config, "trainable_token_indices", None)
    asked = getattr(config, "token_indices", None) if asked is None else asked  # the name in TrainableTokensConfig
    if not asked or not isinstance(model, PreTrainedModel):
        return
    if rows_are_out_of_reach():
        yield f"{key}trainable_token_indices: {OUT_OF_REACH}; name the table in modules_to_save, or take zero2"
    rows, held = table_rows(model), tables(model)
    for layer, ids in asked.items() if isinstance(asked, Mapping) else [(next(iter(held)), asked)]:
        if not any(name == layer or name.endswith(f".{layer}") for name, _ in model.named_modules()):
            last_names = [name.rsplit(".", 1)[-1] for name in held]
            yield f"{key}trainable_token_indices: '{layer}' matches no module{did_you_mean(layer, last_names)}"
        outside = sorted({i for i in ids if not 0 <= i < rows})
        if outside:
            numbers = ", ".join(map(str, outside[:8]))
            yield (
                f"{key}trainable_token_indices: {numbers}: the embedding has rows 0 to {rows - 1}; "
                "tokens that the tokenizer gained get their rows by themselves"
            )


def _starts_that_fail(model: nn.Module, config: PeftConfig, key: str) -> Iterable[str]:
    start = str(getattr(config, "init_lora_weights", ""))
    if not takes_from_base(config) and start != "loftq":
        return
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        yield (
            f"{key}init_lora_weights: {start} decomposes whole weights, and ZeRO-3 has spread them: use "
            "distributed.strategy: zero2, or variant: lora"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        yield f"{key}init_lora_weights: {start} needs a base that is not quantised; use variant: lora"
    if getattr(config, "target_parameters", None):
        yield f"{key}init_lora_weights: {start} can't start on target_parameters; use variant: lora"


def _dims(parameter: Any) -> int:
    return len(getattr(parameter, "ds_shape", parameter.shape))
