"""A tiny mixture with code of its own: its experts are modules, of which only those with tokens are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP

from tests.tiny import tiny_model

EXPERTS = 8


class RoutedMLP(nn.Module):
    """Each token goes to one expert."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden_size, EXPERTS, bias=False)
        self.experts = nn.ModuleList(LlamaMLP(config) for _ in range(EXPERTS))
        self.called: list[list[int]] = []

    def forward(self, hidden: Tensor) -> Tensor:
        tokens = hidden.flatten(0, -2)
        weight, chosen = self.gate(tokens).softmax(-1).max(-1)
        mixed = torch.zeros_like(tokens)
        self.called.append(chosen.unique().tolist())
        for number in self.called[-1]:
            rows = torch.nonzero(chosen == number).flatten()
            mixed = mixed.index_add(0, rows, weight[rows, None] * self.experts[number](tokens[rows]))
        return mixed.view_as(hidden)


class RoutedForCausalLM(LlamaForCausalLM):
    """Llama with `RoutedMLP` in each layer."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = RoutedMLP(config)
        self.post_init()


def called_experts(model: Any) -> list[list[list[int]]]:
    """For each layer of `RoutedMLP`, the experts that each forward has called."""
    return [module.called for module in model.modules() if isinstance(module, RoutedMLP)]


def routed_model() -> RoutedForCausalLM:
    """The weights of `tiny_model`, routers that prefer an expert clearly, experts of random weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model: Any = RoutedForCausalLM(tiny_model().config)
        for module in model.modules():
            if isinstance(module, RoutedMLP):
                torch.nn.init.normal_(module.gate.weight)
    return model  # type: ignore[no-any-return]
