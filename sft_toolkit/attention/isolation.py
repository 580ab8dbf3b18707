"""Packed documents must not see one another: proven on the model itself before training starts."""

from __future__ import annotations

from itertools import islice

import torch
from torch import Tensor, nn

from sft_toolkit.errors import ConfigError
from sft_toolkit.model.modules import forward_parameters, vocabulary_rows, without_cache


def packed_row(*documents: list[int], device: torch.device) -> dict[str, Tensor]:
    """Documents in one row: `position_ids` restart, and no `attention_mask` is given."""
    return {
        "input_ids": torch.tensor([[token for document in documents for token in document]], device=device),
        "position_ids": torch.tensor([[i for document in documents for i in range(len(document))]], device=device),
    }


@torch.no_grad()
def leaks_between_documents(wrapped: nn.Module, model: nn.Module, length: int = 8) -> bool:
    """Whether the second document of a packed row notices the first.

    Changes every token of the first document and looks at the logits of the second: where documents are isolated those
    stay the same to rounding, in any dtype, so no tolerance has to be guessed. Costs two forwards of 16 tokens.

    Args:
        wrapped: the model as it is trained (DDP, DeepSpeed engine, ...); under ZeRO-3 every rank must call this.
        model: the same model without wrapper and adapter.
        length: tokens of each document.
    """
    ids = _ids(model, 3 * length)
    first, other, second = ids[:length], ids[length : 2 * length], ids[2 * length :]
    with_first = _logits(wrapped, model, first, second)[0, length:]
    with_other = _logits(wrapped, model, other, second)[0, length:]
    scale = with_first.abs().max().clamp_min(1e-6)
    return bool((with_first - with_other).abs().max() / scale > 1e-5)


@torch.no_grad()
def difference_from_parts(wrapped: nn.Module, model: nn.Module, lengths: tuple[int, ...] = (7, 5, 5, 12, 3)) -> float:
    """How far the logits of a packed row are from those of its documents alone: RMS of the difference, relative.

    Costs a forward of the row and one of each document, 64 tokens in all. Arguments as in `leaks_between_documents`.
    """
    ids = iter(_ids(model, sum(lengths)))
    documents = [list(islice(ids, length)) for length in lengths]
    alone = torch.cat([_logits(wrapped, model, document)[0] for document in documents])
    difference = _logits(wrapped, model, *documents)[0] - alone
    return float(difference.norm() / alone.norm().clamp_min(1e-6))


def _ids(model: nn.Module, number: int) -> list[int]:
    vocabulary = vocabulary_rows(model)
    return [i % vocabulary for i in range(1, number + 1)]


def _logits(wrapped: nn.Module, model: nn.Module, *documents: list[int]) -> Tensor:
    """fp32 `(1, tokens, vocabulary)` in eval mode, the mode restored."""
    was_training = wrapped.training
    wrapped.eval()
    try:
        row = packed_row(*documents, device=next(wrapped.parameters()).device)
        logits: Tensor = wrapped(**row, **without_cache(model)).logits
    finally:
        wrapped.train(was_training)
    return logits.float()


def refuse_leaking(wrapped: nn.Module, model: nn.Module) -> None:
    """Stop before the first step where packed documents of this model would see one another.

    Arguments as in `leaks_between_documents`.

    Raises:
        ConfigError: the model takes no `position_ids`, or its attention ignores their restarts.
    """
    name = type(model).__name__
    if "position_ids" not in forward_parameters(model):
        raise ConfigError(
            f"packing: {name} takes no position_ids, so packed documents can't be told apart: turn it off"
        )
    if leaks_between_documents(wrapped, model):
        attention = getattr(getattr(model, "config", None), "_attn_implementation", "?")
        raise ConfigError(
            f"packing: with attention '{attention}', {name} lets a packed document see the one before it (measured on "
            "this model just now): turn packing off, or try model.attn_implementation: sdpa or eager"
        )
