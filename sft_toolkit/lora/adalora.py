"""AdaLoRA in a Trainer: ranks are given out while training, and its penalty reaches the gradient."""

from __future__ import annotations

from typing import Any

import torch
from peft import AdaLoraConfig, PeftModel
from transformers import TrainerCallback

from sft_toolkit.errors import ConfigError


class AdaLoraSchedule(TrainerCallback):
    """What AdaLoRA (Zhang et al., 2023) needs at every update, and what no Trainer does by itself.

    Its penalty pulls A A' and B' B to the identity. peft adds it to the loss that a model computes itself; here the
    loss is computed outside of the model, so its gradient is added once per update, after clipping.

    Raises:
        ConfigError: under an engine that keeps the gradients to itself.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.deepspeed or args.fsdp:
            raise ConfigError("AdaLoRA looks at every gradient, which DeepSpeed and FSDP keep to themselves: use ddp")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weight = _config(model).orth_reg_weight
        if weight:
            (weight * penalty(model)).backward()

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """While the gradients are still there; `global_step` counts this update only later."""
        _tuner(model).update_and_allocate(state.global_step + 1)


def schedule_of(model: Any) -> list[TrainerCallback]:
    """The callback where `model` carries an AdaLoRA adapter, else nothing."""
    return [AdaLoraSchedule()] if isinstance(model, PeftModel) and isinstance(_config(model), AdaLoraConfig) else []


def penalty(model: Any) -> torch.Tensor:
    """Mean distance of A A' and B' B from the identity over all adapted layers."""
    distances = []
    for name, p in _tuner(model).named_parameters():
        if "lora_A" in name or "lora_B" in name:
            product = p @ p.T if "lora_A" in name else p.T @ p
            distances.append(torch.linalg.norm(product - torch.eye(len(product)).to(product)))
    return torch.stack(distances).mean()


def _peft(model: Any) -> Any:
    return model if isinstance(model, PeftModel) else model.module  # DDP


def _tuner(model: Any) -> Any:
    return _peft(model).base_model


def _config(model: Any) -> Any:
    return _peft(model).active_peft_config
