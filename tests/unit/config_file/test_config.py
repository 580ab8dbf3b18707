"""The whole way: from a file to a RunConfig and back to text."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from sft_toolkit.args import (
    CallbackArguments,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SourceArguments,
)
from sft_toolkit.config import RunConfig, load_config, resolved_yaml
from sft_toolkit.config_file.written import callbacks_as_written, without_secrets
from sft_toolkit.errors import ConfigError
from tests.unit.config_file.texts import MINIMAL, Load, Problems, training


def test_the_smallest_configuration_takes_every_default(load: Load) -> None:
    assert load(MINIMAL) == RunConfig(
        model=ModelArguments(name_or_path="org/name"),
        data=DataArguments(train=[SourceArguments(path="train.jsonl")]),
        lora=None,
        training={"output_dir": "out"},
    )


def test_all_problems_are_reported_at_once_in_the_order_of_the_file(problems: Problems) -> None:
    text = """\
model:
  name_or_path: ./nowhere
data:
  train: missing.jsonl
  max_length: 1
r: 16
training:
  output_dir: train.jsonl
  learning_rat: 5e-5
  bf16: no
  seed: 1
  seed: 2
"""
    assert problems(text, "training.seed=x", "nonsense") == [
        "run.yaml:2: model.name_or_path: './nowhere': no such file or folder",
        "run.yaml:4: data.train: 'missing.jsonl': no such file or folder",
        "run.yaml:5: data.max_length: 1 is below the minimum, 2",
        "run.yaml:6: r: unknown section; 'r' belongs to section 'lora': write lora.r",
        "run.yaml:8: training.output_dir: 'train.jsonl' is a file; expected a folder, new or existing",
        "run.yaml:9: training.learning_rat: unknown key; did you mean 'learning_rate'?",
        "run.yaml:10: training.bf16: expected true or false, not no; write false",
        "run.yaml:12: training.seed: duplicate key; first written in line 11",
        "override 'nonsense': expected section.key=value",
        "override 'training.seed=x': training.seed: expected a whole number, not x",
    ]


def test_the_path_may_be_absolute(folder: Path) -> None:
    file = folder / "run.yaml"
    file.write_text(training("sed: 1"))
    with pytest.raises(ConfigError) as error:
        load_config(file)
    assert str(error.value) == f"{file}:5: training.sed: unknown key; did you mean 'seed'?"


def test_neither_torch_nor_transformers_is_imported(folder: Path) -> None:
    (folder / "run.yaml").write_text(training("optim: sgd") + "lora: {use_dora: true}\ncallbacks: [curve]\n")
    code = (
        "import sys; from sft_toolkit import load_config; load_config('run.yaml')\n"
        "print([m for m in ('torch', 'transformers', 'peft', 'datasets', 'accelerate', 'numpy') if m in sys.modules])"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(root)})
    assert (done.stdout, done.stderr) == ("[]\n", "")


NAMES = st.text(min_size=1)
NESTED = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)
SOURCES = st.builds(
    SourceArguments,
    path=st.just("train.jsonl"),
    format=st.sampled_from(["auto", "messages", "text"]),
    columns=st.dictionaries(st.text(), st.text(), max_size=2),
    weight=st.floats(min_value=0, max_value=1e9),
    max_rows=st.none() | st.integers(min_value=1),
)
CONFIGS = st.builds(
    RunConfig,
    model=st.builds(ModelArguments, name_or_path=st.just("org/name"), revision=st.none() | st.text()),
    data=st.builds(
        DataArguments,
        train=st.lists(SOURCES, min_size=1, max_size=2),
        eval=st.dictionaries(st.sampled_from(["dev", "5", "no", "a b"]), st.lists(SOURCES, min_size=1, max_size=2)),
        max_length=st.integers(min_value=2),
        supervise=st.sampled_from(["assistant", "all"]),
    ),
    lora=st.none()
    | st.builds(
        LoraArguments,
        alpha=st.none() | st.floats(min_value=0, max_value=1e9, exclude_min=True) | st.integers(min_value=1),
        targets=st.lists(st.text(), min_size=1) | st.text(min_size=1).map(re.escape),
        extra=st.fixed_dictionaries({}, optional={"rank_pattern": st.dictionaries(st.text(), st.integers())}),
    ),
    training=st.fixed_dictionaries(
        {"output_dir": st.just("out")},
        optional={
            "learning_rate": st.floats(min_value=0, max_value=1e9),
            "bf16": st.booleans(),
            "run_name": st.none() | st.text(),
            "eval_delay": st.floats(min_value=0, allow_infinity=False),
            "report_to": st.lists(st.text()),
            "lr_scheduler_kwargs": st.dictionaries(st.text(), NESTED, max_size=3),
        },
    ),
    distributed=st.builds(DistributedArguments, num_processes=st.none() | st.integers(min_value=1)),
    callbacks=st.lists(
        st.builds(CallbackArguments, st.sampled_from(["curve", "json.loads"]), st.dictionaries(st.text(), NESTED)),
        max_size=2,
    ),
    evaluation=st.builds(EvaluationArguments, max_new_tokens=st.integers(min_value=1)),
)


@settings(max_examples=40, deadline=None, database=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=CONFIGS)
def test_the_resolved_text_reads_as_the_same_configuration(folder: Path, config: RunConfig) -> None:
    # Hypothesis takes texts from our own sources, such as "hub_token".
    assume(all(without_secrets(callback.options) == callback.options for callback in config.callbacks))
    (folder / "resolved.yaml").write_text(resolved_yaml(config), encoding="utf-8", newline="")
    assert load_config("resolved.yaml") == config


def test_the_resolved_text_is_complete_and_holds_no_secret(load: Load) -> None:
    text = resolved_yaml(load(training("hub_token: secret\n  learning_rate: 5e-5") + "callbacks: [curve]\n"))
    first, *rest = text.splitlines()
    assert re.fullmatch(
        r"# The whole run, written by sft_toolkit \S+\. Running this file again is the same run\.", first
    )
    written = yaml.safe_load("\n".join(rest))
    assert list(written) == ["model", "data", "lora", "training", "distributed", "callbacks", "evaluation"]
    assert written["training"] == {"output_dir": "out", "learning_rate": 5e-5}
    assert written["callbacks"] == ["curve"]
    assert written["lora"] is None
    assert list(written["model"]) == [
        "name_or_path", "revision", "gguf_file", "dtype", "attn_implementation", "quantize", "trust_remote_code",
        "chat_template",
    ]  # fmt: skip


def test_options_that_are_named_like_a_secret_are_not_written() -> None:
    login = {"Password": "x", "eos_token": "y", "hosts": [{"token": "x", "name": "z"}]}
    callbacks = [
        CallbackArguments("my.Upload", {"url": "u", "api_key": "x", "login": login}),
        CallbackArguments("my.Other", {"wandb_api_key": "x", "access-token": "x"}),
    ]
    assert callbacks_as_written(callbacks) == [
        {"my.Upload": {"url": "u", "login": {"eos_token": "y", "hosts": [{"name": "z"}]}}},
        "my.Other",
    ]


@pytest.mark.parametrize(
    ("path", "overrides", "problem"),
    [
        ({"model": {}}, [], "the configuration is a dict; expected the path of a YAML or JSON file"),
        (None, [], "the configuration is a NoneType; expected the path of a YAML or JSON file"),
        ("x.yaml", "training.max_steps=1",
         "overrides are 'training.max_steps=1'; expected a list, such as ['training.max_steps=10']"),
        ("x.yaml", {"training.max_steps": 1}, "overrides are a mapping; expected a list: ['training.max_steps=1']"),
        ("x.yaml", [("training.max_steps", 1)],
         "overrides are [('training.max_steps', 1)]; each is a text: section.key=value"),
    ],
)  # fmt: skip
def test_what_a_call_from_python_hands_over(path: Any, overrides: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert caught.value.problems == [problem]
