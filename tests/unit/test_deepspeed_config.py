"""DeepSpeed settings: the ready files, the reading of a user's file, and the table of contradictions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import TrainingArguments

from sft_toolkit.args import DistributedArguments
from sft_toolkit.engines.deepspeed_config import (
    build_deepspeed_config,
    check_client_optimizer,
    check_deepspeed_config,
    check_settings_in_use,
    choose_deepspeed_config,
    launcher_settings,
    packaged,
    read_deepspeed_config,
)
from sft_toolkit.errors import ConfigError

CONFIGS = Path(__file__).resolve().parent.parent.parent / "configs"
PACKAGED = CONFIGS.parent / "sft_toolkit" / "deepspeed"
NAMES = ["ds_zero2.json", "ds_zero2_offload.json", "ds_zero3.json", "ds_zero3_offload.json"]
GATHER = "stage3_gather_16bit_weights_on_model_save"


def arguments(tmp_path: Path, **values: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **values)


def problems_of(settings: Any, args: TrainingArguments) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        check_deepspeed_config(settings, args)
    return caught.value.problems


@pytest.mark.parametrize("name", NAMES)
def test_the_files_in_configs_are_those_of_the_package(name: str) -> None:
    assert (CONFIGS / name).read_bytes() == (PACKAGED / name).read_bytes()
    assert sorted(path.name for path in CONFIGS.glob("ds_*.json")) == NAMES


def test_what_is_built_is_what_the_files_say() -> None:
    assert build_deepspeed_config(2) == packaged("ds_zero2.json")
    assert build_deepspeed_config(2, offload_optimizer=True) == packaged("ds_zero2_offload.json")
    assert build_deepspeed_config(3) == packaged("ds_zero3.json")
    assert build_deepspeed_config(3, "cpu", "cpu") == packaged("ds_zero3_offload.json")
    assert build_deepspeed_config(1)["zero_optimization"] == {
        **packaged("ds_zero2.json")["zero_optimization"],
        "stage": 1,
    }


@pytest.mark.parametrize("name", NAMES)
def test_ready_settings_leave_to_the_arguments_what_the_arguments_say(name: str, tmp_path: Path) -> None:
    config = packaged(name)
    followed = [
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "gradient_clipping",
    ]
    assert [config[key] for key in followed] == ["auto"] * 4
    assert (config["bf16"], config["fp16"]) == ({"enabled": "auto"}, {"enabled": "auto"})
    assert not {"optimizer", "scheduler"} & set(config)
    check_deepspeed_config(config, arguments(tmp_path, gradient_accumulation_steps=3, learning_rate=1e-3))


def test_offload_to_a_disk_names_the_folder(tmp_path: Path) -> None:
    zero = build_deepspeed_config(3, "nvme", "nvme", str(tmp_path))["zero_optimization"]
    device = {"device": "nvme", "nvme_path": str(tmp_path), "pin_memory": True}
    assert (zero["offload_optimizer"], zero["offload_param"]) == (device, device)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((0,), "zero_stage: 0 is none of 1, 2, 3 (without ZeRO, leave it out: DDP is the default)"),
        ((2, "disk"), "offload_optimizer: 'disk' is none of false, true, 'cpu', 'nvme'"),
        ((2, False, True), "offload_param: only ZeRO stage 3 partitions the weights, and the stage is 2; take zero3"),
        (
            (2, "nvme", False, "."),
            "offload_optimizer: 'nvme' needs ZeRO stage 3, and the stage is 2; take 'cpu' or zero3",
        ),
        ((3, "nvme"), "nvme_path: offload to 'nvme' needs a folder on a local disk of every node"),
    ],
)
def test_a_stage_or_offload_that_does_not_exist_is_refused(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_deepspeed_config(*given)
    assert caught.value.problems == [message]


def test_gathering_the_weights_is_on_where_the_file_leaves_it_open() -> None:
    for zero in ({"stage": 3}, {"stage": 3, GATHER: "auto"}):
        assert read_deepspeed_config({"zero_optimization": zero})["zero_optimization"][GATHER] is True
    assert (
        read_deepspeed_config({"zero_optimization": {"stage": 3, GATHER: False}})["zero_optimization"][GATHER] is False
    )
    assert GATHER not in read_deepspeed_config({"zero_optimization": {"stage": 2}})["zero_optimization"]


def test_a_mapping_is_copied() -> None:
    given = {"zero_optimization": {"stage": 3}}
    read_deepspeed_config(given)
    assert given == {"zero_optimization": {"stage": 3}}


def test_files_that_are_no_settings(tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text("{}")
    broken, array, twice = (tmp_path / name for name in ("broken.json", "list.json", "twice.json"))
    broken.write_text('{\n "a": 1,\n}')
    array.write_text("[1]")
    twice.write_text('{"a": 1, "a": 2}')
    expected = {
        tmp_path / "dss.json": f"{tmp_path}/dss.json: no such file or folder; did you mean '{tmp_path}/ds.json'?",
        array: f"{array}: DeepSpeed settings are a JSON object, and this is a list",
        twice: f"{twice}: the key 'a' stands there twice",
    }
    for path, message in expected.items():
        with pytest.raises(ConfigError) as caught:
            read_deepspeed_config(path)
        assert caught.value.problems == [message]
    with pytest.raises(ConfigError, match=r"broken\.json:[23]: is no JSON"):
        read_deepspeed_config(broken)


def test_every_contradiction_stands_in_one_table(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 4,
                "gradient_accumulation_steps": "auto",
                "train_batch_size": 12,
                "gradient_clipping": 1,
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "eps": "auto"}},
                "zero_optimization": {"stage": 2},
            }
        )
    )
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3, learning_rate=2e-4)
    assert problems_of(file, args) == [
        f"{file} contradict the arguments of the run:\n"
        "  key                             JSON         YAML\n"
        "  train_micro_batch_size_per_gpu  4            2  (training.per_device_train_batch_size)\n"
        "  train_batch_size                12           6  (2 rows x 3 accumulated x 1 ranks)\n"
        "  bf16.enabled                    true         false  (training.bf16 / precision)\n"
        "  optimizer.params.lr             0.001        0.0002  (training.learning_rate)\n"
        "  optimizer.params.betas          [0.9, 0.95]  [0.9, 0.999]  (training.adam_beta1, adam_beta2)\n"
        'Write "auto" in the JSON and it follows the arguments, or change the arguments.'
    ]


def test_what_was_asked_as_a_parameter_is_compared_too(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    args.zero_stage, args.offload_optimizer = 3, True  # type: ignore[attr-defined]
    (problem,) = problems_of({"zero_optimization": {"stage": 2}}, args)
    assert problem.splitlines()[2:4] == [
        "  zero_optimization.stage                     2     3  (zero_stage)",
        "  zero_optimization.offload_optimizer.device  none  cpu  (offload_optimizer)",
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "'zero_optimization' is missing; write {\"stage\": 2} for ZeRO-2"),
        ({"zero_optimization": {"stage": 4}}, "zero_optimization.stage: 4 is none of 0, 1, 2, 3"),
        (
            {"zero_optimization": {"stage": 2, "allgather_bucket_size": "auto"}},
            'zero_optimization.allgather_bucket_size: nobody fills "auto" here; write a number or leave the key out',
        ),
        (
            {"zero_optimization": {"stage": 3, GATHER: False}},
            f"zero_optimization.{GATHER}: without it ZeRO-3 saves no weights that load without DeepSpeed; "
            "write true (in an accelerate file: zero3_save_16bit_model: true)",
        ),
        (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
            "zero_optimization.offload_param: needs stage 3, and the stage is 2",
        ),
    ],
)
def test_settings_that_can_not_work(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    assert problems_of(settings, arguments(tmp_path)) == [f"the DeepSpeed settings: {message}"]


@pytest.mark.parametrize("optim", ["sgd", "adagrad", "adamw_torch_8bit"])
def test_an_optimizer_that_offload_would_replace_by_adam_is_refused(optim: str, tmp_path: Path) -> None:
    args = arguments(tmp_path, optim=optim)
    (problem,) = problems_of(build_deepspeed_config(2, "cpu"), args)
    assert problem.startswith(f"the DeepSpeed settings: training.optim: {optim} can't run under optimizer offload")
    assert "training.optim: adamw_torch" in problem
    check_deepspeed_config(build_deepspeed_config(2), args)
    check_deepspeed_config({**build_deepspeed_config(2, "cpu"), "zero_force_ds_cpu_optimizer": False}, args)


def test_an_optimizer_object_that_offload_would_replace(caplog: pytest.LogCaptureFixture) -> None:
    weights, offload = [torch.nn.Parameter(torch.zeros(2))], build_deepspeed_config(2, "cpu")
    with caplog.at_level("INFO", "sft_toolkit.engines.deepspeed_config"):
        check_client_optimizer(torch.optim.AdamW(weights, betas=(0.5, 0.9)), offload)
    assert caplog.messages == ["offload: AdamW runs as DeepSpeed's CPU version, with the same settings"]
    check_client_optimizer(torch.optim.SGD(weights), build_deepspeed_config(2))
    refused = {
        torch.optim.SGD(weights): "optimizer: torch.optim.sgd.SGD can't run under optimizer offload",
        torch.optim.AdamW(weights, amsgrad=True): "optimizer: torch.optim.adamw.AdamW with amsgrad can't run under",
    }
    for optimizer, message in refused.items():
        with pytest.raises(ConfigError) as caught:
            check_client_optimizer(optimizer, offload)
        assert caught.value.problems[0].startswith(message)


def test_an_optimizer_in_the_json_does_not_silently_win(tmp_path: Path) -> None:
    settings = {**build_deepspeed_config(2), "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    check_deepspeed_config(settings, arguments(tmp_path, optim="adamw_torch"))
    assert problems_of(settings, arguments(tmp_path, optim="sgd")) == [
        "the DeepSpeed settings: optimizer: the JSON's 'AdamW' would replace training.optim: sgd; drop one of the two"
    ]
    args = arguments(tmp_path, optim="adamw_torch")
    cast(Any, args).lora_plus_ratio = 4.0  # of SFTArguments
    assert problems_of(settings, args)[0].startswith(
        "the DeepSpeed settings: optimizer: DeepSpeed's own has one learning"
    )


def test_the_launchers_settings(tmp_path: Path) -> None:
    file = tmp_path / "launcher.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    assert launcher_settings({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_CONFIG_DS_FIELDS": ""}) is None
    assert launcher_settings({"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) == {"zero_optimization": {"stage": 2}}
    fields = {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
    }
    assert launcher_settings(fields) == {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "offload_param": {"device": "none"},
            GATHER: True,
        },
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 4,
        "gradient_clipping": "auto",
    }
    for said, gathers in (("true", True), ("false", False)):
        settings: Any = launcher_settings({**fields, "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": said})
        assert settings["zero_optimization"][GATHER] is gathers
    prefix = "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM"
    settings = launcher_settings({**fields, f"{prefix}_DEVICE": "nvme", f"{prefix}_NVME_PATH": "/d"})
    assert settings["zero_optimization"]["offload_param"] == {"device": "nvme", "nvme_path": "/d"}


def test_the_settings_in_use_are_checked_under_their_name(tmp_path: Path) -> None:
    launcher = {"ACCELERATE_DEEPSPEED_ZERO_STAGE": "2", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}
    args = arguments(tmp_path)
    check_settings_in_use(args, {})
    with pytest.raises(ConfigError, match=r"^the DeepSpeed settings of `accelerate launch` contradict the arguments"):
        check_settings_in_use(args, launcher)
    args.deepspeed = {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}
    with pytest.raises(ConfigError, match=r"^ds\.json contradict the arguments"):
        check_settings_in_use(args, launcher, "ds.json")


def test_one_source_is_chosen(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"zero_optimization": {"stage": 2}, "steps_per_print": 7}')
    zero3 = DistributedArguments(strategy="zero3", offload_optimizer="cpu")
    assert choose_deepspeed_config(DistributedArguments(strategy="ddp"), {}) is None
    assert choose_deepspeed_config(zero3, {}) == build_deepspeed_config(3, "cpu")
    assert choose_deepspeed_config(zero3, {"ACCELERATE_DEEPSPEED_CONFIG_FILE": str(file)}) is None
    assert choose_deepspeed_config(DistributedArguments(deepspeed=str(file)), {}) == {
        "zero_optimization": {"stage": 2},
        "steps_per_print": 7,
    }
