"""SFTArguments: TrainingArguments with our fields, checked, and made from a configuration."""

from __future__ import annotations

import copy
import dataclasses
import io
import json
import logging
import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import HfArgumentParser, TrainingArguments

from sft_toolkit import SFTArguments, load_config
from sft_toolkit.args import DataArguments, DistributedArguments, SourceArguments
from sft_toolkit.config import resolved_yaml
from sft_toolkit.errors import ConfigError
from sft_toolkit.running.arguments import arguments_from, as_written
from sft_toolkit.training_args import accumulation_steps

LAUNCHER = ("WORLD_SIZE", "RANK", "LOCAL_RANK", "ACCELERATE_MIXED_PRECISION", "ACCELERATE_USE_CPU")


@pytest.fixture(autouse=True)
def plain_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No launcher, no GPU, a folder of its own."""
    monkeypatch.chdir(tmp_path)
    for name in LAUNCHER:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)


def refused(**values: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        SFTArguments("out", **values)
    return error.value.problems


def from_sections(training: dict[str, Any], **distributed: Any) -> SFTArguments:
    values = {"output_dir": "out", **training}
    return arguments_from(values, DataArguments(max_length=77, packing=True), DistributedArguments(**distributed))


class TestDefaults:
    def test_what_differs_from_transformers(self) -> None:
        ours, theirs = SFTArguments("out"), TrainingArguments("out", use_cpu=True)
        names = [field.name for field in dataclasses.fields(TrainingArguments)]
        differing = {name: getattr(ours, name) for name in names if getattr(ours, name) != getattr(theirs, name)}
        assert differing == {
            "activation_checkpointing": True,
            "gradient_checkpointing": True,
            "activation_checkpointing_kwargs": {"use_reentrant": False},
            "gradient_checkpointing_kwargs": {"use_reentrant": False},
            "logging_steps": 10,
            "logging_nan_inf_filter": False,
        }

    def test_ours(self) -> None:
        args = SFTArguments("out")
        assert (args.supervise, args.max_length, args.too_long, args.on_bad_row, args.packing) == (
            "assistant", 2048, "drop", "error", False
        )  # fmt: skip
        assert (args.global_batch_size, args.resume, args.stop_after_nonfinite) == (None, "auto", 3)
        assert (args.zero_stage, args.offload_optimizer, args.offload_param, args.nvme_path) == (
            None,
            False,
            False,
            None,
        )

    def test_positions_are_those_of_transformers(self) -> None:
        ours = [field.name for field in dataclasses.fields(SFTArguments)]
        theirs = [field.name for field in dataclasses.fields(TrainingArguments)]
        assert ours[: len(theirs)] == theirs
        args = SFTArguments("somewhere", 4)
        assert (args.output_dir, args.per_device_train_batch_size) == ("somewhere", 4)

    def test_the_cpu_is_used_where_there_is_nothing_else(self) -> None:
        args = SFTArguments("out")
        assert (args.use_cpu, args.device, args.dataloader_pin_memory) == (True, torch.device("cpu"), False)


class TestCheckpointing:
    @pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
    @pytest.mark.filterwarnings("ignore:.gradient_checkpointing. is deprecated:FutureWarning")
    def test_off_by_either_key(self, name: str) -> None:
        off: dict[str, Any] = {name: False}
        args = SFTArguments("out", **off)
        assert (args.activation_checkpointing, args.activation_checkpointing_kwargs) == (False, None)

    def test_options_are_kept(self) -> None:
        args = SFTArguments("out", activation_checkpointing_kwargs={"every_n_layers": 2})
        assert args.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}
        reentrant = SFTArguments("out", activation_checkpointing_kwargs={"use_reentrant": True})
        assert reentrant.activation_checkpointing_kwargs == {"use_reentrant": True}


class TestPrecision:
    def test_fp32_on_the_cpu_said_once_with_the_reason(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "sft_toolkit"):
            args = SFTArguments("out")
        assert (args.precision, args.bf16, args.fp16, args.mixed_precision) == ("fp32", False, False, "no")
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [
            ("INFO", "precision: fp32 (the run is on the CPU)")
        ]

    def test_bf16_on_the_cpu_when_asked_for(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO, "sft_toolkit"):
            args = SFTArguments("out", bf16=True)
        assert (args.precision, args.bf16, args.fp16, args.mixed_precision) == ("bf16", True, False, "bf16")
        message = "precision: bf16 (asked for by bf16: true; many CPUs are far slower in it than in fp32)"
        assert [(r.levelname, r.getMessage()) for r in caplog.records] == [("WARNING", message)]

    def test_only_the_first_rank_says_it(
        self, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RANK", "1")
        with caplog.at_level(logging.INFO, "sft_toolkit"):
            SFTArguments("out")
        assert caplog.records == []

    def test_the_launcher_is_heard(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert SFTArguments("out").precision == "bf16"
        assert refused(precision="fp32") == [
            "precision fp32 (asked for by precision) contradicts the launcher's --mixed_precision bf16; "
            "leave one of them out"
        ]


class TestValues:
    @pytest.mark.parametrize(
        ("values", "messages"),
        [
            ({"max_length": 1}, ["max_length: 1 is below the minimum, 2"]),
            ({"packing": "yes"}, ["packing: expected true or false, not 'yes'"]),
            ({"max_length": True}, ["max_length: expected a whole number, not True"]),
            ({"too_long": "cut"}, [
                "too_long: expected one of drop, error, truncate_right, truncate_prompt_left, cut_at_turn, not 'cut'"
            ]),
            ({"learning_rate": "5e-5"}, ["learning_rate: expected a number, not '5e-5'"]),
            ({"learning_rate": -1.0}, ["learning_rate: -1.0 is below the minimum, 0"]),
            ({"global_batch_size": 0, "per_device_train_batch_size": 0}, [
                "global_batch_size: 0 is below the minimum, 1",
                "per_device_train_batch_size: 0 is below the minimum, 1",
            ]),
            ({"bf16": True, "fp16": True}, ["bf16: true contradicts fp16: true; keep one of them"]),
            ({"offload_optimizer": True, "nvme_path": "x"}, [
                "offload_optimizer: needs zero_stage (1, 2 or 3)", "nvme_path: needs zero_stage (1, 2 or 3)"
            ]),
            ({"zero_stage": 2, "deepspeed": {"zero_optimization": {"stage": 3}}},
             ["zero_stage: 2 contradicts deepspeed; keep one of them"]),
            ({"global_batch_size": 8, "auto_find_batch_size": True},
             ["global_batch_size contradicts auto_find_batch_size, which changes the batch of an update"]),
        ],
    )  # fmt: skip
    def test_refused(self, values: dict[str, Any], messages: list[str]) -> None:
        assert refused(**values) == messages

    def test_a_stage_of_zero_builds_the_settings(self) -> None:
        args = SFTArguments("out", zero_stage=3, offload_optimizer=True, offload_param="cpu")
        assert isinstance(args.deepspeed, dict)
        zero = args.deepspeed["zero_optimization"]
        devices = [zero[key]["device"] for key in ("offload_optimizer", "offload_param")]
        assert (zero["stage"], devices) == (3, ["cpu", "cpu"])
        assert args.deepspeed["train_micro_batch_size_per_gpu"] == "auto"
        assert dataclasses.replace(args, max_length=99).deepspeed == args.deepspeed


class TestGlobalBatch:
    @pytest.mark.parametrize(
        ("size", "per_device", "replicas", "steps"), [(32, 8, 1, 4), (8, 8, 1, 1), (64, 2, 8, 4), (6, 1, 3, 2)]
    )
    def test_accumulation(self, size: int, per_device: int, replicas: int, steps: int) -> None:
        assert accumulation_steps(size, per_device, replicas) == steps

    @pytest.mark.parametrize(
        ("size", "per_device", "replicas", "message"),
        [
            (30, 8, 1, "30 is no multiple of 8 (per_device_train_batch_size 8 x 1 process); nearest: 24 or 32"),
            (30, 4, 2, "30 is no multiple of 8 (per_device_train_batch_size 4 x 2 processes); nearest: 24 or 32"),
            (4, 8, 1, "4 is no multiple of 8 (per_device_train_batch_size 8 x 1 process); nearest: 8"),
        ],
    )
    def test_a_size_that_does_not_divide(self, size: int, per_device: int, replicas: int, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            accumulation_steps(size, per_device, replicas)
        assert error.value.problems == [f"global_batch_size: {message}"]

    def test_set_in_the_arguments(self) -> None:
        assert SFTArguments("out", global_batch_size=32).gradient_accumulation_steps == 4
        assert SFTArguments("out", global_batch_size=32, gradient_accumulation_steps=4).gradient_accumulation_steps == 4
        assert refused(global_batch_size=32, gradient_accumulation_steps=2) == [
            "gradient_accumulation_steps: 2 contradicts global_batch_size: 32, which takes 4; keep one of them"
        ]

    def test_the_settings_of_deepspeed_hold_the_product(self) -> None:
        args = SFTArguments("out", global_batch_size=32, zero_stage=2)
        assert args.hf_deepspeed_config.config["train_batch_size"] == 32
        assert args.hf_deepspeed_config.config["gradient_accumulation_steps"] == 4

    def test_a_launcher_that_promised_other_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SFTArguments, "_expected_replicas", lambda self: 2)
        assert refused(global_batch_size=32) == [
            "global_batch_size: 32 was planned for another number of processes than the 1 that run; "
            "set gradient_accumulation_steps instead"
        ]


class TestCopies:
    def test_pickled_saved_and_written_as_json(self) -> None:
        args = SFTArguments("out", packing=True, global_batch_size=16, hub_token="secret")
        without_secret = dataclasses.replace(args, hub_token=None)
        assert pickle.loads(pickle.dumps(args)) == without_secret
        buffer = io.BytesIO()
        torch.save(args, buffer)
        assert b"secret" not in buffer.getvalue()
        buffer.seek(0)
        assert torch.load(buffer, weights_only=False) == without_secret
        assert copy.copy(args) == copy.deepcopy(args) == args
        written = json.loads(args.to_json_string())
        assert (written["packing"], written["global_batch_size"], written["precision"]) == (True, 16, "fp32")
        assert "secret" not in args.to_json_string() + repr(args)

    def test_rebuilt_from_its_own_values(self) -> None:
        args = SFTArguments("out", global_batch_size=16, bf16=True)
        assert SFTArguments(**args.to_dict()).to_dict() == args.to_dict()
        changed = dataclasses.replace(args, activation_checkpointing=False, max_length=9)
        assert (changed.activation_checkpointing, changed.max_length, changed.bf16) == (False, 9, True)

    def test_read_from_a_command_line(self) -> None:
        line = ["--output_dir", "out", "--max_length", "12", "--packing", "--too_long", "error"]
        (args,) = HfArgumentParser(cast(Any, SFTArguments)).parse_args_into_dataclasses(line)
        assert (args.output_dir, args.max_length, args.packing, args.too_long) == ("out", 12, True, "error")


class TestFromSections:
    def test_data_and_distributed_are_carried_over(self) -> None:
        args = from_sections({"learning_rate": 1e-3}, strategy="zero2", offload_optimizer="cpu")
        assert (args.learning_rate, args.max_length, args.packing) == (1e-3, 77, True)
        assert isinstance(args.deepspeed, dict)
        zero = args.deepspeed["zero_optimization"]
        assert (zero["stage"], zero["offload_optimizer"]["device"]) == (2, "cpu")

    def test_a_backend_is_for_several_processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert from_sections({}, backend="gloo").ddp_backend is None
        given: list[SFTArguments] = []
        monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: given.append(self))
        monkeypatch.setenv("WORLD_SIZE", "2")
        from_sections({}, backend="gloo")
        assert [args.ddp_backend for args in given] == ["gloo"]

    def test_a_deepspeed_file_and_settings_in_place(self, tmp_path: Path) -> None:
        settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 1}}
        (tmp_path / "ds.json").write_text(json.dumps(settings))
        assert from_sections({}, deepspeed="ds.json").deepspeed == settings
        assert from_sections({"deepspeed": settings}).deepspeed == settings

    def test_fsdp(self) -> None:
        assert bool(from_sections({}, strategy="fsdp").fsdp)

    @pytest.mark.parametrize(
        ("training", "distributed", "message"),
        [
            ({"save_steps": 1.5}, {}, "training.save_steps must be an integer if bigger than 1: 1.5"),
            ({"load_best_model_at_end": True}, {},
             "training.load_best_model_at_end requires the save and eval strategy to match, except when "
             'save_strategy="best", but found - Evaluation strategy: no - Save strategy: steps'),
            ({"max_steps": -2}, {}, "training.max_steps: -2 is below the minimum, -1"),
            ({"global_batch_size": 16, "gradient_accumulation_steps": 1}, {},
             "training.gradient_accumulation_steps: 1 contradicts global_batch_size: 16, which takes 2; "
             "keep one of them"),
            ({"deepspeed": {}}, {"strategy": "zero2"},
             "training.deepspeed contradicts distributed.strategy: zero2; keep one of them"),
            ({"accelerator_config": "missing.json"}, {},
             "training.accelerator_config: 'missing.json': no such file or folder"),
        ],
    )  # fmt: skip
    def test_refused_in_words(self, training: dict[str, Any], distributed: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError) as error:
            from_sections(training, **distributed)
        assert error.value.problems == [message]

    def test_the_resolved_configuration_is_the_same_run(self, tmp_path: Path) -> None:
        (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
        (tmp_path / "run.yaml").write_text(
            "model: {name_or_path: org/name}\n"
            "data: {train: train.jsonl, eval: train.jsonl, max_length: 99, packing: true}\n"
            "training: {output_dir: out, learning_rate: 5e-5, global_batch_size: 16, eval_strategy: steps,"
            " eval_steps: 5, lr_scheduler_type: cosine_with_min_lr, lr_scheduler_kwargs: {min_lr: 1e-6},"
            " warmup_steps: 0.1,"
            " activation_checkpointing: false, hub_token: secret, optim: sgd}\n"
        )
        config = load_config("run.yaml")
        args = arguments_from(config.training, config.data, config.distributed)
        written = as_written(args, config.training)
        assert (written["precision"], written["save_steps"], written["seed"]) == ("fp32", 500, 42)
        assert "gradient_accumulation_steps" not in written
        (tmp_path / "resolved.yaml").write_text(resolved_yaml(config, written))
        again = load_config("resolved.yaml")
        twin = arguments_from(again.training, again.data, again.distributed)
        assert twin.to_dict() == {**args.to_dict(), "hub_token": "<HUB_TOKEN>"}
        assert twin.hub_token is None


def test_held_out_rows_are_read_every_epoch_unless_told_otherwise(tmp_path: Path) -> None:
    held_out = DataArguments(eval={"eval": [SourceArguments(path="held_out.jsonl")]})
    asked = {"output_dir": str(tmp_path)}
    assert arguments_from(asked, held_out, DistributedArguments()).eval_strategy == "epoch"
    assert arguments_from(asked, DataArguments(val_split=0.1), DistributedArguments()).eval_strategy == "epoch"
    assert arguments_from(asked, DataArguments(), DistributedArguments()).eval_strategy == "no"
    silent = {**asked, "eval_strategy": "no"}
    assert arguments_from(silent, held_out, DistributedArguments()).eval_strategy == "no"
