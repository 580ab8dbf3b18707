"""What a launcher leaves to its processes, and the ready files for accelerate."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from sft_toolkit.args import DistributedArguments
from sft_toolkit.engines.distributed import check_launch
from sft_toolkit.engines.launch import Launch, read_launch
from sft_toolkit.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent.parent
TORCHRUN = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
# What `accelerate launch --cpu --num_processes 2` leaves to the one process that it starts.
ACCELERATE_CPU = {
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_USE_CPU": "True",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
STARTS_TWO = (
    " (`torchrun --nproc_per_node 2 train.py ...` starts two on any machine, "
    "`accelerate launch --multi_gpu --num_processes 2 train.py ...` too, also on a CPU)"
)


def problems_of(asked: DistributedArguments, env: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_launch(asked, env)
    return caught.value.problems


def test_reading_what_a_launcher_started() -> None:
    assert read_launch({}) == Launch(0, 1, 0, 1, 1, "python", False)
    assert read_launch(TORCHRUN) == Launch(0, 2, 0, 2, 1, "torchrun", True)
    two_nodes = {**TORCHRUN, "RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "GROUP_WORLD_SIZE": "2"}
    assert read_launch(two_nodes) == Launch(3, 4, 1, 2, 2, "torchrun", True)
    mpi = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    assert read_launch(mpi) == Launch(2, 4, 0, 2, 2, "the environment", True)


@pytest.mark.parametrize(
    "env", [{}, {"LOCAL_RANK": "-1"}, TORCHRUN, {**ACCELERATE_CPU, **TORCHRUN}, {"ACCELERATE_USE_CPU": "False"}]
)
def test_a_sound_start_passes(env: dict[str, str]) -> None:
    check_launch(DistributedArguments(), env)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "RANK=0 is set and WORLD_SIZE is not; start with torchrun or accelerate launch, or unset it"),
        (
            {"WORLD_SIZE": "2"},
            "WORLD_SIZE=2 is set and RANK is not; start with torchrun or accelerate launch, or unset it",
        ),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2 is no rank of a group of WORLD_SIZE=2; ranks count from 0"),
        (
            {"LOCAL_RANK": "0"},
            "LOCAL_RANK=0 is set and RANK is not; start with torchrun or accelerate launch, or unset it",
        ),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "RANK=1 is no rank of a group of WORLD_SIZE=1; ranks count from 0"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one in the environment is no whole number"),
        (
            {key: value for key, value in TORCHRUN.items() if key != "LOCAL_RANK"},
            "LOCAL_RANK is not set: accelerate would take every process for the only one; start with torchrun",
        ),
        (
            {key: value for key, value in TORCHRUN.items() if key != "MASTER_PORT"},
            "MASTER_PORT is not set, and WORLD_SIZE is 2: the processes can't find one another",
        ),
        (
            ACCELERATE_CPU,
            "`accelerate launch` was asked for several processes and started one, as it does with --cpu and without "
            "--multi_gpu; `accelerate launch --multi_gpu --num_processes 2` or `torchrun --nproc_per_node 2` start "
            "two, also on a CPU",
        ),
    ],
)
def test_an_environment_that_would_hang_or_train_alone(env: dict[str, str], message: str) -> None:
    assert problems_of(DistributedArguments(), env) == [message]


def test_a_busy_port_is_found_before_the_process_group() -> None:
    by_hand = {key: value for key, value in TORCHRUN.items() if not key.startswith("TORCHELASTIC")}
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        (problem,) = problems_of(DistributedArguments(), {**by_hand, "MASTER_PORT": port})
        check_launch(DistributedArguments(), {**by_hand, "MASTER_PORT": port, "RANK": "1"})
        check_launch(DistributedArguments(), {**TORCHRUN, "MASTER_PORT": port})
    assert problem.startswith(f"MASTER_PORT={port}: rank 0 can't listen there (")
    assert problem.endswith("); take another port for all ranks")
    check_launch(DistributedArguments(), {**by_hand, "MASTER_PORT": port})


def test_more_or_fewer_processes_than_asked_for() -> None:
    assert problems_of(DistributedArguments(num_processes=2), {}) == [
        f"distributed.num_processes: 2 asked for, 1 started by python{STARTS_TWO}"
    ]
    assert problems_of(DistributedArguments(num_processes=1), TORCHRUN) == [
        "distributed.num_processes: 1 asked for, 2 started by torchrun"
    ]
    check_launch(DistributedArguments(num_processes=2), TORCHRUN)


def test_checking_a_start_imports_no_torch() -> None:
    code = (
        "import sys; from sft_toolkit.args import DistributedArguments as D\n"
        "from sft_toolkit.engines.distributed import check_launch\n"
        "check_launch(D(), {})\n"
        "print([name for name in ('torch', 'transformers', 'deepspeed', 'accelerate') if name in sys.modules])"
    )
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert finished.stdout == "[]\n"


def test_the_accelerate_files_are_read_by_accelerate() -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    kinds = {}
    for path in sorted((ROOT / "configs" / "accelerate").glob("*.yaml")):
        first = path.read_text(encoding="utf-8").splitlines()[0]
        assert first.startswith(f"# accelerate launch --config_file configs/accelerate/{path.name} "), first
        kinds[path.stem] = load_config_from_file(str(path)).distributed_type.value
    assert kinds == {
        "cpu": "NO",
        "cpu_two_processes": "MULTI_GPU",
        "deepspeed": "DEEPSPEED",
        "fsdp": "FSDP",
        "gpus": "MULTI_GPU",
        "two_nodes": "MULTI_GPU",
    }


def test_the_deepspeed_file_for_accelerate_leaves_everything_to_the_json() -> None:
    settings = yaml.safe_load((ROOT / "configs" / "accelerate" / "deepspeed.yaml").read_text(encoding="utf-8"))
    assert settings["deepspeed_config"] == {"deepspeed_config_file": "configs/ds_zero2.json"}
    assert (ROOT / settings["deepspeed_config"]["deepspeed_config_file"]).is_file()
