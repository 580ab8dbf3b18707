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
from torch.nn.functional import cross_entropy

IGNORE_INDEX = -100

PerToken = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""Logits `(tokens, vocabulary)`, targets, weights -> a loss per token; see `sft_toolkit.objectives`."""


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
    logits = logits.float()
    if objective is None:
        cost = cross_entropy(logits, targets, reduction="none")
        cost = cost if weights is None else cost * weights
        nll = cost.detach().sum()
    else:
        with torch.no_grad():
            each = cross_entropy(logits, targets, reduction="none")
            nll = (each if weights is None else each * weights).sum()
        cost = objective(logits, targets, weights)
        if cost.shape != targets.shape:
            raise ValueError(f"an objective returns a loss per token: {tuple(targets.shape)}, not {tuple(cost.shape)}")
    with torch.no_grad():
        # Not argmax: over 49k entries it takes four times as long, a tenth of the whole projection.
        correct = (logits.gather(1, targets[:, None])[:, 0] >= logits.amax(-1)).sum()
        entropy = _entropy(logits) if with_entropy else None
        weight = len(targets) if weights is None else weights.sum()
    return Totals(cost.sum(), nll, correct, entropy, len(targets), weight)


def _entropy(logits: Tensor) -> Tensor:
    """Summed over tokens. entr(p) and not -p log p: an impossible token (a masked logit of -inf) adds 0, not NaN."""
    return cast(Tensor, torch.special.entr(logits.softmax(-1)).sum())


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
