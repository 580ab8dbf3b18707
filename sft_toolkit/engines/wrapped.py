"""What a prepared model is wrapped in: the strategy that truly engaged, its offload, precision and size.

Read from the objects and not from the settings that should have made them. Classes are known by name, so that neither
DeepSpeed nor FSDP is imported where it does not run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn
    from transformers import Trainer

_SHORT = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}


def strategy_of(model: nn.Module) -> str:
    """`none`, `ddp`, `zero1`, `zero2`, `zero3`, `fsdp`, or `dp` (one process that drives several GPUs)."""
    names = {base.__name__ for base in type(_uncompiled(model)).__mro__}
    if "DeepSpeedEngine" in names:
        stage = _engine(model).zero_optimization_stage()
        return f"zero{int(stage)}" if int(stage) else "ddp"  # stage 0 is DeepSpeed's own data parallelism
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return "fsdp"
    if "DistributedDataParallel" in names:
        return "ddp"
    return "dp" if "DataParallel" in names else "none"


def offload_of(model: nn.Module) -> dict[str, str]:
    """`{"optimizer": "cpu", "param": "nvme"}`, with only what is offloaded."""
    if not strategy_of(model).startswith("zero"):
        return {}
    engine = _engine(model)
    parts = {"optimizer": engine.zero_offload_optimizer(), "param": engine.zero_offload_param()}
    devices = {part: str(getattr(entry.device, "value", entry.device)) for part, entry in parts.items() if entry}
    return {part: device for part, device in devices.items() if device != "none"}


def precision_of(trainer: Trainer) -> str:
    """`fp32`, or `bf16` and `fp16` mixed with fp32 weights; `pure bf16` where the trained weights are 16 bits wide."""
    model = trainer.model_wrapped
    if strategy_of(model).startswith("zero"):
        engine = _engine(model)
        return "bf16" if engine.bfloat16_enabled() else "fp16" if engine.fp16_enabled() else "fp32"
    trained = {str(parameter.dtype) for parameter in model.parameters() if parameter.requires_grad}
    if trained and "torch.float32" not in trained:
        return "pure " + " and ".join(sorted(_SHORT.get(dtype, dtype) for dtype in trained))
    mixed = trainer.accelerator.mixed_precision
    return "fp32" if mixed == "no" else str(mixed)


def count_parameters(model: nn.Module) -> tuple[int, int]:
    """(all, trainable) scalars of the whole model, also where each rank holds a part."""
    total = trainable = 0
    for parameter in model.parameters():
        count = int(getattr(parameter, "ds_numel", parameter.numel()))  # ZeRO-3 leaves an empty tensor in its place
        total += count
        trainable += count if parameter.requires_grad else 0
    return total, trainable


def held_parameters(model: nn.Module) -> int:
    """Scalars of the model's weights that lie on this rank: all of them, or its share under ZeRO-3 and FSDP."""
    held = 0
    for parameter in model.parameters():
        share: Any = getattr(parameter, "ds_tensor", None)  # ZeRO-3
        if share is None:
            share = parameter.to_local() if hasattr(parameter, "to_local") else parameter  # FSDP2: a DTensor
        held += int(share.numel())
    return held


def _uncompiled(model: nn.Module) -> nn.Module:
    inner: nn.Module = getattr(model, "_orig_mod", model)
    return inner


def _engine(model: nn.Module) -> Any:
    return _uncompiled(model)
