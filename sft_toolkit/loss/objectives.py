"""What is optimised: functions from the logits of supervised tokens to one loss per token.

`training.loss` names one of these, one registered with `@register("loss", "name")`, or a dotted path. A function gets
fp32 logits of supervised tokens alone and never sees the batch, the accumulation or the ranks: it returns a loss per
token, and `sft_toolkit.loss.reduction.score` adds them up, so that no objective can bring back a mean of means.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sft_toolkit.errors import ConfigError
from sft_toolkit.registry import bound


class Objective(Protocol):
    """A loss per supervised token, differentiable in the logits.

    Each token's loss depends on that token alone: the tokens of a batch may come in several calls.
    """

    def __call__(self, logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
        """Args: fp32 `(tokens, vocabulary)`, int64 `(tokens,)` without -100, fp32 `(tokens,)` or None.

        Returns: fp32 `(tokens,)`, already multiplied by the weights.
        """


def nll(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """Negative log-likelihood: -log p."""
    return _weighted(cross_entropy(logits, targets, reduction="none"), weights)


def label_smoothing(logits: Tensor, targets: Tensor, weights: Tensor | None, share: float = 0.1) -> Tensor:
    """NLL of a target that spreads a share of its mass over the vocabulary (Szegedy et al. 2016, arXiv:1512.00567)."""
    return _weighted(cross_entropy(logits, targets, reduction="none", label_smoothing=share), weights)


def focal(logits: Tensor, targets: Tensor, weights: Tensor | None, gamma: float = 2.0) -> Tensor:
    """-(1 - p)^gamma log p: tokens that are right already count less (Lin et al. 2017, arXiv:1708.02002)."""
    if gamma < 0:
        raise ValueError(f"gamma is {gamma}; from 0 on, or tokens that are right already would count more")
    cost = cross_entropy(logits, targets, reduction="none")
    return _weighted((1 - torch.exp(-cost)) ** gamma * cost, weights)


def dft(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """-sg(p) log p, sg being stop-gradient: Dynamic Fine-Tuning (Wu et al. 2025, arXiv:2508.05629).

    NLL weighs a token's gradient by 1/p, which is large for tokens that the model finds unlikely; this takes it out.
    """
    cost = cross_entropy(logits, targets, reduction="none")
    return _weighted(torch.exp(-cost.detach()) * cost, weights)


def _weighted(cost: Tensor, weights: Tensor | None) -> Tensor:
    return cost if weights is None else cost * weights


def resolve_objective(named: str | Mapping[str, Any] | None, smoothing: float) -> Callable[..., Tensor] | None:
    """The objective of `training.loss`; None is negative log-likelihood, which needs nothing computed beside it.

    Args:
        named: a registered name, a dotted path, or `{name: {option: value}}`; None is `nll`.
        smoothing: `label_smoothing_factor` of TrainingArguments; turns `nll` into `label_smoothing`, as in Trainer.

    Raises:
        ConfigError: an unknown name or option, or smoothing asked of an objective that has none.
    """
    named = "nll" if named is None else named
    name, options = (named, {}) if isinstance(named, str) else next(iter(named.items()))
    if name == "nll" and not smoothing and not options:
        return None
    if name in ("nll", "label_smoothing") and smoothing and not options:
        return partial(label_smoothing, share=smoothing)
    if smoothing:
        raise ConfigError(
            f"label_smoothing_factor: {smoothing:g} belongs to loss: nll or label_smoothing, not to '{name}'"
        )
    return bound("loss", named, places=3)  # type: ignore[no-any-return]
