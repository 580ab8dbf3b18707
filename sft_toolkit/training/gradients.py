"""A Trainer whose gradients may be changed between unscaling and clipping.

`training.gradient_transform` names a function, or a class that is called with its options and gives one:

    @register("gradient_transform", "halve")
    def halve(parameters, step, rng):
        for parameter in parameters.values():
            parameter.grad.mul_(0.5)

It changes the gradients in place. The norm that is logged, and clipping, see what it leaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from transformers import Trainer

from sft_toolkit.args import Named
from sft_toolkit.errors import ConfigError
from sft_toolkit.registry import bound


class GradientTransform(Protocol):
    """Changes the gradients of an update."""

    def __call__(self, parameters: Mapping[str, nn.Parameter], step: int, rng: torch.Generator) -> Any:
        """Change `parameters[name].grad` in place, or set it to None: then the optimizer passes that parameter over.

        Args:
            parameters: those with a gradient, by name; it is that of the whole update, over all ranks, and unscaled.
            step: updates made before this one; goes on after a resume.
            rng: on the CPU, seeded by (seed, step), so that all ranks draw the same and a resumed run repeats it.
        """


def gradient_transform_of(named: Named) -> GradientTransform | None:
    """The transform of a name, a dotted path or `{name: {option: value}}`; None for None.

    Raises:
        ConfigError: an unknown name, or options that it does not take.
    """
    transform: GradientTransform | None = None if named is None else bound("gradient_transform", named, places=3)
    return transform


class GradientTrainer(Trainer):
    """Trainer with a `gradient_transform`; without one it is Trainer.

    Trainer has no public hook between unscaling and clipping (`on_pre_optimizer_step` comes after both), so two of its
    private methods are overridden; a test holds their signatures.
    """

    gradient_transform: GradientTransform | None = None

    def use_gradient_transform(self, named: Named) -> None:
        """From now on, change the gradients of each update.

        Raises:
            ConfigError: as `gradient_transform_of`; or the engine keeps its gradients to itself.
        """
        self.gradient_transform = gradient_transform_of(named)
        engine = "DeepSpeed" if self.is_deepspeed_enabled else "FSDP" if self.is_fsdp_enabled else None
        if self.gradient_transform is not None and engine is not None:
            raise ConfigError(
                f"gradient_transform: {engine} shards gradients and clips them itself, so that nothing can be changed "
                "in between: leave it out, or train with strategy ddp or none"
            )

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        if self.gradient_transform is None:
            return super()._clip_grad_norm(model)  # type: ignore[no-untyped-call]
        return self._transform(model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        # Without clipping Trainer comes here straight away.
        if grad_norm is None and self.gradient_transform is not None:
            grad_norm = self._transform(model, math.inf)
        return super()._get_grad_norm(model, grad_norm=grad_norm)  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def _transform(self, model: nn.Module, max_norm: float) -> torch.Tensor:
        """Unscale, transform, clip: what accelerate's `clip_grad_norm_` does, with something in the middle."""
        self.accelerator.unscale_gradients()
        named = self.accelerator.unwrap_model(model).named_parameters()
        rng = torch.Generator().manual_seed((self.args.seed << 32) + self.state.global_step)
        assert self.gradient_transform is not None
        self.gradient_transform({n: p for n, p in named if p.grad is not None}, self.state.global_step, rng)
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm)
