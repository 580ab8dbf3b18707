"""One node to one typed value: what is accepted, and what the refusal says."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.unit.config_file.texts import MINIMAL, Load, Problems, training


class TestScalars:
    @pytest.mark.parametrize(
        ("line", "key", "value"),
        [
            ("learning_rate: 5e-5", "learning_rate", 5e-5),
            ("learning_rate: 1E-4", "learning_rate", 1e-4),
            ("learning_rate: .5", "learning_rate", 0.5),
            ("num_train_epochs: 3", "num_train_epochs", 3),
            ("bf16: true", "bf16", True),
            ("bf16: False", "bf16", False),
            ("eval_strategy: no", "eval_strategy", "no"),
            ('eval_strategy: "no"', "eval_strategy", "no"),
            ("run_name: 1234567", "run_name", "1234567"),
            ("run_name: 2020-01-01", "run_name", "2020-01-01"),
            ("run_name: on", "run_name", "on"),
            ('run_name: "null"', "run_name", "null"),
            ("run_name: null", "run_name", None),
            ("run_name:", "run_name", None),
            ("include_num_input_tokens_seen: no", "include_num_input_tokens_seen", "no"),
            ("include_num_input_tokens_seen: true", "include_num_input_tokens_seen", True),
            ("report_to: [wandb, tensorboard]", "report_to", ["wandb", "tensorboard"]),
            ("report_to: none", "report_to", "none"),
            ("lr_scheduler_kwargs: {min_lr: 1e-6, name: '1e-6', on: yes}", "lr_scheduler_kwargs", {
                "min_lr": 1e-6, "name": "1e-6", "on": "yes",
            }),
            ("fsdp: true", "fsdp", True),
            ("max_steps: -1", "max_steps", -1),
            ("gradient_checkpointing: false", "gradient_checkpointing", False),
            ("global_batch_size: 32", "global_batch_size", 32),
            ("precision: fp32", "precision", "fp32"),
        ],
    )  # fmt: skip
    def test_accepted(self, load: Load, line: str, key: str, value: Any) -> None:
        read = load(training(line)).training[key]
        assert (read, type(read)) == (value, type(value))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("bf16: no", "training.bf16: expected true or false, not no; write false"),
            ("bf16: Yes", "training.bf16: expected true or false, not Yes; write true"),
            ("bf16: 1", "training.bf16: expected true or false, not 1"),
            ('bf16: "true"', 'training.bf16: expected true or false, not the text "true"; remove the quotes'),
            ("bf16: null", "training.bf16: expected true or false, not null; leave the key out to get the default"),
            ("tf32: maybe", "training.tf32: expected true, false or null, not maybe"),
            ("seed:", "training.seed: expected a whole number, not null; leave the key out to get the default"),
            ("seed: 1.0", "training.seed: expected a whole number, not 1.0; write 1"),
            ("seed: 1e3", "training.seed: expected a whole number, not 1e3; write 1000"),
            ("seed: 1_000", "training.seed: expected a whole number, not 1_000; write 1000"),
            ("seed: true", "training.seed: expected a whole number, not true"),
            ("seed: [1]", "training.seed: expected a whole number, not a list"),
            ('learning_rate: "5e-5"',
             'training.learning_rate: expected a number, not the text "5e-5"; remove the quotes'),
            ("learning_rate: null",
             "training.learning_rate: expected a number, not null; leave the key out to get the default"),
            ("learning_rate: 1,000", "training.learning_rate: expected a number, not 1,000; write 1000"),
            ("learning_rate: .nan", "training.learning_rate: expected a number, not .nan"),
            ("learning_rate: fast", "training.learning_rate: expected a number, not fast"),
            ("learning_rate: {a: 1}", "training.learning_rate: expected a number, not a mapping"),
            ("learning_rate: -1e-4", "training.learning_rate: -0.0001 is below the minimum, 0"),
            ("adam_beta1: 1.5", "training.adam_beta1: 1.5 is not below 1"),
            ("global_batch_size: 0", "training.global_batch_size: 0 is below the minimum, 1"),
            ("include_for_metrics: inputs", "training.include_for_metrics: expected a list of texts, not inputs"),
            ("precision: bfloat16",
             "training.precision: expected one of auto, fp32, bf16, fp16, not bfloat16; did you mean 'bf16'?"),
            ("precision: float32",
             "training.precision: expected one of auto, fp32, bf16, fp16, not float32; did you mean 'fp32'?"),
            ("include_num_input_tokens_seen: foo", "training.include_num_input_tokens_seen: expected true, false or "
             "one of all, non_padding, no, not foo"),
            ("save_strategy: epochs",
             "training.save_strategy: expected one of no, steps, epoch, best, not epochs; did you mean 'epoch'?"),
            ("run_name: !!python/name:os.system x", "training.run_name: tags are not supported, here "
             "tag:yaml.org,2002:python/name:os.system; write the plain value"),
        ],
    )  # fmt: skip
    def test_refused(self, problems: Problems, line: str, message: str) -> None:
        assert problems(training(line)) == [f"run.yaml:5: {message}"]

    def test_a_long_list_of_choices_is_cut(self, problems: Problems) -> None:
        (found,) = problems(training("optim: adam"))
        assert found.startswith("run.yaml:5: training.optim: expected one of adamw_torch, adamw_torch_fused, ")
        assert re.search(r" and \d+ more, not adam; did you mean 'adamw_torch'\?$", found)

    def test_null_where_none_is_a_choice(self, problems: Problems) -> None:
        found = problems(MINIMAL + "distributed:\n  strategy: null\n")
        expected = "expected one of auto, none, ddp, zero1, zero2, zero3, fsdp, not null; write none"
        assert found == [f"run.yaml:5: distributed.strategy: {expected}"]

    def test_false_is_a_choice_beside_texts(self, load: Load, problems: Problems) -> None:
        zero = MINIMAL + "distributed: {strategy: zero3, offload_param: %s}\n"
        assert load(zero % "false").distributed.offload_param is False
        assert load(zero % "cpu").distributed.offload_param == "cpu"
        expected = "expected one of false, cpu, nvme"
        assert problems(zero % "no") == [f"run.yaml:4: distributed.offload_param: {expected}, not no"]
        assert problems(zero % "0") == [f"run.yaml:4: distributed.offload_param: {expected}, not 0"]
