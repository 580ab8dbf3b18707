"""What all systems share: model, tokenizer, rows tokenised by hand, and the meters."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from peft import LoraConfig
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerBase,
    TrainerCallback,
)

from benchmarks.setting import BYTES, ROOT, Setting

TokenRow = dict[str, list[int]]
"""`input_ids` and `labels` of one document."""

Batch = dict[str, torch.Tensor]
"""What a collator returns."""


def build_tokenizer(setting: Setting) -> PreTrainedTokenizerBase:
    """The tokenizer of a local model folder, or the byte tokenizer of the tests."""
    if setting.tokenizer == BYTES:
        from tests.tiny import tiny_tokenizer

        return tiny_tokenizer()
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(ROOT / setting.tokenizer)
    return tokenizer


def build_model(setting: Setting, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A Llama in fp32 with random weights, the same for the same seed; embeddings tied, as in small models."""
    heads = max(1, setting.hidden // 64)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=setting.hidden,
        intermediate_size=setting.hidden * 8 // 3,
        num_hidden_layers=setting.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
        max_position_embeddings=max(2048, setting.max_length),
        tie_word_embeddings=True,
        use_cache=False,  # with a cache, attention does not separate packed documents
    )
    torch.manual_seed(setting.seed)
    return LlamaForCausalLM(config)


def lora_config() -> LoraConfig:
    """Rank 16 on all linear layers."""
    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def tokenise(rows: Iterable[dict[str, Any]], tokenizer: Any, max_length: int) -> list[TokenRow]:
    """Token rows the way one writes it by hand: each assistant turn is what its prefix does not yet hold.

    Right for templates that render a prefix of a conversation as a prefix of its text. The end-of-turn token is
    learned, the newline behind it is not. Rows longer than `max_length` are dropped, as the toolkit does by default.
    """
    tokens = (_tokenise_one(as_messages(row), tokenizer) for row in rows)
    return [row for row in tokens if len(row["input_ids"]) <= max_length]


def as_messages(row: dict[str, Any]) -> list[dict[str, str]]:
    """The chat of a row in the layout `messages` or `alpaca`."""
    if "messages" in row:
        return list(row["messages"])
    asked = "\n".join(part for part in (row["instruction"], row.get("input")) if part)
    system = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]


def _tokenise_one(messages: list[dict[str, str]], tokenizer: Any) -> TokenRow:
    def render(part: list[dict[str, str]], prompts: bool) -> list[int]:
        return list(tokenizer.apply_chat_template(part, add_generation_prompt=prompts, return_dict=False))

    input_ids = render(messages, False)
    labels = [-100] * len(input_ids)
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, end = len(render(messages[:i], True)), len(render(messages[: i + 1], False))
        while end > start and input_ids[end - 1] != tokenizer.eos_token_id:
            end -= 1
        labels[start:end] = input_ids[start:end]
    return {"input_ids": input_ids, "labels": labels}


def count(batches: Iterable[Batch]) -> tuple[int, int, int]:
    """Tokens without padding, supervised tokens, and slots (padding included) of some batches."""
    tokens = supervised = slots = 0
    for batch in batches:
        labels, mask = batch["labels"], batch.get("attention_mask")
        tokens += int(labels.numel() if mask is None else mask.sum())
        supervised += int((labels[:, 1:] != -100).sum())
        slots += labels.numel()
    return tokens, supervised, slots


def over_epochs(epoch: Callable[[], Iterable[Batch]], start: int, stop: int) -> Iterable[Batch]:
    """Batches `start` to `stop` of epoch behind epoch; `epoch` gives the batches of one."""

    def endless() -> Iterable[Batch]:
        while True:
            yield from epoch()

    return islice(endless(), start, stop)


@dataclass
class StepClock(TrainerCallback):
    """Reads the clocks at the end of the warm-up and of the training, so that whole updates lie in between."""

    warmup: int
    steps: int
    marks: list[tuple[float, float]] = field(default_factory=list)

    def tick(self, step: int) -> None:
        """Tell that the 1-based `step` has ended."""
        if step in (self.warmup, self.steps):
            self.marks.append((time.perf_counter(), time.process_time()))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called by Trainer after each update."""
        self.tick(state.global_step)

    def elapsed(self) -> tuple[float, float]:
        """Wall seconds and CPU-seconds (over all threads) of the measured updates."""
        (wall, cpu), (wall_end, cpu_end) = self.marks
        return wall_end - wall, cpu_end - cpu


def peak_mib() -> float:
    """Largest resident memory that this process ever had, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes there, KiB on Linux
