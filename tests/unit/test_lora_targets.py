"""Which modules get an adapter, and what is said of names that match nothing."""

from __future__ import annotations

import pytest
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.inject import inject
from sft_toolkit.lora.targets import adapted_modules, resolve_targets, summary
from tests.tiny import tiny_model

LLAMA = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


class TwoTowers(nn.Module):
    """A stand-in for a multimodal model: the same layer names in the text and the image part."""

    def __init__(self) -> None:
        super().__init__()
        self.vision_tower = nn.ModuleDict({"q_proj": nn.Linear(2, 2)})
        self.language_model = nn.ModuleDict({"q_proj": nn.Linear(2, 2), "router": nn.Linear(2, 2)})


@pytest.mark.parametrize("targets", ["auto", "all-linear"])
def test_all_linear_layers_but_the_head(targets: str) -> None:
    assert resolve_targets(tiny_model(), targets) == LLAMA


def test_auto_knows_the_layers_of_gpt2() -> None:
    model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=1, n_head=2))
    assert resolve_targets(model, "auto") == ["c_attn", "c_fc", "c_proj"]


def test_auto_leaves_the_routing_of_experts_alone() -> None:
    config = MixtralConfig(
        vocab_size=16,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=2,
    )
    assert resolve_targets(MixtralForCausalLM(config), "auto") == ["k_proj", "o_proj", "q_proj", "v_proj"]


def test_auto_takes_the_text_part_only_and_names_it_in_full() -> None:
    assert resolve_targets(TwoTowers(), "auto") == ["language_model.q_proj"]
    assert resolve_targets(TwoTowers(), "all-linear") == ["q_proj", "router"]


def test_names_and_expressions_pass() -> None:
    model = tiny_model()
    assert resolve_targets(model, ["q_proj", "layers.1.mlp.up_proj"]) == ["q_proj", "layers.1.mlp.up_proj"]
    assert resolve_targets(model, r".*\.1\.self_attn\.[qv]_proj") == r".*\.1\.self_attn\.[qv]_proj"
    assert resolve_targets(model, "q_proj") == ["q_proj"]


def test_an_unmatched_name_is_refused_with_its_neighbour() -> None:
    with pytest.raises(ConfigError) as caught:
        inject(tiny_model(), LoraArguments(targets=["q_proj", "qq_proj", "nothing"]))
    known = "(this model has down_proj, embed_tokens, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj)"
    assert caught.value.problems == [
        f"lora.targets: 'qq_proj' matches no module; did you mean 'q_proj'? {known}",
        f"lora.targets: 'nothing' matches no module {known}",
    ]


def test_an_expression_without_a_match_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^lora\.targets: '\.\*\\\.9\\\.q_proj' matches no module"):
        resolve_targets(tiny_model(), r".*\.9\.q_proj")


def test_a_broken_expression_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^lora\.targets: '\(q_proj' is no regular expression: missing \)"):
        resolve_targets(tiny_model(), "(q_proj")


def test_no_names_at_all_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^lora\.targets is empty; this model has down_proj, "):
        resolve_targets(tiny_model(), [])


def test_unmatched_modules_to_save_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^lora\.modules_to_save: 'embed_token' matches no module; did you mean 'embed_"
    ):
        inject(tiny_model(), LoraArguments(modules_to_save=["embed_token"]))


def test_the_table_counts_what_is_adapted() -> None:
    model = inject(tiny_model(), LoraArguments(r=4, targets=["q_proj", "down_proj"]))
    assert sorted(adapted_modules(model)) == [
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp.down_proj",
        "model.layers.1.self_attn.q_proj",
    ]
    assert summary(model) == "  down_proj     2  32 x 64\n  q_proj        2  32 x 32"
