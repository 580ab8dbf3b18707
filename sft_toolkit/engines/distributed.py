"""What the launcher really started, and whether it is what was asked for.

The stock stack falls back without a word: one process where two were asked for, DDP where ZeRO was, two ranks that each
train alone. Here the environment is checked before anything is loaded, for a section `distributed` (`check_launch`) and
for arguments built in Python (`start_problems`); `engagement.py` compares what was built with what was asked for.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Mapping
from ctypes.util import find_library
from typing import TYPE_CHECKING, cast, get_args

from sft_toolkit.args import Backend, DistributedArguments, Strategy
from sft_toolkit.engines.deepspeed_config import (
    STAGE_OF,
    build_deepspeed_config,
    check_settings_in_use,
    launcher_settings,
    read_deepspeed_config,
)
from sft_toolkit.engines.deepspeed_rules import value_of
from sft_toolkit.engines.jit_locks import locks
from sft_toolkit.engines.launch import Launch, launch_problems, read_launch
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from sft_toolkit.training_args import SFTArguments

BACKENDS = get_args(Backend)
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
    launch, strategy = read_launch(env), asked_strategy(distributed, env)
    problems = [
        *start_problems(strategy, f"distributed.strategy: {strategy}", env),
        *([] if launch is None else _count_problems(distributed, launch)),
        *_nvme_problems(distributed, env),
        *_section_problems(distributed, env),
    ]
    if problems:
        raise ConfigError(problems)


def start_problems(strategy: str, name: str, env: Mapping[str, str]) -> list[str]:
    """Why this strategy can't engage in a process that was started like this.

    Args:
        strategy: one of section `distributed`, "auto" included.
        name: how the message calls it.
    """
    launch = read_launch(env)
    return [*launch_problems(env), *([] if launch is None else _strategy_problems(strategy, name, launch, env))]


def check_section(distributed: DistributedArguments, env: Mapping[str, str]) -> None:
    """Refuse what no start could satisfy; for commands that run without the launcher of the training.

    Raises:
        ConfigError: everything in the section that contradicts itself, a DeepSpeed file, or the launcher's settings.
    """
    problems = list(_section_problems(distributed, env))
    if problems:
        raise ConfigError(problems)


def asked_by(args: SFTArguments) -> DistributedArguments:
    """What arguments built in Python ask for, as a section `distributed`."""
    if args.deepspeed is None:
        return DistributedArguments(strategy="fsdp" if args.fsdp else "auto")
    settings = read_deepspeed_config(args.deepspeed)
    named = {number: name for name, number in STAGE_OF.items()}
    strategy = named.get(value_of(settings, "zero_optimization.stage"), "auto")
    asked = DistributedArguments(strategy=cast(Strategy, strategy))
    for part in ("offload_optimizer", "offload_param"):
        device = value_of(settings, f"zero_optimization.{part}.device")
        setattr(asked, part, False if device in (None, "none") else device)
    return asked


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


def _strategy_problems(strategy: str, name: str, launch: Launch, env: Mapping[str, str]) -> Iterator[str]:
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
        yield from (lock.in_words() for lock in locks(env) if lock.is_stale)
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


def _nvme_problems(distributed: DistributedArguments, env: Mapping[str, str]) -> Iterator[str]:
    """DeepSpeed compiles its `async_io` against libaio, and finds with the model loaded that there is none."""
    settings = read_deepspeed_config(distributed.deepspeed) if distributed.deepspeed else launcher_settings(env) or {}
    for name in ("offload_optimizer", "offload_param"):
        own = getattr(distributed, name)
        if "nvme" not in (own, value_of(settings, f"zero_optimization.{name}.device")):
            continue
        if find_library("aio") is None and not env.get("LDFLAGS"):  # which DeepSpeed takes for one of another place
            yield (
                f"distributed.{name}: nvme needs libaio (apt install libaio-dev, dnf install libaio-devel; for one in "
                "a folder of its own, set CFLAGS and LDFLAGS)"
            )


def _is_true(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in ("true", "1", "yes", "y", "t", "on")


# ---- Before the model is loaded: the process group -------------------------------------------------------------------


def start_engine(args: SFTArguments, env: Mapping[str, str]) -> None:
    """Before SFTTrainer loads a model: the checks of a run from YAML for arguments built in Python, then the group.

    Raises:
        ConfigError: ZeRO without a launcher, settings that can't work or that contradict the arguments.
    """
    strategy = asked_by(args).strategy
    name = f"zero_stage: {args.zero_stage}" if args.zero_stage else f"the strategy of these arguments, {strategy},"
    problems = start_problems(strategy, name, env)
    if problems:
        raise ConfigError(problems)
    check_settings_in_use(args, env)
    refuse_missing_device(args, env)
    start_process_group(args)


def join_after_restart(on_cpu: bool, backend: str | None, seconds: int, env: Mapping[str, str]) -> None:
    """Start the process group of ranks that torchrun has started anew, before accelerate does.

    torchrun's store still holds the addresses of the ranks that ended, under the names that the new ones look up (torch
    2.13, rendezvous.py: "no need to add prefix for each attempt"), and gloo waits for them: a prefix keeps them apart.

    Args:
        seconds: after which a collective fails.
    """
    attempt, launch = env.get("TORCHELASTIC_RESTART_COUNT", "0"), read_launch(env)
    if attempt == "0" or launch is None or launch.world_size == 1 or "MASTER_PORT" not in env:
        return
    from datetime import timedelta

    from torch import distributed

    if distributed.is_initialized():
        return
    limit, agent_listens = timedelta(seconds=seconds), _is_true(env, "TORCHELASTIC_USE_AGENT_STORE")
    store = distributed.TCPStore(  # type: ignore[attr-defined]
        env["MASTER_ADDR"],
        int(env["MASTER_PORT"]),
        launch.world_size,
        is_master=launch.rank == 0 and not agent_listens,
        timeout=limit,
    )
    distributed.init_process_group(
        backend or ("gloo" if on_cpu else None),
        store=distributed.PrefixStore(f"attempt-{attempt}", store),  # type: ignore[attr-defined]
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=limit,
    )


def leave_process_group() -> None:
    """End the group of a process that is done; for the end of a program, since a later run of the process needs it.

    NCCL complains of a group that is left to the exit. The threads of gloo outlive it: `engines/ending.py`.
    """
    torch = sys.modules.get("torch")
    if torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def refuse_missing_device(args: TrainingArguments, env: Mapping[str, str]) -> None:
    """Refuse FSDP on a CPU, where accelerate would train with DDP in its place, and tensor parallelism.

    Raises:
        ConfigError: says what to take.
    """
    parallel = getattr(args, "parallelism_config", None)
    if parallel is not None and parallel.tp_enabled:
        # It needs a model that was loaded in its shards (`tp_plan`), and accelerate has it for no CPU.
        raise ConfigError(
            f"parallelism_config.tp_size: {parallel.tp_size}: layers are not split across ranks here; weights that "
            "don't fit on one device are shared by distributed.strategy: zero3 or fsdp"
        )
    if args.use_cpu and (args.fsdp or _is_true(env, "ACCELERATE_USE_FSDP")):
        raise ConfigError("fsdp: accelerate has FSDP on accelerators only; take zero3, which runs on a CPU too")


def start_process_group(args: TrainingArguments) -> None:
    """Start the process group that ZeRO-3 needs while `from_pretrained` partitions the weights.

    Without it every rank believes to be alone, loads the whole model, and fails in `train()` on the batch size
    ("2 != 1 * 1 * 1").
    """
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    # Reading world_size is what starts accelerate's own group.
    if args.world_size < 1 or not is_deepspeed_zero3_enabled():  # type: ignore[no-untyped-call]
        return
    import torch

    from sft_toolkit.engines.environment import environment_kept

    with environment_kept():
        import deepspeed

    if not deepspeed.comm.is_initialized():
        backend = torch.distributed.get_backend() if torch.distributed.is_initialized() else None
        deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False)
