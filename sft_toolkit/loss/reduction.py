"""The loss: a sum over supervised tokens. Pure tensor functions, nothing of ours imported.

A sum, never a mean: only a sum can be divided once by the supervised tokens of the whole update, so that micro-batches,
accumulation and ranks do not change the number that is optimised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100

PerToken = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Logits `(tokens, vocabulary)`, targets, weights -> a loss per token; see `sft_toolkit.loss.objectives`."""


@dataclass(frozen=True)
class Totals:
    """Sums over supervised tokens.

    Args:
        loss: fp32 scalar, what is optimised, with a graph.
        nll: fp32 scalar, negative log-likelihood in nats times the weights, without a graph.
        correct: int64 scalar, tokens whose target no other token exceeds in likelihood.
        entropy: fp32 scalar, of the predicted distributions in nats; None where nobody asked.
        tokens: how many there are. A number: their logits have been picked, so that the host knows it already.
        weight: what their losses are to be divided by: the sum of their weights, `tokens` where there are none.
    """

    loss: Tensor
    nll: Tensor
    correct: Tensor
    entropy: Tensor | None
    tokens: int
    weight: Tensor | int

    def __add__(self, other: Totals) -> Totals:
        entropy = None if self.entropy is None or other.entropy is None else self.entropy + other.entropy
        sums = self.loss + other.loss, self.nll + other.nll, self.correct + other.correct
        return Totals(*sums, entropy, self.tokens + other.tokens, self.weight + other.weight)

    def detached(self) -> Totals:
        """The same without a graph."""
        return replace(self, loss=self.loss.detach())


def score(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    objective: PerToken | None = None,
    with_entropy: bool = False,
) -> Totals:
    """The one reduction: whatever is optimised, its losses per token are added up here, to be divided by items later.

    Args:
        logits: any float dtype, `(tokens, vocabulary)`, of supervised tokens alone. Upcast to fp32 here: in bf16 the
            sum over a 49k vocabulary is off in the second digit.
        targets: int64 `(tokens,)`.
        weights: fp32 `(tokens,)`; None is a weight of 1 for each.
        objective: loss per token; None is negative log-likelihood.
        with_entropy: also that of the predictions; costs a softmax over the vocabulary.

    Returns:
        Sums; 0.0 with a graph where there is no token (a rank may hold such a micro-batch, and it must still take part
        in the backward collectives).

    Raises:
        ValueError: the objective returned anything but one loss per token.
    """
    if objective is None and logits.requires_grad and torch.is_grad_enabled():
        loss, nll, correct, entropy = _Nll.apply(logits, targets, weights, with_entropy)  # type: ignore[no-untyped-call]
        return Totals(loss, nll, correct, entropy, len(targets), _weight(targets, weights))
    logits = logits.float()
    totals = _nll(logits.detach(), targets, weights, with_entropy)[0]
    if objective is None:
        return totals
    cost = objective(logits, targets, weights)
    if cost.shape != targets.shape:
        raise ValueError(f"an objective returns a loss per token: {tuple(targets.shape)}, not {tuple(cost.shape)}")
    return replace(totals, loss=cost.sum())


@torch.no_grad()
def nll_and_gradient(
    logits: Tensor,
    targets: Tensor,
    weights: Tensor | None = None,
    with_entropy: bool = False,
    in_place: bool = False,
) -> tuple[Totals, Tensor]:
    """Sums of the NLL, and its gradient in the logits: softmax minus one-hot, times the weights.

    In closed form it takes one exponential of each logit and finds the accuracy on the way; through autograd it is two,
    and a pass for the accuracy: half of what the loss costs beside the products of the head (docs/decisions).

    Args:
        logits, targets, weights, with_entropy: as of `score`.
        in_place: the logits may become the gradient.

    Returns:
        Sums without a graph; the gradient in the dtype of the logits.
    """
    totals, shares = _nll(logits.float(), targets, weights, with_entropy, in_place or logits.dtype != torch.float32)
    shares.scatter_add_(1, targets[:, None], shares.new_full((len(targets), 1), -1.0))
    if weights is not None:
        shares.mul_(weights[:, None])
    return totals, shares.to(logits.dtype)


def _nll(
    logits: Tensor, targets: Tensor, weights: Tensor | None, with_entropy: bool, in_place: bool = False
) -> tuple[Totals, Tensor]:
    """Sums of fp32 logits without a graph, and their softmax."""
    largest = logits.amax(-1, keepdim=True)
    own = logits.gather(1, targets[:, None])
    shares = (logits.sub_(largest) if in_place else logits - largest).exp_()
    total = shares.sum(-1, keepdim=True)
    each = (total.log() + largest - own)[:, 0]
    shares.div_(total)
    nll = (each if weights is None else each * weights).sum()
    # entr(p) and not -p log p: an impossible token (a masked logit of -inf) adds 0, not NaN.
    entropy = torch.special.entr(shares).sum() if with_entropy else None
    return Totals(nll, nll, (own >= largest).sum(), entropy, len(targets), _weight(targets, weights)), shares


def _weight(targets: Tensor, weights: Tensor | None) -> Tensor | int:
    return len(targets) if weights is None else weights.sum()


class _Nll(torch.autograd.Function):
    """(logits, targets, weights, with_entropy) -> (loss, nll, correct, entropy); only the loss has a gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Keeps the gradient for an upstream gradient of 1, as large as the softmax that autograd would keep."""
        totals, gradient = nll_and_gradient(logits, *given)
        ctx.save_for_backward(gradient)
        nll = totals.nll.clone()  # two outputs can't be one tensor
        ctx.mark_non_differentiable(*(beside for beside in (nll, totals.correct, totals.entropy) if beside is not None))
        return totals.loss, nll, totals.correct, totals.entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        """Scales what the forward kept."""
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None


def next_token_targets(labels: Tensor) -> Tensor:
    """Targets aligned with logits: position t is answered by the label at t + 1.

    Args:
        labels: int64 `(batch, length)`; -100 is not supervised.

    Returns:
        int64 `(batch, length)`; the last column is -100, since nothing follows it.
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def projects_only_kept(model: nn.Module) -> bool:
    """Whether `model.forward(logits_to_keep=<bool mask (batch, length)>)` projects just those hidden states.

    Read off the model's module: architectures of transformers that take a mask import `slice_logits_to_keep` for it
    (252 of 255 in 5.24). Others, and code loaded from a hub, get all logits: slower, never wrong.
    """
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):  # its virtual tokens shift every position
        return False
    base = model.get_base_model() if adapter is not None else model  # type: ignore[operator]
    return hasattr(sys.modules.get(type(base).__module__), "slice_logits_to_keep")


def supervised_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flat logits and targets of the supervised positions, whichever of the two layouts the model returned.

    Args:
        logits: `(supervised, vocabulary)` where only those were projected, else `(batch, length, vocabulary)`.
        targets: int64 `(batch, length)`, from `next_token_targets`.

    Returns:
        `(supervised, vocabulary)` and int64 `(supervised,)`.
    """
    kept = targets != IGNORE_INDEX
    if logits.dim() == 3:
        logits = logits[:, -targets.shape[1] :][kept]  # prompt learning puts virtual tokens in front
    return logits, targets[kept]


def router_loss(outputs: Any, config: Any, weight: Tensor | int) -> Tensor | float:
    """Load-balancing loss of a mixture-of-experts model, to be divided by the update's items like the NLL.

    The model adds it only where it computes its own loss. It is a mean per micro-batch, so it is multiplied here by the
    micro-batch's `Totals.weight`; 0.0 for other models, or where the config asks for no router logits.
    """
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is None:
        return 0.0
    return cast(Tensor, auxiliary * getattr(config, "router_aux_loss_coef", 0.0) * weight)
