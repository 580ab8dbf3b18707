"""Attention within the documents of a packed row, without a mask over the whole row.

Stock `sdpa` separates packed documents by a dense T x T mask: the work and the memory of T squared, where the sum of
the documents' squares would do. Two functions, registered through transformers' public interfaces, avoid it:

- `documents_or_mask` stands where a model builds its mask. It asks the model's own mask function which neighbours
  belong together, and where the answer is "causal within each document" returns `Documents` instead of a tensor.
- `attend_per_document` stands where a layer attends. Given `Documents`, it attends to one document after the other;
  given anything else, it is stock `sdpa`.

Because the documents are read off the mask that the model asks for, padded batches, generation with a cache, vision
towers and unusual masks stay exactly what they are under `sdpa`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import import_module
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface

from sft_toolkit.errors import ConfigError

PER_DOCUMENT = "sft_per_document"
"""The name under which the two functions are registered."""


def register_per_document() -> None:
    """Make the name known to transformers; again and again is the same as once.

    The registry is one for the process, so this is the only thing of the toolkit that outlives a run. It adds a name of
    our own and changes no other; nothing happens on import.
    """
    AttentionInterface.register(PER_DOCUMENT, attend_per_document)
    AttentionMaskInterface.register(PER_DOCUMENT, documents_or_mask)


@dataclass(frozen=True)
class Documents:
    """What is passed from layer to layer instead of a mask: causal attention within each document.

    Args:
        lengths: tokens of each document, in order; their sum is the length of the row.
        window: a position sees itself and `window - 1` positions before it; None sees the whole document.
    """

    lengths: tuple[int, ...]
    window: int | None = None
    _made: dict[Any, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def band(self, length: int, device: torch.device) -> Tensor | None:
        """Mask of a document that is longer than the window: bool `(length, length)`, True is seen. Else None."""
        if self.window is None or length <= self.window:
            return None
        if (length, device) not in self._made:
            seen = torch.ones(length, length, dtype=torch.bool, device=device).tril()
            self._made[length, device] = seen.triu(1 - self.window)
        return self._made[length, device]

    def bounds(self, device: torch.device) -> Tensor:
        """Where documents begin and end: int32 `(documents + 1,)`, from 0 to the length of the row."""
        if device not in self._made:
            ends = torch.tensor((0, *self.lengths), device=device).cumsum(0)
            self._made[device] = ends.to(torch.int32)
        return self._made[device]


# ---- Where a model builds its mask -----------------------------------------------------------------------------------


def documents_or_mask(**asked: Any) -> Any:
    """Signature of an `AttentionMaskInterface` function: `Documents` for a packed row, else what `sdpa` would get."""
    found = documents_of(**asked)
    stock = AttentionMaskInterface()["sdpa"]  # type: ignore[no-untyped-call]
    return stock(**asked) if found is None else found


def documents_of(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Tensor],
    q_offset: int = 0,
    kv_offset: int = 0,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **_: Any,
) -> Documents | None:
    """The documents of a row, if its mask is causal within documents and nothing else.

    Looks at the mask along its diagonal, at the edge of what each position sees and just beyond it: O(T) entries
    instead of T x T. That tells documents from chunks of a fixed size, and finds blocks that see forward. One read by
    the host for each kind of mask in a forward.

    Args:
        mask_function: index function of transformers' masking, `(batch, head, query, key) -> bool`, on tensors.
        local_size: window (or chunk) in tokens of the layers that this mask is for.
        use_vmap: the model overlays a pattern of its own, whose function may not work on tensors.
    """
    exact_row = batch_size == 1 and q_length == kv_length and not (q_offset or kv_offset)
    if attention_mask is not None or use_vmap or not exact_row or q_length < 2:
        return None
    at = torch.arange(q_length, device=device)
    zero = torch.zeros_like(at)

    def seen(query: Tensor, key: Tensor) -> Tensor:
        n = len(query)
        return mask_function(zero[:n], zero[:n], query, key).expand(n)

    joined = seen(at[1:], at[:-1])
    begins = torch.cat([zero[:1], torch.where(joined, 0, at[1:])]).cummax(0).values
    edge = begins if local_size is None else torch.maximum(begins, at - (local_size - 1))
    beyond = seen(at, (edge - 1).clamp_min(0)) & (edge > 0)
    holds = (seen(at, at) & seen(at, edge) & ~beyond).all() & ~seen(at[:-1], at[1:]).any()
    *same, is_per_document = torch.cat([joined, holds[None]]).tolist()
    starts = [0, *(i + 1 for i, goes_on in enumerate(same) if not goes_on), q_length]
    if not is_per_document or len(starts) == 2:
        return None  # a pattern of the model's own, or a single document, which sdpa attends to without a mask
    return Documents(tuple(end - start for start, end in pairwise(starts)), local_size)


# ---- Where a layer attends -------------------------------------------------------------------------------------------


def attend_per_document(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Documents | Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Signature of an `AttentionInterface` function.

    One call of `scaled_dot_product_attention` per document. Documents of equal length are not put into one call: to
    bring them together costs more than the calls it saves (docs/decisions/packed-attention.md).

    Args:
        query: `(1, heads, T, head size)`.
        key, value: `(1, heads of keys, T, head size)`.
        attention_mask: what `documents_or_mask` gave; with anything but `Documents` this is stock `sdpa`.

    Returns:
        `(1, T, heads, head size of values)`, and None in place of attention weights.

    Raises:
        ConfigError: the layer asks for something that attention per document does not do, by name.
    """
    if not isinstance(attention_mask, Documents):
        stock = AttentionInterface()["sdpa"]  # type: ignore[no-untyped-call]
        arguments = {"dropout": dropout, "scaling": scaling, "is_causal": is_causal, **kwargs}
        return cast("tuple[Tensor, None]", stock(module, query, key, value, attention_mask, **arguments))
    _refuse_unsupported(module, query, key, attention_mask, is_causal, kwargs)
    kernel = _varlen_kernel() if _suits_varlen(query, value, dropout) else None
    if kernel is not None:
        return _attend_at_once(kernel, query, key, value, attention_mask, scaling), None
    lengths = list(attention_mask.lengths)
    grouped = query.shape[1] != key.shape[1]
    # split, not slices: the backward of a slice fills a whole row of zeros, that of a split joins its parts once.
    parts = zip(lengths, *(torch.split(states, lengths, 2) for states in (query, key, value)), strict=True)
    attended = []
    for length, q, k, v in parts:
        band = attention_mask.band(length, query.device)
        options = {"dropout_p": dropout, "scale": scaling, "is_causal": band is None, "enable_gqa": grouped}
        attended.append(scaled_dot_product_attention(q, k, v, band, **options).transpose(1, 2))  # type: ignore[arg-type]
    return torch.cat(attended, dim=1), None


def _refuse_unsupported(
    module: nn.Module, query: Tensor, key: Tensor, documents: Documents, is_causal: bool | None, asked: dict[str, Any]
) -> None:
    names = {"softcap": "logit soft-capping", "s_aux": "attention sinks", "position_bias": "a position bias"}
    problems = [what for name, what in names.items() if asked.get(name) is not None]
    if is_causal is False:
        problems.append("attention that is not causal")
    total = sum(documents.lengths)
    if query.shape[2] != total or key.shape[2] != total:
        problems.append(f"{query.shape[2]} queries and {key.shape[2]} keys on a row of {total} tokens")
    if problems:
        raise ConfigError(
            f"attention '{PER_DOCUMENT}' does not do what {type(module).__name__} asks for: {', '.join(problems)}; "
            "set model.attn_implementation: eager"
        )


# ---- On CUDA: all documents in one kernel ----------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _varlen_kernel() -> Callable[..., Tensor] | None:
    """`varlen_attn` of torch, where it takes windows and grouped heads (2.13 does), or None."""
    try:
        kernel: Callable[..., Tensor] = import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        return None
    return kernel if {"window_size", "enable_gqa"} <= inspect.signature(kernel).parameters.keys() else None


def _suits_varlen(query: Tensor, value: Tensor, dropout: float) -> bool:
    half = query.dtype in (torch.float16, torch.bfloat16) and query.dtype == value.dtype
    fits = query.shape[-1] == value.shape[-1] <= 256 and query.shape[-1] % 8 == 0
    return query.is_cuda and half and fits and not dropout and torch.cuda.get_device_capability(query.device) >= (8, 0)


def _attend_at_once(
    kernel: Callable[..., Tensor], query: Tensor, key: Tensor, value: Tensor, documents: Documents, scale: float | None
) -> Tensor:
    """`(1, T, heads, head size)`. The kernel counts its window without the position itself; -1 sees everything."""
    bounds, longest = documents.bounds(query.device), max(documents.lengths)
    return kernel(
        *(part.transpose(1, 2)[0] for part in (query, key, value)),
        bounds,
        bounds,
        longest,
        longest,
        scale=scale,
        window_size=(-1 if documents.window is None else documents.window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )[None]
