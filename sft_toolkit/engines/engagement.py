"""What was built, compared with what was asked for, before the first update.

The stock stack falls back without a word: DDP where ZeRO was asked for, two ranks that each train alone. Here the
prepared objects are read, not the settings that should have made them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sft_toolkit.args import DistributedArguments
from sft_toolkit.engines.distributed import asked_strategy
from sft_toolkit.engines.launch import Launch, read_launch
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import Trainer


@dataclass(frozen=True)
class Engagement:
    """What really runs, read from the prepared objects. Batches count rows (packed: bins), parameters scalars."""

    strategy: str  # none, ddp, zero1, zero2, zero3, fsdp, or dp: one process that drives several GPUs
    world_size: int
    local_world_size: int
    nodes: int
    device: str
    precision: str
    micro_batch: int
    accumulation: int
    global_batch: int
    parameters_total: int
    parameters_trainable: int
    offload: dict[str, str] = field(default_factory=dict)  # {"optimizer": "cpu"}; empty without offload
    parameters_on_rank: int = 0
    predicted_memory: dict[str, int] = field(default_factory=dict)  # bytes on a device by part; planning/memory.py


def engaged(trainer: Trainer, env: Mapping[str, str] | None = None) -> Engagement:
    """What really runs; call it once `trainer.model_wrapped` is prepared, from `on_train_begin` on."""
    from sft_toolkit.engines.wrapped import count_parameters, held_parameters, offload_of, precision_of, strategy_of

    launch = read_launch(os.environ if env is None else env) or Launch()
    args, model = trainer.args, trainer.model_wrapped
    micro = args.per_device_train_batch_size * max(1, args.n_gpu)
    total, trainable = count_parameters(model)
    found = Engagement(
        strategy=strategy_of(model),
        world_size=args.world_size,
        local_world_size=min(launch.local_world_size, args.world_size),
        nodes=launch.nodes,
        device=str(trainer.accelerator.device.type),
        precision=precision_of(trainer),
        micro_batch=micro,
        accumulation=args.gradient_accumulation_steps,
        global_batch=micro * args.gradient_accumulation_steps * args.world_size,
        parameters_total=total,
        parameters_trainable=trainable,
        offload=offload_of(model),
        parameters_on_rank=held_parameters(model),
    )
    return replace(found, predicted_memory=_predicted(found, trainer))


def _predicted(found: Engagement, trainer: Trainer) -> dict[str, int]:
    """What `plan` says of this run; nothing where the arguments don't say how long rows are."""
    if not hasattr(trainer.args, "max_length") or trainer.model is None or found.strategy == "dp":
        return {}
    from sft_toolkit.planning.memory import memory_of
    from sft_toolkit.planning.setup import setup_of
    from sft_toolkit.planning.shape import shape_of

    shape = shape_of(trainer.model)
    setup = setup_of(
        trainer.args,
        shape,
        on_cpu=found.device == "cpu",
        precision=found.precision,
        strategy=found.strategy,
        devices=found.world_size,
        devices_per_node=found.local_world_size,
        offload_optimizer="optimizer" in found.offload,
        offload_param="param" in found.offload,
    )
    return memory_of(shape, setup).device


def check_engaged(asked: DistributedArguments, engaged: Engagement, env: Mapping[str, str] | None = None) -> None:
    """Refuse to train with something else than was asked for.

    Raises:
        ConfigError: strategy, offload or number of processes differ.
    """
    env = os.environ if env is None else env
    problems, strategy, launch = [], asked_strategy(asked, env), read_launch(env)
    if launch is not None and launch.world_size != engaged.world_size:
        problems.append(
            f"{launch.launcher} started {launch.world_size} processes, but each trains in a group of "
            f"{engaged.world_size}; on a machine without an accelerator set training.use_cpu: true"
        )
    elif asked.num_processes not in (None, engaged.world_size):
        problems.append(f"distributed.num_processes: {asked.num_processes} asked for, {engaged.world_size} train")
    if strategy not in ("auto", engaged.strategy):
        hint = "; accelerate has FSDP on accelerators only" if (strategy, engaged.device) == ("fsdp", "cpu") else ""
        problems.append(f"distributed.strategy: {strategy} asked for, {engaged.strategy} engaged{hint}")
    for part, device in (("optimizer", asked.offload_optimizer), ("param", asked.offload_param)):
        if device and engaged.offload.get(part) != device:
            found = engaged.offload.get(part, "none")
            problems.append(f"distributed.offload_{part}: {device} asked for, {found} engaged")
    if problems:
        raise ConfigError(problems)


def describe(engagement: Engagement) -> str:
    """The start-up block, for rank 0."""
    e = engagement
    processes = (
        f"{e.world_size} process{'es' if e.world_size > 1 else ''} on {e.nodes} node{'s' if e.nodes > 1 else ''}"
    )
    offload = "".join(f", {part} on {device}" for part, device in e.offload.items())
    share = 100 * e.parameters_trainable / max(1, e.parameters_total)
    return "\n".join(
        [
            f"processes   {processes}, device {e.device}",
            f"strategy    {e.strategy}{offload}",
            f"precision   {e.precision}",
            f"batch       {e.micro_batch} x {e.accumulation} accumulated x {e.world_size} ranks = {e.global_batch}",
            f"parameters  {e.parameters_total:,}, {e.parameters_trainable:,} trainable ({share:.2f} %)"
            + (f", {e.parameters_on_rank:,} on this rank" if e.parameters_on_rank else ""),
            *_memory_line(e.predicted_memory),
        ]
    )


def _memory_line(parts: dict[str, int]) -> list[str]:
    if not parts:
        return []
    from sft_toolkit.planning.words import in_gib

    largest = sorted(parts, key=lambda part: -parts[part])[:3]
    shown = ", ".join(f"{part} {in_gib(parts[part])}" for part in largest)
    return [f"memory      {in_gib(sum(parts.values()))} predicted on each device ({shown}, ...)"]
