"""Which weights of a full fine-tune are trained: patterns on parameter names, as in a shell (`*`, `?`, `[ab]`)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean

logger = logging.getLogger(__name__)


def matching(model: nn.Module, patterns: Sequence[str], key: str) -> set[str]:
    """Names of the parameters that any of `patterns` matches, each as a whole.

    Raises:
        ConfigError: patterns that match nothing, with near names; `key` is the option they came from.
    """
    names = [name for name, _ in model.named_parameters()]
    vain = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in names)]
    if vain or not patterns:
        raise ConfigError([f"{key}: '{p}' matches no parameter{_near(p, names)}" for p in vain] or f"{key} is empty")
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def train_only(model: nn.Module, patterns: Sequence[str], key: str = "training.trainable") -> None:
    """Freeze every parameter of `model` that no pattern matches; says the share that is trained.

    A tied weight has one name, that of the embedding.

    Raises:
        ConfigError: patterns in vain, or a model with an adapter, which decides by itself what is trained.
    """
    if hasattr(model, "peft_config"):
        raise ConfigError(
            f"{key}: with an adapter, the adapter is trained and nothing else: leave the key out, and name what shall "
            "be trained in full in lora.modules_to_save"
        )
    chosen = matching(model, patterns, key)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    sizes = [(int(getattr(p, "ds_numel", p.numel())), p.requires_grad) for p in model.parameters()]
    trained, total = sum(size for size, trains in sizes if trains), sum(size for size, _ in sizes)
    logger.info("trainable: %s of %s parameters (%.2f %%)", f"{trained:,}", f"{total:,}", 100 * trained / total)


def _near(pattern: str, names: Iterable[str]) -> str:
    """The nearest part of a parameter's name: patterns are written in parts."""
    parts = {part for name in names for part in name.split(".") if not part.isdigit()}
    for word in pattern.replace("*", ".").replace("?", ".").split("."):
        if word and not word.isdigit() and word not in parts:
            return did_you_mean(word, parts) or f" (parts of names: {', '.join(sorted(parts)[:12])})"
    return f": a pattern matches the whole name, as '*{pattern.strip('*')}*' would"


def lets_gradients_in(model: Any, args: Any) -> None:
    """Reentrant checkpointing differentiates nothing whose input needs no gradient, as behind a frozen embedding."""
    options = getattr(args, "gradient_checkpointing_kwargs", None) or getattr(
        args, "activation_checkpointing_kwargs", None
    )
    if (options or {}).get("use_reentrant") and hasattr(model, "enable_input_require_grads"):
        model.enable_input_require_grads()
