"""What was asked for and what engaged. The engines themselves: tests/distributed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sft_toolkit.args import DistributedArguments
from sft_toolkit.engines.distributed import asked_strategy, check_launch, check_section, refuse_missing_device
from sft_toolkit.engines.engagement import Engagement, check_engaged, describe, engaged
from sft_toolkit.engines.wrapped import count_parameters, offload_of, strategy_of
from sft_toolkit.errors import ConfigError

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
DDP_OF_TWO = Engagement("ddp", 2, 2, 1, "cpu", "fp32", 2, 4, 16, 1000, 250)


def problems_of(asked: DistributedArguments, env: dict[str, str]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_launch(asked, env)
    return caught.value.problems


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "zero2", "zero3", "fsdp"])
def test_a_strategy_of_several_processes_needs_a_launcher(strategy: Any) -> None:
    (problem,) = problems_of(DistributedArguments(strategy=strategy), {})
    assert problem.startswith(
        f"distributed.strategy: {strategy} needs a launcher, and this process was started without"
    )
    check_launch(DistributedArguments(strategy=strategy), TORCHRUN)


@pytest.mark.parametrize(
    ("asked", "env", "message"),
    [
        (
            {"strategy": "none"},
            {},
            "distributed.strategy: none is one process, and torchrun started 2; take ddp, or start one",
        ),
        (
            {"strategy": "zero2"},
            {"ACCELERATE_USE_CPU": "true"},
            "distributed.strategy: zero2: accelerate ignores DeepSpeed under `--cpu` (ACCELERATE_USE_CPU); start with "
            "`accelerate launch --use_deepspeed` or torchrun, and the CPU is taken by itself where there is nothing "
            "faster",
        ),
        (
            {"strategy": "ddp"},
            {"ACCELERATE_USE_DEEPSPEED": "true"},
            "distributed.strategy: ddp, but `accelerate launch` was told to use deepspeed; change one of the two",
        ),
        (
            {"strategy": "zero3"},
            {"ACCELERATE_USE_FSDP": "true"},
            "distributed.strategy: zero3, but `accelerate launch` was told to use fsdp; change one of the two",
        ),
        (
            {"strategy": "ddp", "offload_optimizer": "cpu"},
            {},
            "distributed.offload_optimizer, offload_param: need strategy zero1, zero2 or zero3, and it is ddp",
        ),
        (
            {"strategy": "zero2", "offload_param": "cpu"},
            {},
            "distributed.offload_param: only ZeRO stage 3 partitions the weights, and the stage is 2; take zero3",
        ),
        (
            {"backend": "goo"},
            {},
            "distributed.backend: 'goo' is none of auto, nccl, gloo, mpi, xccl, hccl, cncl, mccl; did you mean 'gloo'?",
        ),
    ],
)
def test_a_strategy_that_can_not_engage(asked: dict[str, Any], env: dict[str, str], message: str) -> None:
    assert problems_of(DistributedArguments(**asked), {**TORCHRUN, **env}) == [message]


def test_deepspeed_settings_have_one_source(tmp_path: Path) -> None:
    zero2, zero3 = tmp_path / "zero2.json", tmp_path / "zero3.json"
    zero2.write_text('{"zero_optimization": {"stage": 2}}')
    zero3.write_text('{"zero_optimization": {"stage": 3}}')
    launcher = {**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(zero3)}
    assert problems_of(DistributedArguments(deepspeed=str(zero2)), launcher) == [
        f"distributed.deepspeed: {zero2}, and the launcher brings DeepSpeed settings of its own ({zero3}); keep one of "
        "the two (`accelerate launch --use_deepspeed` without a file leaves the choice to the run)"
    ]
    assert problems_of(DistributedArguments(strategy="zero2", offload_optimizer="cpu"), launcher) == [
        "distributed.strategy: zero2, but the launcher says zero_optimization.stage: 3",
        "distributed.offload_optimizer: cpu, but the launcher says device: none",
    ]
    assert problems_of(DistributedArguments(strategy="zero3", deepspeed=str(zero2)), TORCHRUN) == [
        f"distributed.strategy: zero3, but {zero2} says zero_optimization.stage: 2"
    ]
    assert problems_of(DistributedArguments(strategy="ddp", deepspeed=str(zero2)), TORCHRUN) == [
        f"distributed.deepspeed: {zero2} and distributed.strategy: ddp exclude one another"
    ]
    check_launch(DistributedArguments(strategy="zero3"), launcher)
    check_launch(DistributedArguments(deepspeed=str(zero2)), {**TORCHRUN, "ACCELERATE_USE_DEEPSPEED": "true"})


def test_nvme_needs_libaio_before_the_model_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = DistributedArguments(strategy="zero3", offload_optimizer="nvme", nvme_path=str(tmp_path))
    monkeypatch.setattr("sft_toolkit.engines.distributed.find_library", lambda name: None)
    with pytest.raises(ConfigError, match=r"^distributed.offload_optimizer: nvme needs libaio \(apt install"):
        check_launch(asked, TORCHRUN)
    check_launch(asked, {**TORCHRUN, "LDFLAGS": "-L/opt/aio"})
    monkeypatch.setattr("sft_toolkit.engines.distributed.find_library", lambda name: f"lib{name}.so.1")
    check_launch(asked, TORCHRUN)


def test_a_section_is_checked_without_a_launcher() -> None:
    check_section(DistributedArguments(strategy="zero3", num_processes=8), {})
    with pytest.raises(ConfigError) as caught:
        check_section(DistributedArguments(strategy="zero2", offload_param="cpu", backend="tcp"), {})
    assert caught.value.problems == [
        "distributed.backend: 'tcp' is none of auto, nccl, gloo, mpi, xccl, hccl, cncl, mccl",
        "distributed.offload_param: only ZeRO stage 3 partitions the weights, and the stage is 2; take zero3",
    ]


def test_files_and_launchers_ask_for_strategies(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    assert asked_strategy(DistributedArguments(), {}) == "auto"
    assert asked_strategy(DistributedArguments(strategy="ddp"), {}) == "ddp"
    assert asked_strategy(DistributedArguments(deepspeed=str(file)), {}) == "zero2"
    assert asked_strategy(DistributedArguments(), {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == "zero2"
    assert asked_strategy(DistributedArguments(), {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}) == "zero3"
    assert asked_strategy(DistributedArguments(), {"ACCELERATE_USE_DEEPSPEED": "true"}) == "zero2"
    assert asked_strategy(DistributedArguments(), {"ACCELERATE_USE_FSDP": "true"}) == "fsdp"


@pytest.mark.parametrize(
    ("asked", "env", "messages"),
    [
        ({}, {}, []),
        ({"strategy": "ddp", "num_processes": 2}, TORCHRUN, []),
        ({"strategy": "zero2"}, TORCHRUN, ["distributed.strategy: zero2 asked for, ddp engaged"]),
        (
            {"strategy": "fsdp"},
            TORCHRUN,
            ["distributed.strategy: fsdp asked for, ddp engaged; accelerate has FSDP on accelerators only"],
        ),
        (
            {"offload_optimizer": "cpu"},
            TORCHRUN,
            ["distributed.offload_optimizer: cpu asked for, none engaged"],
        ),
        (
            {},
            {**TORCHRUN, "WORLD_SIZE": "4"},
            [
                "torchrun started 4 processes, but each trains in a group of 2; on a machine without an accelerator "
                "set training.use_cpu: true"
            ],
        ),
    ],
)
def test_asked_and_engaged_are_compared(asked: dict[str, Any], env: dict[str, str], messages: list[str]) -> None:
    env = env or TORCHRUN
    if not messages:
        check_engaged(DistributedArguments(**asked), DDP_OF_TWO, env)
        return
    with pytest.raises(ConfigError) as caught:
        check_engaged(DistributedArguments(**asked), DDP_OF_TWO, env)
    assert caught.value.problems == messages


def test_the_start_up_block() -> None:
    assert describe(DDP_OF_TWO).splitlines() == [
        "processes   2 processes on 1 node, device cpu",
        "strategy    ddp",
        "precision   fp32",
        "batch       2 x 4 accumulated x 2 ranks = 16",
        "parameters  1,000, 250 trainable (25.00 %)",
    ]
    parts = {"weights": 3 * 2**30, "gradients": 0, "optimizer": 2**30, "activations": 50 * 2**20}
    planned = replace(DDP_OF_TWO, parameters_on_rank=500, predicted_memory=parts)
    assert describe(planned).splitlines()[4:] == [
        "parameters  1,000, 250 trainable (25.00 %), 500 on this rank",
        "memory      4.0 GiB predicted on each device (weights 3.0 GiB, optimizer 1.0 GiB, activations 50.0 MiB, ...)",
    ]
    alone = Engagement("zero3", 1, 1, 1, "cuda", "bf16", 1, 1, 1, 8, 8, {"optimizer": "cpu", "param": "nvme"})
    assert describe(alone).splitlines()[:2] == [
        "processes   1 process on 1 node, device cuda",
        "strategy    zero3, optimizer on cpu, param on nvme",
    ]


def test_what_engaged_is_read_from_the_objects() -> None:
    model = torch.nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    trainer: Any = SimpleNamespace(
        model_wrapped=model,
        args=SimpleNamespace(per_device_train_batch_size=3, gradient_accumulation_steps=2, world_size=1, n_gpu=0),
        accelerator=SimpleNamespace(device=torch.device("cpu"), mixed_precision="no"),
    )
    assert engaged(trainer, {}) == Engagement("none", 1, 1, 1, "cpu", "fp32", 3, 2, 6, 20, 15, parameters_on_rank=20)
    trainer.accelerator.mixed_precision = "bf16"
    assert engaged(trainer, {}).precision == "bf16"
    model.to(torch.bfloat16)
    assert engaged(trainer, {}).precision == "pure bf16"


def test_strategies_are_known_by_the_wrapper() -> None:
    class DeepSpeedEngine(torch.nn.Linear):
        stage, offload = 3, SimpleNamespace(device=SimpleNamespace(value="cpu"))

        def zero_optimization_stage(self) -> int:
            return self.stage

        def zero_offload_optimizer(self) -> Any:
            return self.offload

        def zero_offload_param(self) -> Any:
            return None

    engine = DeepSpeedEngine(2, 2)
    assert (strategy_of(engine), offload_of(engine)) == ("zero3", {"optimizer": "cpu"})
    engine.stage = 0
    assert (strategy_of(engine), offload_of(engine)) == ("ddp", {})
    sharded = type("FSDPLinear", (torch.nn.Linear, type("FSDPModule", (), {})), {})(2, 2)
    assert strategy_of(sharded) == "fsdp"
    assert strategy_of(torch.nn.DataParallel(torch.nn.Linear(2, 2))) == "dp"
    engine.weight.ds_numel = 400  # type: ignore[attr-defined]
    assert count_parameters(engine) == (402, 402)


def test_tensor_parallelism_is_refused_before_the_model_loads() -> None:
    args: Any = SimpleNamespace(use_cpu=True, fsdp=None, parallelism_config=SimpleNamespace(tp_enabled=True, tp_size=2))
    with pytest.raises(ConfigError, match=r"tp_size: 2: .* shared by distributed\.strategy: zero3 or fsdp"):
        refuse_missing_device(args, {})
