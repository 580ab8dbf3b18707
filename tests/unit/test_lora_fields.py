"""Fields of peft that are settings of their own, and those that need more than a value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import LoraRuntimeConfig, VeloraConfig

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.config import check_fields, to_peft
from sft_toolkit.lora.fields import _FROM_DATA, _NOT_FROM_HERE, _OWN_LOSS, idle_fields
from tests.tiny import tiny_model

STARTS = "gaussian, eva, olora, pissa, corda, loftq, orthogonal, mica, pissa_niter_N"


def test_mappings_become_the_classes_of_peft(tmp_path: Path) -> None:
    extra = {"runtime_config": {"ephemeral_gpu_offload": True}, "velora_config": {"num_groups": 4}}
    config = to_peft(LoraArguments(extra=extra), tiny_model())
    assert config.runtime_config == LoraRuntimeConfig(ephemeral_gpu_offload=True)
    assert config.velora_config == VeloraConfig(num_groups=4)
    config.save_pretrained(str(tmp_path))
    assert json.loads((tmp_path / "adapter_config.json").read_text())["velora_config"]["num_groups"] == 4
    assert extra["runtime_config"] == {"ephemeral_gpu_offload": True}  # what is written down stays as it was written


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({"runtime_config": {"foo": 1}}, "lora.runtime_config: unknown option 'foo' (accepted: ephemeral_gpu_offload)"),
        ({"runtime_config": {"ephemeral_gpu_offload": "no"}},
         "lora.runtime_config: option 'ephemeral_gpu_offload': expected true or false, not 'no'"),
        ({"loftq_config": {"loftq_bit": 4}, "init_lora_weights": "loftq"},
         "lora.loftq_config: unknown option 'loftq_bit'; did you mean 'loftq_bits'?"),
        ({"monteclora_config": {"foo": 1}}, "lora.monteclora_config: unknown option 'foo'"),
        ({"init_lora_weights": "eva"}, "lora.init_lora_weights: eva starts from statistics of data"),
        ({"init_lora_weights": "gausian"},
         f"lora.init_lora_weights: unknown 'gausian'; did you mean 'gaussian'? (known: {STARTS})"),
        ({"arrow_config": {"top_k": 1}}, "lora.arrow_config: it routes between adapters that are trained already"),
        ({"use_qalora": True}, "lora.use_qalora: it is for weights in GPTQ; leave it out"),
        ({"layer_replication": [[0, 1, 2]]},
         "lora.layer_replication: expected [first, end] pairs, such as [[0, 4], [2, 5]], not [0, 1, 2]"),
        ({"rank_pattern": {"q_proj": 0}}, "lora.rank_pattern: 0 for 'q_proj' is below the minimum, 1"),
    ],
)  # fmt: skip
def test_refused_without_a_model(extra: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_fields(LoraArguments(extra=extra))
    assert caught.value.problems[0].startswith(problem)


def test_starts_that_need_nothing_pass() -> None:
    for start in (True, False, "gaussian", "pissa_niter_4", "mica", "orthogonal"):
        check_fields(LoraArguments(extra={"init_lora_weights": start}))


def test_what_has_no_effect() -> None:
    assert list(idle_fields({"lora_ga_config": {}, "qalora_group_size": 8, "kasa_config": {}})) == [
        "lora.lora_ga_config: has no effect without init_lora_weights: lora_ga",
        "lora.qalora_group_size: has no effect without use_qalora",
        "lora.kasa_config: peft leaves its own loss to the training loop, and this one does not add it",
    ]
    assert list(idle_fields({"eva_config": None, "use_dora": True})) == []


def test_the_fields_named_here_are_there_upstream() -> None:
    named = {*_NOT_FROM_HERE, *_OWN_LOSS, *(f"{start}_config" for start in _FROM_DATA)}
    assert named <= LoraConfig.__dataclass_fields__.keys()
