"""Tiny random models of many families, over the byte vocabulary of `tests.tiny`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from peft import LoraConfig
from torch import nn

TEXT: dict[str, Any] = {
    "vocab_size": 261,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 4,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
}
MROPE = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
PARTIAL_MROPE = {"rope_type": "default", "mrope_section": [1, 0, 0], "partial_rotary_factor": 0.25, "rope_theta": 1e4}
VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}


def build(family: str, **changes: Any) -> Any:
    """`build("Llama", tie_word_embeddings=True)`: a causal model in fp32, the same weights each time."""
    config = getattr(transformers, f"{family}TextConfig", getattr(transformers, f"{family}Config"))(**TEXT | changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForCausalLM")(config)


def gpt2() -> Any:
    """Learned positions, tied embeddings; its config has names of its own."""
    sizes: dict[str, Any] = {"vocab_size": 261, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 512}
    no_dropout: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **no_dropout, eos_token_id=4))


def multimodal(family: str, vision: dict[str, Any], **text: Any) -> Any:
    """A vision language model, to be fed with text alone."""
    config = getattr(transformers, f"{family}Config")(text_config=TEXT | text, vision_config=vision)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return getattr(transformers, f"{family}ForConditionalGeneration")(config)


def with_biased_head(model: Any) -> Any:
    """The model with a bias in its head."""
    head = model.get_output_embeddings()
    biased = nn.Linear(head.in_features, head.out_features)
    with torch.no_grad():
        biased.weight.copy_(head.weight)
        biased.bias.copy_(torch.linspace(-1, 1, head.out_features))
    model.set_output_embeddings(biased)
    return model


def lora_on_the_head() -> LoraConfig:
    """A LoRA on attention and head, whose B is not zero."""
    torch.manual_seed(0)
    return LoraConfig(r=4, target_modules=["q_proj", "lm_head"], init_lora_weights=False, task_type="CAUSAL_LM")


MOE = {"output_router_logits": True, "router_aux_loss_coef": 0.5, "num_experts_per_tok": 2}
# name -> (how it is built, the path of its loss)
FAMILIES: dict[str, tuple[Callable[[], Any], str]] = {
    "llama": (lambda: build("Llama"), "chunked"),
    "llama-tied": (lambda: build("Llama", tie_word_embeddings=True), "chunked"),
    "llama-biased-head": (lambda: with_biased_head(build("Llama")), "chunked"),
    "qwen2": (lambda: build("Qwen2"), "chunked"),
    "qwen3": (lambda: build("Qwen3"), "chunked"),
    "mistral-sliding-window": (lambda: build("Mistral", sliding_window=16), "chunked"),
    "phi3-sliding-window": (lambda: build("Phi3", sliding_window=16), "chunked"),
    "gemma3": (lambda: build("Gemma3", sliding_window=16), "chunked"),
    "gpt2-tied": (gpt2, "chunked"),
    "gemma2-capped-logits": (lambda: build("Gemma2", final_logit_softcapping=0.5), "supervised logits"),
    "cohere-scaled-logits": (lambda: build("Cohere"), "supervised logits"),
    "granite-scaled-logits": (lambda: build("Granite", logits_scaling=8.0), "supervised logits"),
    "mixtral-router-loss": (lambda: build("Mixtral", num_local_experts=4, **MOE), "chunked"),
    "qwen3-moe-router-loss": (
        lambda: build("Qwen3Moe", num_experts=4, moe_intermediate_size=16, decoder_sparse_step=1, **MOE),
        "chunked",
    ),
    "qwen3-vl": (
        lambda: multimodal("Qwen3VL", {**VISION, "deepstack_visual_indexes": [0]}, rope_parameters=MROPE),
        "chunked",
    ),
    "qwen3.5-linear-attention": (
        lambda: multimodal(
            "Qwen3_5", VISION, layer_types=["linear_attention", "full_attention"], rope_parameters=PARTIAL_MROPE
        ),
        "chunked",
    ),
    "qwen3.5": (
        lambda: multimodal("Qwen3_5", VISION, layer_types=["full_attention"] * 2, rope_parameters=PARTIAL_MROPE),
        "chunked",
    ),
}
