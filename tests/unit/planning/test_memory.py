"""Predicted bytes: against the ZeRO paper, against what autograd keeps, and against a measured training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import measure
from sft_toolkit.planning.memory import Setup, activations, memory_of
from sft_toolkit.planning.shape import ModelShape, shape_of

SIZES: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
PAPER = ModelShape(7_500_000_000, 7_500_000_000, layers=1, hidden=1, intermediate=1, kv_width=1, vocabulary=1)


@pytest.mark.parametrize(("strategy", "gigabytes"), [("ddp", 120), ("zero1", 31.4), ("zero2", 16.6), ("zero3", 1.88)])
def test_model_states_are_those_of_the_zero_paper(strategy: str, gigabytes: float) -> None:
    """Figure 1 of Rajbhandari et al. 2020: 7.5B parameters, 64 devices, mixed precision, Adam."""
    device = memory_of(PAPER, Setup(strategy=strategy, devices=64, devices_per_node=8)).device
    states = device["weights"] + device["gradients"] + device["optimizer"]
    assert states / 1e9 == pytest.approx(gigabytes, rel=0.003)


def test_offload_moves_states_to_the_host() -> None:
    setup = Setup(strategy="zero3", devices=8, devices_per_node=8, offload_optimizer=True, offload_param=True)
    memory = memory_of(PAPER, setup)
    assert [memory.device[part] for part in ("weights", "gradients", "optimizer")] == [0, 0, 0]
    assert memory.host["optimizer"] + memory.host["gradients"] == 16 * PAPER.total
    assert memory.host["weights"] == 2 * PAPER.total


def test_an_adapter_trains_in_fp32_on_a_narrow_base() -> None:
    shape = ModelShape(1010, 10, layers=1, hidden=1, intermediate=1, kv_width=1, vocabulary=1)
    device = memory_of(shape, Setup(strategy="none")).device
    assert [device[part] for part in ("weights", "gradients", "optimizer")] == [2 * 1000 + 4 * 10, 4 * 10, 8 * 10]


def kept_by_autograd(layers: int, tokens: int, autocast: bool, dtype: torch.dtype) -> int:
    """Bytes that the forward of a Llama keeps for its backward, weights and their 16-bit copies left out."""
    built: Any = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers))
    model = built.to(dtype).train()
    sizes = {p.numel() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() not in sizes:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=autocast),
    ):
        out = model.model(input_ids=torch.zeros(1, tokens, dtype=torch.long), use_cache=False)
    return sum(kept.values()) if out is not None else 0  # the graph lives until here


@pytest.mark.parametrize("kind", ["fp32", "autocast", "pure"])
def test_a_layer_keeps_what_is_predicted(kind: str) -> None:
    tokens, (few, many) = 320, (2, 4)
    dtype = torch.bfloat16 if kind == "pure" else torch.float32
    found = [kept_by_autograd(layers, tokens, kind == "autocast", dtype) for layers in (few, many)]
    shape = shape_of(LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2)))
    setup = Setup(
        strategy="zero2" if kind == "pure" else "none",
        narrow=kind != "fp32",
        max_length=tokens,
        checkpointing=False,
    )
    predicted = [activations(ModelShape(**{**vars(shape), "layers": layers}), setup) for layers in (few, many)]
    assert predicted[1] - predicted[0] == pytest.approx(found[1] - found[0], rel=0.02)


@pytest.mark.slow
def test_a_training_peaks_where_it_was_predicted() -> None:
    found = measure({})
    assert found["predicted"] > 500 * 2**20
    assert found["predicted"] == pytest.approx(found["measured"], rel=0.2)
