"""Model FLOPs utilisation: what a training computes per second, as a share of what the device can do.

After Chowdhery et al. 2022 (PaLM, arXiv:2204.02311, appendix B): only what the model itself needs counts, not what
activation checkpointing computes twice. Two things are counted more closely than there: weights that are frozen need no
gradient of their own, and the head is applied to supervised tokens alone. The products of attention between tokens are
left out, so that the figure is too low rather than too high.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sft_toolkit.model.modules import without_adapter

# Dense FLOP/s in bf16 and fp16 with fp32 accumulation, from the makers' data sheets. The first name whose words
# are in the device's own name holds, so the longer one comes first.
PEAKS = {
    "B200": 2250e12,
    "GH200": 989e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H20": 148e12,
    "A100": 312e12,
    "A800": 312e12,
    "A40": 150e12,
    "A30": 165e12,
    "A10": 125e12,
    "A10G": 70e12,
    "L40S": 362e12,
    "L40": 181e12,
    "L4": 121e12,
    "RTX 4090": 165e12,
    "RTX 3090": 71e12,
    "MI300X": 1307e12,
    "MI250X": 383e12,
}


def peak_flops(device_name: str, dtype: torch.dtype) -> float | None:
    """Peak of a device for matrix products in this dtype; None where it is not known, as on a CPU or in fp32.

    >>> peak_flops("NVIDIA H100 80GB HBM3", torch.bfloat16)
    989000000000000.0
    """
    if dtype not in (torch.bfloat16, torch.float16):
        return None
    words = set(device_name.replace("-", " ").split())
    return next((peak for name, peak in PEAKS.items() if words.issuperset(name.split())), None)


def flops_per_token(model: nn.Module) -> tuple[float, float]:
    """(each token below the head, each supervised token in the head): forward and backward of the weights' products.

    A weight of a matrix product takes 2 FLOPs in the forward, 2 in the backward for what is below it, and 2 more where
    it is trained. Of the experts of a mixture, those that a token goes to.
    """
    base: Any = without_adapter(model)
    table, head = base.get_input_embeddings(), base.get_output_embeddings()
    in_head = {id(parameter) for parameter in head.parameters()} if head is not None else set()
    looked_up = {id(parameter) for parameter in table.parameters()} - in_head
    share = _share_of_experts(getattr(base, "config", None))
    below = at_head = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in looked_up:
            continue
        count = int(getattr(parameter, "ds_numel", parameter.numel())) * (6 if parameter.requires_grad else 4)
        if id(parameter) in in_head:
            at_head += count
        else:
            below += count * (share if ".experts." in name else 1.0)
    return below, at_head


def _share_of_experts(config: Any) -> float:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    used = getattr(text, "num_experts_per_tok", None)
    sizes = (getattr(text, name, None) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    total = next((size for size in sizes if size), None)
    return used / total if used and total else 1.0


def utilisation_of(model: nn.Module, device: torch.device, dtype: torch.dtype) -> Callable[..., float] | None:
    """(tokens, supervised tokens, seconds) of one device -> share of its peak; None where the peak is not known.

    Args:
        dtype: in which matrix products are computed.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
    peak = peak_flops(name, dtype)
    if peak is None or not hasattr(without_adapter(model), "get_output_embeddings"):
        return None
    below, at_head = flops_per_token(model)

    def utilisation(tokens: float, supervised: float, seconds: float) -> float:
        return (tokens * below + supervised * at_head) / (seconds * peak)

    return utilisation
