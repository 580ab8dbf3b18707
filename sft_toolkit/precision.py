"""Which number format a run computes in, and why: what was asked for, else what the device is fast in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sft_toolkit.args import Precision
from sft_toolkit.errors import ConfigError


@dataclass(frozen=True)
class Device:
    """What the choice depends on: `torch.device.type`, and whether bf16 runs at full speed on it."""

    kind: str
    fast_bf16: bool = False


@dataclass(frozen=True)
class Choice:
    """The precision of a run; "auto" where the launcher chose a format that only it knows (fp8)."""

    name: Precision
    reason: str
    is_notice: bool = False


def choose(asked: Precision, bf16: bool | None, fp16: bool | None, launcher: str, device: Device) -> Choice:
    """The precision of a run.

    Args:
        asked: the argument `precision`.
        bf16, fp16: the arguments of transformers; None where not given. An explicit false is a wish too.
        launcher: `--mixed_precision` of accelerate launch ("no" where not given).
        device: where the run computes.

    Raises:
        ConfigError: two of these contradict each other.
    """
    flags: dict[Literal["bf16", "fp16"], bool | None] = {"bf16": bf16, "fp16": fp16}
    on = [name for name, flag in flags.items() if flag]
    if len(on) == 2:
        raise ConfigError("bf16: true contradicts fp16: true; keep one of them")
    if asked != "auto":
        for name, flag in flags.items():
            if flag is not None and flag != (name == asked):
                raise ConfigError(f"precision: {asked} contradicts {name}: {str(flag).lower()}; keep one of them")
        choice = Choice(asked, "asked for by precision")
    elif on:
        choice = Choice(on[0], f"asked for by {on[0]}: true")
    elif False in flags.values():
        choice = Choice("fp32", f"asked for by {' and '.join(n for n, flag in flags.items() if flag is False)}: false")
    elif launcher not in ("no", "bf16", "fp16"):
        return Choice("auto", f"left to the launcher: {launcher}")
    elif launcher != "no":
        choice = Choice("bf16" if launcher == "bf16" else "fp16", "asked for by the launcher's --mixed_precision")
    else:
        choice = _of_device(device)
    if launcher not in ("no", choice.name):
        raise ConfigError(
            f"precision {choice.name} ({choice.reason}) contradicts the launcher's --mixed_precision {launcher}; "
            "leave one of them out"
        )
    if choice.name == "fp16" and device.kind == "cpu":
        # accelerate would compute in fp32 and say fp16.
        raise ConfigError(f"precision fp16 ({choice.reason}) needs a GPU, and the run is on the CPU; take fp32")
    if choice.name != "fp32" and device.kind == "cpu":
        # Measured on 2 cores: fp32 matrix products 40 GFLOP/s, bf16 1.2.
        return Choice(choice.name, f"{choice.reason}; many CPUs are far slower in it than in fp32", is_notice=True)
    return choice


def _of_device(device: Device) -> Choice:
    if device.kind == "cpu":
        return Choice("fp32", "the run is on the CPU")
    if device.fast_bf16:
        return Choice("bf16", f"this {device.kind} device is fast in it")
    if device.kind == "mps":
        return Choice("fp32", "this mps device has no bf16")
    reason = f"this {device.kind} device is not fast in bf16; fp16 can overflow: watch for skipped steps"
    return Choice("fp16", reason, is_notice=True)


def current_device(use_cpu: bool) -> Device:
    """The device that this process would train on. Asking a GPU for its abilities starts its driver."""
    import torch
    from transformers.utils.import_utils import is_torch_bf16_gpu_available, is_torch_xla_available

    if use_cpu:
        return Device("cpu")
    if torch.cuda.is_available():
        # Older GPUs emulate bf16: supported, but slower than fp32.
        return Device("cuda", torch.cuda.is_bf16_supported(including_emulation=False))
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        return Device(accelerator.type, is_torch_bf16_gpu_available())
    return Device("xla", True) if is_torch_xla_available() else Device("cpu")
