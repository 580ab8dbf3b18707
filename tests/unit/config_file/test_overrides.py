"""section.key=value, checked like the file."""

from __future__ import annotations

from typing import Any

import pytest

from sft_toolkit.args import (
    CallbackArguments,
    SourceArguments,
)
from tests.unit.config_file.texts import MINIMAL, MODEL, TRAINING, Load, Problems, training


class TestOverrides:
    @pytest.mark.parametrize(
        ("override", "section", "key", "value"),
        [
            ("training.learning_rate=1e-4", "training", "learning_rate", 1e-4),
            ("training.bf16=true", "training", "bf16", True),
            ("training.run_name=a=b", "training", "run_name", "a=b"),
            ("training.run_name=a: b #c", "training", "run_name", "a: b #c"),
            ("training.run_name=null", "training", "run_name", None),
            ("training.run_name='null'", "training", "run_name", "null"),
            ("training.run_name=[x", "training", "run_name", "[x"),
            ("training.report_to=[wandb, tensorboard]", "training", "report_to", ["wandb", "tensorboard"]),
            ("training.lr_scheduler_kwargs={min_lr: 1e-6}", "training", "lr_scheduler_kwargs", {"min_lr": 1e-6}),
            ("training.lr_scheduler_kwargs.min_lr=1e-6", "training", "lr_scheduler_kwargs", {"min_lr": 1e-6}),
            ("training.output_dir=elsewhere", "training", "output_dir", "elsewhere"),
            ("lora.r=8", "lora", "r", 8),
            ("lora.targets=[qv]_proj$", "lora", "targets", "[qv]_proj$"),
            ("lora.targets=[q_proj, v_proj]", "lora", "targets", ["q_proj", "v_proj"]),
            ("data.max_length=99", "data", "max_length", 99),
            ("data.train.0.max_rows=9", "data", "train", [SourceArguments("train.jsonl", max_rows=9)]),
            ("data.train.1=org/other", "data", "train", [SourceArguments("train.jsonl"), SourceArguments("org/other")]),
            ("data.eval.dev=train.jsonl", "data", "eval", {"dev": [SourceArguments("train.jsonl")]}),
        ],
    )  # fmt: skip
    def test_applied(self, load: Load, override: str, section: str, key: str, value: Any) -> None:
        config = load(f"{MODEL}data: {{train: [path: train.jsonl]}}\n{TRAINING}lora:\n", override)
        held = getattr(config, section)
        assert (held[key] if isinstance(held, dict) else getattr(held, key)) == value

    def test_a_whole_section(self, load: Load) -> None:
        assert load(MINIMAL + "lora: {r: 8}\n", "lora=null").lora is None

    def test_the_last_one_wins_and_the_replaced_value_is_not_checked(self, load: Load) -> None:
        assert load(training("seed: x"), "training.seed=1", "training.seed=2").training["seed"] == 2

    def test_a_list_where_the_file_has_none(self, load: Load) -> None:
        text = MODEL + TRAINING
        overrides = ["data.train.0.path=train.jsonl", "callbacks.0=curve"]
        config = load(text, *overrides)
        assert config.data.train == [SourceArguments("train.jsonl")]
        assert config.callbacks == [CallbackArguments("curve")]

    @pytest.mark.parametrize(
        ("override", "message"),
        [
            ("training.max_steps", "expected section.key=value"),
            ("=3", "expected section.key=value"),
            ("training..seed=3", "expected section.key=value"),
            ("--training.seed=3", "expected section.key=value; write training.seed=3"),
            ("trainig.seed=3", "trainig: unknown section; did you mean 'training'?"),
            ("seed=3", "seed: unknown section; 'seed' belongs to section 'training': write training.seed"),
            ("training.sed=3", "training.sed: unknown key; did you mean 'seed'?"),
            ("training.seed=x", "training.seed: expected a whole number, not x"),
            ("training.bf16=no", "training.bf16: expected true or false, not no; write false"),
            ("data.train.0.path=x.jsonl", "data.train is train.jsonl, which has no '0'"),
            ("callbacks.3=curve", "callbacks is a list of 0, which has no '3'"),
            ("lora={r: 2, r: 4}", "lora.r: duplicate key"),
            ("data.max_length=1", "data.max_length: 1 is below the minimum, 2"),
        ],
    )  # fmt: skip
    def test_refused(self, problems: Problems, override: str, message: str) -> None:
        assert problems(MINIMAL + "callbacks: []\n", override) == [f"override '{override}': {message}"]
