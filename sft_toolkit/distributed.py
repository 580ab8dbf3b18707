"""What the launcher really started, and whether it is what was asked for.

The stock stack falls back without a word: one process where two were asked for, DDP where ZeRO was, two ranks that each
train alone. Here the environment is checked before anything is loaded (`check_launch`), and what was built is compared
with what was asked for before the first update (`engaged`, `check_engaged`).
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sft_toolkit.args import DistributedArguments
from sft_toolkit.deepspeed_config import (
    STAGE_OF,
    build_deepspeed_config,
    launcher_settings,
    read_deepspeed_config,
)
from sft_toolkit.deepspeed_rules import value_of
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.launch import Launch, launch_problems, read_launch

if TYPE_CHECKING:
    from transformers import Trainer, TrainingArguments

BACKENDS = ["auto", "nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"]
LAUNCHERS = (
    "`torchrun --nproc_per_node 2 train.py ...` starts two on any machine, "
    "`accelerate launch --multi_gpu --num_processes 2 train.py ...` too, also on a CPU"
)


# ---- Before anything is loaded: the environment ----------------------------------------------------------------------


def check_launch(distributed: DistributedArguments, env: Mapping[str, str]) -> None:
    """Refuse a start that would not be what was asked for. Reads the environment and small files; imports no torch.

    Raises:
        ConfigError: everything that is wrong with the start, each with a way out.
    """
    problems = list(launch_problems(env))
    launch = read_launch(env)
    if launch is not None:
        problems += _count_problems(distributed, launch)
        problems += _strategy_problems(distributed, launch, env)
    problems += _section_problems(distributed, env)
    if problems:
        raise ConfigError(problems)


def check_section(distributed: DistributedArguments, env: Mapping[str, str]) -> None:
    """Refuse what no start could satisfy; for commands that run without the launcher of the training.

    Raises:
        ConfigError: everything in the section that contradicts itself, a DeepSpeed file, or the launcher's settings.
    """
    problems = list(_section_problems(distributed, env))
    if problems:
        raise ConfigError(problems)


def asked_strategy(distributed: DistributedArguments, env: Mapping[str, str]) -> str:
    """The strategy that must engage, or "auto"; a DeepSpeed JSON and a launcher ask for theirs."""
    if distributed.strategy != "auto":
        return distributed.strategy
    settings = read_deepspeed_config(distributed.deepspeed) if distributed.deepspeed else launcher_settings(env)
    if settings is not None:
        stage = value_of(settings, "zero_optimization.stage")
        return f"zero{stage}" if stage in STAGE_OF.values() else "auto"
    if _is_true(env, "ACCELERATE_USE_DEEPSPEED"):
        return "zero2"  # what a bare `--use_deepspeed` means to accelerate
    return "fsdp" if _is_true(env, "ACCELERATE_USE_FSDP") else "auto"


def _count_problems(distributed: DistributedArguments, launch: Launch) -> Iterator[str]:
    asked, started = distributed.num_processes, launch.world_size
    if asked is not None and asked != started:
        hint = f" ({LAUNCHERS})" if started < asked else ""
        yield f"distributed.num_processes: {asked} asked for, {started} started by {launch.launcher}{hint}"


def _strategy_problems(distributed: DistributedArguments, launch: Launch, env: Mapping[str, str]) -> Iterator[str]:
    strategy = asked_strategy(distributed, env)
    name = f"distributed.strategy: {strategy}"
    if strategy == "none" and launch.world_size > 1:
        yield f"{name} is one process, and {launch.launcher} started {launch.world_size}; take ddp, or start one"
    if strategy not in ("auto", "none") and not launch.launched:
        yield f"{name} needs a launcher, and this process was started without one: {LAUNCHERS}"
    if strategy in STAGE_OF:
        if importlib.util.find_spec("deepspeed") is None:
            yield f"{name} needs DeepSpeed: pip install 'sft-toolkit[deepspeed]'"
        if _is_true(env, "ACCELERATE_USE_CPU"):
            yield (
                f"{name}: accelerate ignores DeepSpeed under `--cpu` (ACCELERATE_USE_CPU); start with `accelerate "
                f"launch --use_deepspeed` or torchrun, and the CPU is taken by itself where there is nothing faster"
            )
    if strategy == "fsdp" and _is_true(env, "ACCELERATE_USE_CPU"):
        yield f"{name}: accelerate has FSDP on accelerators only; take zero3, which runs on a CPU too"
    started_as = "deepspeed" if _is_true(env, "ACCELERATE_USE_DEEPSPEED") else "auto"
    started_as = "fsdp" if _is_true(env, "ACCELERATE_USE_FSDP") else started_as
    wanted_as = "deepspeed" if strategy in STAGE_OF else strategy
    if "auto" not in (started_as, wanted_as) and started_as != wanted_as:
        yield f"{name}, but `accelerate launch` was told to use {started_as}; change one of the two"


def _section_problems(distributed: DistributedArguments, env: Mapping[str, str]) -> Iterator[str]:
    """What no start could satisfy, first of all DeepSpeed settings that come from two places or say two things."""
    if distributed.backend not in BACKENDS:
        hint = did_you_mean(distributed.backend, BACKENDS)
        yield f"distributed.backend: '{distributed.backend}' is none of {', '.join(BACKENDS)}{hint}"
    strategy, own = distributed.strategy, distributed.deepspeed
    launcher = launcher_settings(env)
    if own is not None and launcher is not None:
        file = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "the accelerate configuration")
        yield (
            f"distributed.deepspeed: {own}, and the launcher brings DeepSpeed settings of its own ({file}); "
            f"keep one of the two (`accelerate launch --use_deepspeed` without a file leaves the choice to the run)"
        )
    settings = read_deepspeed_config(own) if own is not None else launcher
    offloads = {"offload_optimizer": distributed.offload_optimizer, "offload_param": distributed.offload_param}
    if settings is not None:
        stage = value_of(settings, "zero_optimization.stage")
        if strategy in STAGE_OF and stage != STAGE_OF[strategy]:
            yield f"distributed.strategy: {strategy}, but {own or 'the launcher'} says zero_optimization.stage: {stage}"
        for name, asked in offloads.items():
            device = value_of(settings, f"zero_optimization.{name}.device") or "none"
            if asked and asked != device:
                yield f"distributed.{name}: {asked}, but {own or 'the launcher'} says device: {device}"
    elif strategy in STAGE_OF:
        try:
            build_deepspeed_config(STAGE_OF[strategy], **offloads, nvme_path=distributed.nvme_path)
        except ConfigError as error:
            yield from (f"distributed.{problem}" for problem in error.problems)
    elif any(offloads.values()):
        yield f"distributed.offload_optimizer, offload_param: need strategy zero1, zero2 or zero3, and it is {strategy}"
    if own is not None and strategy not in ("auto", *STAGE_OF):
        yield f"distributed.deepspeed: {own} and distributed.strategy: {strategy} exclude one another"


def _is_true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in ("true", "1", "yes", "y", "t", "on")


# ---- Before the model is loaded: the process group -------------------------------------------------------------------


def start_process_group(args: TrainingArguments) -> None:
    """Start the process group that ZeRO-3 needs while `from_pretrained` partitions the weights.

    Without it every rank believes to be alone, loads the whole model, and fails in `train()` on the batch size.
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    # Reading world_size is what starts accelerate's own group.
    if args.world_size < 1 or not is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return
    import deepspeed
    import torch

    if not deepspeed.comm.is_initialized():
        backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)


# ---- Before the first update: what was built -------------------------------------------------------------------------


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


def engaged(trainer: Trainer, env: Mapping[str, str] | None = None) -> Engagement:
    """What really runs; call it once `trainer.model_wrapped` is prepared, from `on_train_begin` on."""
    from sft_toolkit.engines import count_parameters, offload_of, precision_of, strategy_of

    launch = read_launch(os.environ if env is None else env) or Launch()
    args, model = trainer.args, trainer.model_wrapped
    micro = args.per_device_train_batch_size * max(1, args.n_gpu)
    total, trainable = count_parameters(model)
    return Engagement(
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
    )


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
            f"parameters  {e.parameters_total:,}, {e.parameters_trainable:,} trainable ({share:.2f} %)",
        ]
    )
