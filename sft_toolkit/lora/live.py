"""A model that goes on being used: can its adapter be merged on a copy, and that copy."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from peft import PeftModel
from torch import nn

from sft_toolkit.errors import CheckpointError


def why_not_live(model: PeftModel) -> str | None:
    """Why the adapter can't be merged on a copy of this model in memory, but only from its files; None where it can."""
    kinds = {type(parameter).__name__ for parameter in model.parameters()}
    if kinds & {"DTensor", "FlatParameter"} or any(hasattr(p, "ds_id") for p in model.parameters()):
        return "spread over processes"
    return "quantised" if getattr(model.get_base_model(), "hf_quantizer", None) is not None else None


def refuse_partial_weights(model: PeftModel) -> None:
    why = why_not_live(model)
    if why:
        raise CheckpointError(
            f"the model's weights are {why} and can't be merged in place; the adapter is saved, merge it with "
            "`sft-toolkit merge --adapter DIR --output DIR`"
        )


def copy_in_fp32(model: PeftModel) -> PeftModel:
    """An independent copy on the CPU; tied weights stay tied, and the model itself is not touched."""
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        data = parameter.detach().to("cpu", torch.float32, copy=True)
        memo[id(parameter)] = nn.Parameter(data, requires_grad=False)
    for buffer in model.buffers():
        memo[id(buffer)] = buffer.detach().to("cpu", copy=True)
    # Accelerate puts its autocast wrapper on the instance; the copy uses the method of its class.
    wrapped = [module for module in model.modules() if "forward" in vars(module)]
    for module in wrapped:
        memo |= {id(vars(module)[name]): name for name in ("forward", "_original_forward") if name in vars(module)}
    copy = deepcopy(model, memo)
    for module in copy.modules():
        for name in ("forward", "_original_forward"):
            vars(module).pop(name, None)
    return copy
