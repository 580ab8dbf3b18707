"""Gradient transforms that are built in: `training.gradient_transform: {clip_each: {max_norm: 1.0}}`."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

import torch
from torch import nn

Parameters = Mapping[str, nn.Parameter]


class ClipEach:
    """Clip the gradient of each parameter by its own norm, so that one layer's spike does not slow all others.

    Args:
        max_norm: largest L2 norm of a parameter's gradient.
    """

    def __init__(self, max_norm: float) -> None:
        if not max_norm > 0:
            raise ValueError(f"max_norm: {max_norm} must be above 0")
        self.max_norm = max_norm

    def __call__(self, parameters: Parameters, step: int, rng: torch.Generator) -> None:
        for parameter in parameters.values():
            nn.utils.clip_grad_norm_(parameter, self.max_norm)


class Noise:
    """Add Gaussian noise of variance eta / (1 + step)^gamma (Neelakantan et al. 2015, arXiv:1511.06807).

    Args:
        eta: variance before the first update.
        gamma: how fast it falls.
    """

    def __init__(self, eta: float = 0.01, gamma: float = 0.55) -> None:
        if eta < 0:
            raise ValueError(f"eta: {eta} is a variance and can't be below 0")
        self.eta, self.gamma = eta, gamma

    def __call__(self, parameters: Parameters, step: int, rng: torch.Generator) -> None:
        deviation = (self.eta / (1 + step) ** self.gamma) ** 0.5
        for parameter in parameters.values():
            if parameter.grad is not None:
                drawn = torch.randn(parameter.grad.shape, generator=rng, dtype=torch.float32)
                parameter.grad.add_(drawn.to(parameter.grad), alpha=deviation)


class Freeze:
    """Leave some parameters alone for the first updates, weight decay and moments included.

    Args:
        patterns: of names, as in a shell: `model.embed_tokens.*`.
        until: updates for which they stay as they are.
    """

    def __init__(self, patterns: list[str], until: int) -> None:
        self.patterns, self.until = patterns, until

    def __call__(self, parameters: Parameters, step: int, rng: torch.Generator) -> None:
        if step >= self.until:
            return
        for name, parameter in parameters.items():
            if any(fnmatchcase(name, pattern) for pattern in self.patterns):
                parameter.grad = None
