"""Loss and gradient of the vocabulary projection, a chunk of tokens at a time.

The logits of a row are its largest tensor by far: 1,024 tokens of a 150k vocabulary take 0.6 GB in fp32, and training
holds three such tensors (logits, their softmax, their gradient). Here a chunk of tokens is projected, scored and led
back to the hidden states at once, and its logits are gone before the next chunk: what stays is as large as the hidden
states and the weights of the head.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_toolkit.loss import PerToken, Totals, score

ScoreChunk = Callable[[Tensor, slice], Totals]
"""Hidden states of some tokens `(tokens, hidden)`, and where these stand among all -> their sums."""


def chunk_rows(vocabulary: int, on_cpu: bool) -> int:
    """Tokens of a chunk: 2**24 logits (64 MiB in fp32), but never so few that the matrix product becomes slow.

    On 2 CPU cores 128 rows and more take the same time, fewer take up to twice as long. On an accelerator a chunk has
    to outweigh reading the head's weights once, and writing their gradient (docs/decisions/chunked-loss.md).
    """
    return max(128 if on_cpu else 1024, 2**24 // vocabulary)


def score_in_chunks(
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    objective: PerToken | None = None,
    with_entropy: bool = False,
    rows: int = 1024,
) -> Totals:
    """`score(head(hidden), targets, weights, objective, with_entropy)` without ever holding all logits.

    Call it where the head's own forward would run: under ZeRO-3 its weights are whole only there, and autocast is set.
    The gradient is computed here, for an upstream gradient of 1, and scaled in the backward: no second projection.

    Args:
        head: maps hidden states to logits, each token by itself; its forward is called without its hooks.
        hidden: `(tokens, hidden)`, of supervised tokens alone.
        targets: int64 `(tokens,)`.
        weights: fp32 `(tokens,)` or None.
        objective: loss per token; None is negative log-likelihood.
        with_entropy: also that of the predictions.
        rows: tokens of a chunk.
    """
    trained = [parameter for parameter in head.parameters() if parameter.requires_grad]

    def score_chunk(states: Tensor, part: slice) -> Totals:
        of_part = None if weights is None else weights[part]
        return score(head.forward(states), targets[part], of_part, objective, with_entropy)

    parts = _parts(len(targets), rows)
    if torch.is_grad_enabled() and (hidden.requires_grad or trained):
        loss, nll, correct, entropy = _InChunks.apply(score_chunk, parts, hidden, *trained)  # type: ignore[no-untyped-call]
        weight = len(targets) if weights is None else weights.sum()
        return Totals(loss, nll, correct, entropy, len(targets), weight)
    return reduce(add, (score_chunk(hidden[part], part) for part in parts))


def _parts(tokens: int, rows: int) -> list[slice]:
    """At least one, which may be empty: a batch without a supervised token still has a loss with a graph."""
    return [slice(at, at + rows) for at in range(0, max(1, tokens), rows)]


class _InChunks(torch.autograd.Function):
    """(hidden, parameters of the head) -> (loss, nll, correct, entropy); only the loss has a gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        score_chunk: ScoreChunk,
        parts: list[slice],
        hidden: Tensor,
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Scores the chunks one by one and keeps the sums and the gradients for an upstream gradient of 1."""
        upwards = ctx.needs_input_grad[2]  # not where everything below the head is frozen
        of_hidden = torch.empty_like(hidden) if upwards else None
        of_parameters: list[Tensor | None] = [None] * len(parameters)
        sums: list[Totals] = []
        for part in parts:
            with torch.enable_grad():
                states = hidden[part].detach().requires_grad_(upwards)
                totals = score_chunk(states, part)
            learned = (states, *parameters) if upwards else parameters
            found = torch.autograd.grad(totals.loss, learned, allow_unused=True)
            if of_hidden is not None:
                of_hidden[part] = found[0]
            of_parameters = [_added(*pair) for pair in zip(of_parameters, found[upwards:], strict=True)]
            sums.append(totals.detached())
        ctx.gradients = (of_hidden, of_parameters)
        total = reduce(add, sums)
        beside = [total.nll, total.correct, *([] if total.entropy is None else [total.entropy])]
        ctx.mark_non_differentiable(*beside)
        return total.loss, total.nll, total.correct, total.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scales what the forward kept, in place: a second copy of the head's gradient would be the peak."""
        if ctx.gradients is None:
            raise RuntimeError("the gradient of a chunked loss can be taken once; call the forward again")
        of_hidden, of_parameters = ctx.gradients
        ctx.gradients = None
        hidden, *parameters = (None if g is None else g.mul_(upstream) for g in (of_hidden, *of_parameters))
        return None, None, hidden, *parameters


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if total is None or part is None:
        return part if total is None else total
    return total.add_(part)
