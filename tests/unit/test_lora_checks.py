"""Settings of peft that a model can't follow: said before training, all at once, instead of ignored."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any

import pytest
import torch
from peft import AdaptionPromptConfig, LoraConfig
from transformers import MixtralConfig, MixtralForCausalLM

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.inject import inject, trainable_share
from sft_toolkit.lora.merge import merge
from sft_toolkit.lora.targets import adapted_modules, left_out
from tests.tiny import tiny_model
from tests.unit.test_lora_inject import difference, logits
from tests.unit.test_lora_states import train


def problems(model: Any, config: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        inject(model, config)
    return caught.value.problems


def tiny_mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=261,
            hidden_size=16,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            num_local_experts=2,
        )
    )


def test_patterns_that_match_nothing_are_refused_together() -> None:
    extra = {
        "rank_pattern": {"qq_proj": 2, "q_proj": 4, "(": 1},
        "alpha_pattern": {r"layers\.7\.mlp\.up_proj": 8},
        "exclude_modules": ["v_prj"],
        "target_parameters": ["experts.gate_up"],
    }
    assert problems(tiny_model(), LoraArguments(extra=extra)) == [
        "lora.rank_pattern: '(' is no regular expression: missing ), unterminated subpattern at position 0",
        "lora.rank_pattern: 'qq_proj' matches no module; did you mean 'q_proj'?",
        r"lora.alpha_pattern: 'layers\.7\.mlp\.up_proj' matches no module; did you mean 'up_proj'?",
        "lora.exclude_modules: 'v_prj' matches no module; did you mean 'v_proj'?",
        "lora.target_parameters: 'experts.gate_up' matches no parameter (this model has no stacked experts)",
    ]


@pytest.mark.parametrize("tied", [False, True])
def test_token_rows_that_the_embedding_does_not_have_are_refused(tied: bool) -> None:
    model = tiny_model(tie_word_embeddings=tied)
    assert problems(model, LoraArguments(extra={"trainable_token_indices": [9999, 7, -1]})) == [
        "lora.trainable_token_indices: -1, 9999: the embedding has rows 0 to 260; tokens that the tokenizer gained get "
        "their rows by themselves"
    ]
    asked = {"embed_tokens": [1], "lm_haed": [2]}
    assert problems(model, LoraConfig(target_modules=["q_proj"], trainable_token_indices=asked)) == [
        "lora.trainable_token_indices: 'lm_haed' matches no module; did you mean 'lm_head'?"
    ]


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_rank_beyond_the_layer_is_said(variant: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "sft_toolkit.lora"):
        inject(tiny_model(), LoraArguments(r=40, variant=variant))
    assert caplog.messages == [
        "lora: rank 40 is more than the smaller side of model.layers.0.self_attn.q_proj (32): it can learn no more "
        "than rank 32 does"
    ]


def test_starts_that_take_weights_apart_need_whole_ones() -> None:
    model = tiny_model()
    parameter: Any
    for parameter in model.parameters():
        parameter.ds_id, parameter.ds_shape = 0, parameter.shape  # as ZeRO-3 marks what it has spread
    config = LoraArguments(variant="pissa")
    from sft_toolkit.lora.checks import check_config
    from sft_toolkit.lora.config import to_peft

    with pytest.raises(ConfigError, match="pissa decomposes whole weights, and ZeRO-3 has spread them"):
        check_config(model, to_peft(config, model))


def test_loftq_names_the_packages_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        "sft_toolkit.lora.checks.find_spec", lambda name: None if name in ("bitsandbytes", "scipy") else found(name)
    )
    assert problems(tiny_model(), LoraArguments(variant="loftq")) == [
        "lora.variant: loftq quantises with packages that are missing: pip install bitsandbytes scipy"
    ]
    if not torch.accelerator.is_available():
        monkeypatch.setattr("sft_toolkit.lora.checks.find_spec", lambda name: object())
        assert problems(tiny_model(), LoraArguments(variant="loftq")) == [
            "lora.variant: loftq quantises on a GPU, and there is none here"
        ]


def test_a_method_that_is_no_change_of_weights_can_not_be_merged(tmp_path: Any) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    base = type(tiny_model()).from_pretrained(tmp_path / "base")
    model = inject(base, AdaptionPromptConfig(adapter_len=4, adapter_layers=2, task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    with pytest.raises(ConfigError, match="AdaptionPromptConfig adds to what the layers compute"):
        merge(tmp_path / "adapter", tmp_path / "merged")
    bias = inject(type(base).from_pretrained(tmp_path / "base"), LoraArguments(r=2, extra={"lora_bias": True}))
    bias.save_pretrained(tmp_path / "bias")
    with pytest.raises(ConfigError, match=r"merge: LoraConfig can't be merged into this base: .*lora_bias=True"):
        merge(tmp_path / "bias", tmp_path / "merged")


def test_the_experts_of_a_mixture_take_an_adapter(tmp_path: Any) -> None:
    tiny_mixtral().save_pretrained(tmp_path / "base")

    def load() -> Any:
        return MixtralForCausalLM.from_pretrained(tmp_path / "base")

    extra = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    assert left_out(load()) == [
        "  lm_head               the head; name it in lora.targets or lora.modules_to_save to train it",
        "  experts.gate_up_proj  stacked experts; name them in lora.target_parameters to train them",
        "  experts.down_proj     stacked experts; name them in lora.target_parameters to train them",
    ]
    model = inject(load(), LoraArguments(r=2, targets=["q_proj"], extra=extra))
    before = logits(model)
    assert sorted(adapted_modules(model)) == ["model.layers.0.mlp.experts", "model.layers.0.self_attn.q_proj"]
    assert trainable_share(model)[0] > 0
    train(model)
    expected = logits(model)
    assert difference(expected, before) > 1e-4
    model.save_pretrained(tmp_path / "adapter")
    again = inject(load(), LoraArguments(adapter=str(tmp_path / "adapter")))
    assert difference(logits(again), expected) < 1e-5
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert difference(logits(MixtralForCausalLM.from_pretrained(tmp_path / "merged")), expected) < 1e-5
    assert problems(load(), LoraArguments(extra={"target_parameters": ["experts.gate_up"]})) == [
        "lora.target_parameters: 'experts.gate_up' matches no parameter; did you mean 'experts.gate_up_proj'? (this "
        "model has experts.down_proj, experts.gate_up_proj)"
    ]
