"""Packed documents must not see one another: proven on the model itself before training starts."""

from __future__ import annotations

import inspect
from typing import Any, cast

import torch
from torch import Tensor, nn

from sft_toolkit.errors import ConfigError


def without_adapter(model: nn.Module) -> nn.Module:
    """The base model inside a peft wrapper; any other module as it is."""
    inner = getattr(model, "get_base_model", None)
    return cast(nn.Module, inner()) if inner is not None else model


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Names that `model.forward` takes; looks through a peft wrapper, whose own forward takes anything."""
    return frozenset(inspect.signature(without_adapter(model).forward).parameters)


def packed_row(first: list[int], second: list[int], device: torch.device) -> dict[str, Tensor]:
    """Two documents in one row: `position_ids` restart, and no `attention_mask` is given."""
    return {
        "input_ids": torch.tensor([first + second], device=device),
        "position_ids": torch.tensor([[*range(len(first)), *range(len(second))]], device=device),
    }


@torch.no_grad()
def leaks_between_documents(model: nn.Module, vocabulary: int, length: int = 8) -> bool:
    """Whether the second document of a packed row notices the first.

    Changes every token of the first document and looks at the logits of the second: where documents are isolated those
    stay the same to rounding, in any dtype, so no tolerance has to be guessed. Costs two forwards of 16 tokens.

    Args:
        model: any causal language model, on its device; under ZeRO-3 every rank must call this.
        vocabulary: ids are drawn from `range(vocabulary)`.
        length: tokens of each document.
    """
    device = next(model.parameters()).device
    ids = [i % vocabulary for i in range(1, 3 * length + 1)]
    first, other, second = ids[:length], ids[length : 2 * length], ids[2 * length :]
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in forward_parameters(model) else {}
    was_training = model.training
    model.eval()
    try:
        with_first = model(**packed_row(first, second, device), **extra).logits[0, length:].float()
        with_other = model(**packed_row(other, second, device), **extra).logits[0, length:].float()
    finally:
        model.train(was_training)
    scale = with_first.abs().max().clamp_min(1e-6)
    return bool((with_first - with_other).abs().max() / scale > 1e-5)


def refuse_leaking(wrapped: nn.Module, model: nn.Module) -> None:
    """Stop before the first step where packed documents of this model would see one another.

    Args:
        wrapped: the model as it is trained (DDP, DeepSpeed engine, ...).
        model: the same model without wrapper and adapter.

    Raises:
        ConfigError: the model takes no `position_ids`, or its attention ignores their restarts.
    """
    name = type(model).__name__
    if "position_ids" not in forward_parameters(model):
        raise ConfigError(
            f"packing: {name} takes no position_ids, so packed documents can't be told apart: turn it off"
        )
    if leaks_between_documents(wrapped, int(model.get_input_embeddings().num_embeddings)):  # type: ignore[operator]
        attention = getattr(getattr(model, "config", None), "_attn_implementation", "?")
        raise ConfigError(
            f"packing: with attention '{attention}', {name} lets a packed document see the one before it (measured on "
            "this model just now): turn packing off, or try model.attn_implementation: sdpa or eager"
        )
