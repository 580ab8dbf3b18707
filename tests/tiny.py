"""A tokenizer whose labels can be counted by hand, and a model that trains in milliseconds.

Every byte is one token: ids 0 `<pad>`, 1 `<s>`, 2 `</s>`, 3 `<|im_start|>`, 4 `<|im_end|>` (= eos), then the 256
byte symbols. The template is ChatML without `{% generation %}` markers. `chat("a", "b")` renders to 23 ids, of which
index 20 (`b`) and 21 (`<|im_end|>`) are supervised.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIALS = ["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer(
    template: str | None = CHATML,
    *,
    pad: str = "<pad>",
    bos_by_tokenizer: bool = False,
    merges: list[tuple[str, str]] | None = None,
    extra_specials: list[str] | None = None,
) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the 256 byte symbols; `merges` adds pairs, `extra_specials` control tokens of a family."""
    merges = merges or []
    symbols = SPECIALS + sorted(pre_tokenizers.ByteLevel.alphabet()) + [a + b for a, b in merges]
    core = Tokenizer(models.BPE(vocab={s: i for i, s in enumerate(symbols)}, merges=merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not merges)
    core.decoder = decoders.ByteLevel()
    if bos_by_tokenizer:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token="<|im_end|>",
        pad_token=pad,
        additional_special_tokens=["<|im_start|>", *(extra_specials or [])],
    )
    tokenizer.chat_template = template
    return tokenizer


def tiny_model(seed: int = 0, vocab_size: int = 261, **overrides: Any) -> LlamaForCausalLM:
    """A 2-layer Llama of hidden size 32 in fp32, the same weights for the same seed."""
    config: dict[str, Any] = {
        "vocab_size": vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 4,
        "pad_token_id": 0,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**{**config, **overrides}))


def chat(user: str, assistant: str) -> list[dict[str, str]]:
    """One user turn and one assistant turn."""
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def supervised_text(tokenizer: PreTrainedTokenizerFast, input_ids: Any, labels: Any) -> str:
    """What is learned: the decoded ids whose label is not -100."""
    kept = [int(i) for i, label in zip(input_ids, labels, strict=True) if int(label) != -100]
    return str(tokenizer.decode(kept, skip_special_tokens=False))
