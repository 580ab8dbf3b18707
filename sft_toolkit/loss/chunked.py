"""Loss and gradient of the vocabulary projection, a chunk of tokens at a time.

The logits of a row are its largest tensor by far: 1,024 tokens of a 150k vocabulary take 0.6 GB in fp32, and training
holds three such tensors (logits, their softmax, their gradient). Here a chunk of tokens is projected, scored and led
back to the hidden states at once, and its logits are gone before the next chunk: what stays is as large as the hidden
states and the weights of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, reduce
from operator import add
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sft_toolkit.loss.reduction import PerToken, Totals, nll_and_gradient, score

Learn = Callable[[Tensor, slice, Sequence[Tensor], list[Tensor | None]], tuple[Totals, Tensor | None]]
"""Hidden states of some tokens, where these stand among all, what learns in the head, its gradients so far (which are
added to) -> sums without a graph, and the gradient of the hidden states."""


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
    options: dict[str, Any] = {"targets": targets, "weights": weights, "with_entropy": with_entropy}
    parts = _parts(len(targets), rows)
    if not (torch.is_grad_enabled() and (hidden.requires_grad or trained)):
        scores = (score(head.forward(hidden[part]), objective=objective, **_of(part, options)) for part in parts)
        return reduce(add, scores)
    learn: Learn = partial(_learn, head, objective, options)
    if objective is None and type(head) is nn.Linear and head.weight.dtype == hidden.dtype and not _autocasts(hidden):
        learn = partial(_learn_linear, head, options)
    loss, nll, correct, entropy = _InChunks.apply(learn, parts, hidden, *trained)  # type: ignore[no-untyped-call]
    return Totals(loss, nll, correct, entropy, len(targets), len(targets) if weights is None else weights.sum())


def _parts(tokens: int, rows: int) -> list[slice]:
    """At least one, which may be empty: a batch without a supervised token still has a loss with a graph."""
    return [slice(at, at + rows) for at in range(0, max(1, tokens), rows)]


def _of(part: slice, options: dict[str, Any]) -> dict[str, Any]:
    return {name: value[part] if isinstance(value, Tensor) else value for name, value in options.items()}


def _autocasts(hidden: Tensor) -> bool:
    return torch.is_autocast_enabled(hidden.device.type)


# ---- One chunk: sums, the gradient of its hidden states, and what it adds to the gradients of the head ---------------


def _learn(
    head: nn.Module,
    objective: PerToken | None,
    options: dict[str, Any],
    states: Tensor,
    part: slice,
    learned: Sequence[Tensor],
    gradients: list[Tensor | None],
) -> tuple[Totals, Tensor | None]:
    """Any head: autograd leads the gradient through it; that of the logits is in closed form where it can be."""
    upwards = [states] if states.requires_grad else []
    with torch.enable_grad():
        logits = head.forward(states)
        if objective is None:
            totals, of_logits = nll_and_gradient(logits.detach(), **_of(part, options))
            found = torch.autograd.grad(logits, [*upwards, *learned], of_logits, allow_unused=True)
        else:
            totals = score(logits, objective=objective, **_of(part, options))
            found = torch.autograd.grad(totals.loss, [*upwards, *learned], allow_unused=True)
    for i, gradient in enumerate(found[len(upwards) :]):
        gradients[i] = _added(gradients[i], gradient)
    return totals.detached(), found[0] if upwards else None


@torch.no_grad()
def _learn_linear(
    head: nn.Linear,
    options: dict[str, Any],
    states: Tensor,
    part: slice,
    learned: Sequence[Tensor],
    gradients: list[Tensor | None],
) -> tuple[Totals, Tensor | None]:
    """A plain linear head: its gradient is added up by the matrix product itself, and the logits become their own
    gradient. A seventh less CPU time than `_learn` where the head is trained."""
    logits = nn.functional.linear(states, head.weight, head.bias)
    totals, of_logits = nll_and_gradient(logits, **_of(part, options), in_place=True)
    for i, parameter in enumerate(learned):
        if parameter is head.weight:
            total = gradients[i]
            gradients[i] = of_logits.T @ states if total is None else total.addmm_(of_logits.T, states)
        else:
            gradients[i] = _added(gradients[i], of_logits.sum(0))
    return totals, of_logits @ head.weight if states.requires_grad else None


class _InChunks(torch.autograd.Function):
    """(hidden, parameters of the head) -> (loss, nll, correct, entropy); only the loss has a gradient."""

    @staticmethod
    def forward(
        ctx: Any, learn: Learn, parts: list[slice], hidden: Tensor, *parameters: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Scores the chunks one by one and keeps the sums and the gradients for an upstream gradient of 1."""
        upwards = ctx.needs_input_grad[2]  # not where everything below the head is frozen
        of_hidden = torch.empty_like(hidden) if upwards else None
        of_parameters: list[Tensor | None] = [None] * len(parameters)
        sums: list[Totals] = []
        for part in parts:
            states = hidden[part].detach().requires_grad_(upwards)
            totals, of_states = learn(states, part, parameters, of_parameters)
            if of_hidden is not None and of_states is not None:
                of_hidden[part] = of_states
            sums.append(totals)
        ctx.gradients = (of_hidden, of_parameters)
        total = reduce(add, sums)
        nll = total.nll.clone()  # two outputs can't be one tensor
        ctx.mark_non_differentiable(*(beside for beside in (nll, total.correct, total.entropy) if beside is not None))
        return total.loss, nll, total.correct, total.entropy

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
