"""Out of memory, in words: in which phase, predicted beside measured, and the keys of this run that help most."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

from sft_toolkit.errors import OutOfMemoryError
from sft_toolkit.phases import phase_of

if TYPE_CHECKING:
    from sft_toolkit.config import RunConfig
    from sft_toolkit.trainer import SFTTrainer

# Neither is an error class of its own: the CPU allocator, the CUDA runtime and its libraries raise a RuntimeError.
_SIGNS = (
    "defaultcpuallocator: can't allocate",
    "defaultcpuallocator: not enough memory",
    "out of memory",
    "cannot allocate memory",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)
IN_STEP = {
    "data": "fetching the micro-batches of an update",
    "forward": "computing the forward",
    "backward": "computing the backward",
    "optimizer": "making the optimizer step",
}
LOADING, PREPARING, SAVING_AT_END = "loading the model", "preparing the data", "saving the model"
SHOWN_KEYS = 3


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this, or what it was raised from, says that memory could not be had; of a device or of the host."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, MemoryError) or (isinstance(seen, OSError) and seen.errno == errno.ENOMEM):
            return True
        if isinstance(seen, RuntimeError) and any(sign in str(seen).lower() for sign in _SIGNS):
            return True
        seen = seen.__cause__
    return False


def before_training(error: BaseException) -> OutOfMemoryError:
    """What to say where there is no trainer yet."""
    during = phase_of(error) or "starting"
    ways = {
        LOADING: [
            "model.quantize: nf4, with section lora: the frozen base takes a quarter of its 16 bits",
            "model.dtype: bfloat16, where weights are loaded as float32",
            "distributed.strategy: zero3, with more processes: each holds its share alone",
        ],
        PREPARING: [
            "data.streaming: true: rows are tokenised while training",
            "max_rows of a source: fewer rows",
        ],
    }.get(during, [])
    return OutOfMemoryError(_message(error, during, "", {}, ways))


def while_training(
    error: BaseException, trainer: SFTTrainer, config: RunConfig, watched: str, predicted: dict[str, int]
) -> OutOfMemoryError:
    """What to say of a run.

    Args:
        watched: what the events tell of the phase, where no part of an update was going on.
        predicted: bytes on a device by part, as `plan` has them; empty where nobody knows.
    """
    outer, part = phase_of(error), trainer.token_meter.times.phase
    during = outer if outer not in (None, "training") else IN_STEP.get(part or "", watched)
    assert during is not None
    ways = list(islice(_ways(during, trainer, config, predicted), SHOWN_KEYS))
    return OutOfMemoryError(_message(error, during, f", behind step {trainer.state.global_step}", predicted, ways))


def _message(error: BaseException, during: str, where: str, predicted: dict[str, int], ways: list[str]) -> str:
    said = str(error).strip().splitlines()
    lines = [f"out of memory while {during}{where}: {type(error).__name__}{f': {said[0]}' if said else ''}"]
    if predicted:
        from sft_toolkit.planning.words import in_gib

        largest = ", ".join(f"{part} {in_gib(predicted[part])}" for part in _by_size(predicted)[:3])
        lines.append(f"  predicted  {in_gib(sum(predicted.values()))} on each device ({largest}, ...)")
    lines.append(f"  measured   {'; '.join(_measured())}")
    if ways:
        lines += ["What helps most, the first first:", *(f"  {way}" for way in ways)]
    return "\n".join([*lines, "`sft-toolkit plan` shows the memory of other settings; checkpoints so far are whole."])


def _by_size(predicted: dict[str, int]) -> list[str]:
    return sorted(predicted, key=lambda part: -predicted[part])


def _measured() -> Iterator[str]:
    """This process, the limit it runs under, and what the machine has left; the device where one is in use."""
    import resource

    import torch

    from sft_toolkit.callbacks.memory import MIB, host_memory
    from sft_toolkit.planning.words import in_gib

    if torch.cuda.is_available() and torch.cuda.memory_allocated():
        free, total = torch.cuda.mem_get_info()
        peak = torch.cuda.max_memory_allocated()
        yield f"{in_gib(peak)} at most on this device, {in_gib(free)} of its {in_gib(total)} free"
    yield f"{in_gib(int(host_memory()['memory_host_peak_mib'] * MIB))} of host memory at most in this process"
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        yield f"it may address {in_gib(limit)} (ulimit -v)"
    pages = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_AVPHYS_PAGES")
    whole, left = (count * os.sysconf("SC_PAGE_SIZE") for count in pages)
    yield f"{in_gib(left)} of this machine's {in_gib(whole)} unused"


def _ways(during: str, trainer: SFTTrainer, config: RunConfig, predicted: dict[str, int]) -> Iterator[str]:
    """Keys with their values, the most likely first."""
    args: Any = trainer.args
    if during == "evaluating":
        yield from _for_evaluation(args, config)
    elif during in ("saving a checkpoint", SAVING_AT_END):
        yield from _for_saving(args, config, at_end=during == SAVING_AT_END)
    elif during == IN_STEP["optimizer"] or _by_size(predicted)[:1] in (["weights"], ["gradients"], ["optimizer"]):
        yield from _for_state(args, config)
        yield from _for_activations(args)
    else:
        yield from _for_activations(args)
        yield from _for_state(args, config)


def _for_activations(args: Any) -> Iterator[str]:
    micro, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    if micro > 1:
        smaller = _largest_part(micro)
        same = (
            "the accumulation follows training.global_batch_size"
            if args.global_batch_size
            else f"with training.gradient_accumulation_steps: {accumulation * micro // smaller}"
        )
        yield f"training.per_device_train_batch_size: {smaller} instead of {micro}; {same}, and losses stay the same"
    if not args.activation_checkpointing:
        yield "training.activation_checkpointing: true; the forward is computed twice"
    yield f"data.max_length: less than {args.max_length}"


def _for_state(args: Any, config: RunConfig) -> Iterator[str]:
    if config.lora is None:
        yield "section lora: an adapter needs gradients and optimizer state for itself alone"
    elif config.model.quantize is None and args.device.type == "cuda":
        yield "model.quantize: nf4; the frozen base takes a quarter of its 16 bits"
    if args.world_size > 1 and not args.deepspeed:
        yield "distributed.strategy: zero2 or zero3; each process keeps its share of the state alone"
    elif args.device.type == "cuda" and not config.distributed.offload_optimizer:
        yield "distributed.strategy: zero2 with distributed.offload_optimizer: cpu"
    if "adam" in str(args.optim) and config.lora is None:
        yield "training.optim: adafactor; next to no state, other updates"


def _for_evaluation(args: Any, config: RunConfig) -> Iterator[str]:
    if args.per_device_eval_batch_size > 1:
        smaller = _largest_part(args.per_device_eval_batch_size)
        yield (
            f"training.per_device_eval_batch_size: {smaller} instead of {args.per_device_eval_batch_size}; "
            "the loss stays the same"
        )
    if config.evaluation.generate:
        yield f"evaluation.batch_size: less than {config.evaluation.batch_size}, the rows that are answered at once"
    yield f"data.max_length: less than {args.max_length}"


def _for_saving(args: Any, config: RunConfig, at_end: bool) -> Iterator[str]:
    if at_end and config.lora is not None and config.lora.save_merged:
        yield "lora.save_merged: false; `sft-toolkit merge` does it afterwards"
    if args.async_save:
        yield "training.async_save: false; no copy in host memory"
    if not at_end:
        yield "training.save_only_model: true; without optimizer state, so that a resume is not exact"
    if config.lora is None:
        yield "section lora: only the adapter is saved"


def _largest_part(size: int) -> int:
    """The largest proper divisor."""
    return max(part for part in range(1, size) if size % part == 0)
