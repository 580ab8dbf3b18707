"""Trainer with what adapters need: a learning rate of their own for B (LoRA+), and a folder that is whole."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from transformers import Trainer

from sft_toolkit.errors import ConfigError
from sft_toolkit.model.modules import without_adapter
from sft_toolkit.training.intake import complete_adapter
from sft_toolkit.training_args import SFTArguments

B_MATRICES = ("lora_B", "lora_embedding_B")


class AdapterTrainer(Trainer):
    """`transformers.Trainer`; with plain arguments, and without an adapter, nothing is different."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """As Trainer's; `lora_plus_ratio` moves the B matrices into groups with a higher learning rate."""
        fresh = self.optimizer is None
        optimizer = super().create_optimizer(model)
        ratio = getattr(self.args, "lora_plus_ratio", None)
        if ratio is not None and fresh:
            quicken(optimizer, cast(nn.Module, self.model if model is None else model), ratio)
        return optimizer

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, plus what an adapter needs beside it: its base's fingerprint, and the generation config."""
        super().save_model(output_dir, _internal_call)
        if not self.args.should_save:
            return
        model = self.accelerator.unwrap_model(self.model)
        complete_adapter(model, output_dir or self.args.output_dir, portable=not _internal_call)
        config = getattr(without_adapter(model), "generation_config", None)
        if isinstance(self.args, SFTArguments) and config is not None:
            config.save_pretrained(output_dir or self.args.output_dir)


def quicken(optimizer: torch.optim.Optimizer, model: nn.Module, ratio: float) -> None:
    """Give the B matrices of a new optimizer `ratio` times the learning rate of the others (LoRA+, Hayou et al. 2024).

    Raises:
        ConfigError: there are none.
    """
    fast = {id(p) for name, p in model.named_parameters() if p.requires_grad and any(b in name for b in B_MATRICES)}
    if not fast:
        raise ConfigError("training.lora_plus_ratio: there are no B matrices to train: it is for LoRA adapters")
    for group in list(optimizer.param_groups):
        moved = [p for p in group["params"] if id(p) in fast]
        if moved:
            group["params"] = [p for p in group["params"] if id(p) not in fast]
            optimizer.add_param_group({**group, "params": moved, "lr": group["lr"] * ratio})
