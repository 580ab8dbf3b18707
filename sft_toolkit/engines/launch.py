"""The environment that a launcher leaves to its processes: read, and checked for contradictions. No torch."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

# torchrun, accelerate and Kubeflow set the first name of each list; the others come from MPI starters, which accelerate
# reads on CPU (accelerate.utils.environment.get_cpu_distributed_information).
RANK = ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK")
WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
LOCAL_RANK = ("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK")
LOCAL_WORLD_SIZE = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


@dataclass(frozen=True)
class Launch:
    """What the environment says about this process. Without a launcher: rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    nodes: int = 1
    launcher: str = "python"
    launched: bool = False


def read_launch(env: Mapping[str, str]) -> Launch | None:
    """What the environment says; None where it contradicts itself (`launch_problems` says how)."""
    if next(_number_problems(env), None) is not None:
        return None
    world_size = _number(env, WORLD_SIZE, 1)
    local_world_size = _number(env, LOCAL_WORLD_SIZE, world_size)
    return Launch(
        rank=_number(env, RANK, 0),
        world_size=world_size,
        local_rank=_number(env, LOCAL_RANK, 0),
        local_world_size=local_world_size,
        nodes=int(env.get("GROUP_WORLD_SIZE") or max(1, world_size // max(1, local_world_size))),
        launcher=_launcher(env),
        launched=_first(env, RANK) is not None,
    )


def launch_problems(env: Mapping[str, str]) -> Iterator[str]:
    """Why this environment would hang, or train something else than it seems to say."""
    problems = list(_number_problems(env))
    yield from problems
    if problems:
        return
    launch = read_launch(env) or Launch()
    if launch.world_size > 1 and _first(env, LOCAL_RANK) is None:
        yield "LOCAL_RANK is not set: accelerate would take every process for the only one; start with torchrun"
    # accelerate takes a LOCAL_RANK for a group of processes, however small.
    if launch.world_size > 1 or _first(env, LOCAL_RANK) == "LOCAL_RANK":
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if not env.get(name) and env.get("WORLD_SIZE"):
                yield f"{name} is not set, and WORLD_SIZE is {launch.world_size}: the processes can't find one another"
    # accelerate's simple launcher sets MASTER_ADDR exactly when it was asked for more than one process, and then
    # starts one (accelerate.utils.launch.prepare_simple_launcher_cmd_env).
    if "ACCELERATE_USE_CPU" in env and {"MASTER_ADDR", "MASTER_PORT"} <= set(env) and not launch.launched:
        yield (
            "`accelerate launch` was asked for several processes and started one, as it does with --cpu and without "
            "--multi_gpu; `accelerate launch --multi_gpu --num_processes 2` or `torchrun --nproc_per_node 2` start "
            "two, also on a CPU"
        )
    yield from _port_problems(env, launch)


def _number_problems(env: Mapping[str, str]) -> Iterator[str]:
    for names in (RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, ("GROUP_WORLD_SIZE",)):
        name = _first(env, names)
        if name is not None and not env[name].isdigit():
            yield f"{name}={env[name]} in the environment is no whole number"
            return
    rank, size, local = _first(env, RANK), _first(env, WORLD_SIZE), _first(env, LOCAL_RANK)
    if local is not None and rank is None:
        yield f"{local}={env[local]} is set and RANK is not; start with torchrun or accelerate launch, or unset it"
    elif rank is not None and size is None:
        yield f"{rank}={env[rank]} is set and WORLD_SIZE is not; start with torchrun or accelerate launch, or unset it"
    elif rank is None and size is not None and int(env[size]) > 1:
        yield f"{size}={env[size]} is set and RANK is not; start with torchrun or accelerate launch, or unset it"
    elif rank is not None and size is not None and int(env[rank]) >= int(env[size]):
        yield f"{rank}={env[rank]} is no rank of a group of {size}={env[size]}; ranks count from 0"


def _port_problems(env: Mapping[str, str], launch: Launch) -> Iterator[str]:
    """The port on which rank 0 is about to listen. torchrun's agent listens there itself, and its ranks don't."""
    address, port = env.get("MASTER_ADDR", ""), env.get("MASTER_PORT", "")
    agent_listens = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    local = address in ("localhost", "127.0.0.1", "::1", socket.gethostname())
    if launch.world_size == 1 or launch.rank != 0 or agent_listens or not local or not port.isdigit():
        return
    if _group_is_started():
        return  # a second run in this process: it is our own rank 0 that listens
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(port)))
        except (OSError, OverflowError) as error:
            yield f"MASTER_PORT={port}: rank 0 can't listen there ({error}); take another port for all ranks"


def _group_is_started() -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and torch.distributed.is_available() and torch.distributed.is_initialized()


def _launcher(env: Mapping[str, str]) -> str:
    if "ACCELERATE_MIXED_PRECISION" in env:
        return "accelerate launch"
    if "TORCHELASTIC_RUN_ID" in env:
        return "torchrun"
    return "the environment" if _first(env, WORLD_SIZE) is not None else "python"


def _first(env: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The name that is set; LOCAL_RANK=-1 is how old scripts say that there is no launcher."""
    return next((name for name in names if env.get(name) and (name != "LOCAL_RANK" or env[name] != "-1")), None)


def _number(env: Mapping[str, str], names: tuple[str, ...], default: int) -> int:
    name = _first(env, names)
    return default if name is None else int(env[name])
