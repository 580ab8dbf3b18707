"""A Llama of 1.2 billion parameters in bf16 on one GPU, bins of 4,096 tokens: tokens/s, MFU and peak memory.

    python -m benchmarks.gpu                                       # LoRA and all weights, each attention that is there
    python -m benchmarks.gpu --layers 2 --hidden 64 --vocabulary 1000 --bin 256 --steps 6    # anywhere, to try it out

Attention: `sdpa` with a dense mask over the bin, `per document` as the toolkit chooses by itself (torch's `varlen_attn`
on GPUs that have it), and `flash_attention_2` where it is installed. Random weights and tokens; a third is supervised.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback

from benchmarks.parts import lora_config
from sft_toolkit import SFTArguments, SFTTrainer


def main() -> int:
    """Print a table with the device's name."""
    options = parse()
    logging.disable(logging.INFO)
    cuda = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if cuda else "CPU"
    print(f"{device}, torch {torch.__version__}; bins of {options.bin}, {options.steps} updates, checkpointing on")
    print("| weights | attention | what ran | tokens/s | MFU | peak GiB | last loss |\n|---|---|---|--:|--:|--:|--:|")
    for lora in (True, False):
        for attention in ("sdpa", "per document", *(["flash_attention_2"] if find_spec("flash_attn") else [])):
            print(f"| {'LoRA r 16' if lora else 'all'} | {attention} | {measured(options, lora, attention, cuda)} |")
    return 0


def measured(options: argparse.Namespace, lora: bool, attention: str, cuda: bool) -> str:
    """The columns of `measure`, or that it does not fit."""
    try:
        return measure(options, lora, attention, cuda)
    except torch.cuda.OutOfMemoryError:
        return "out of memory | - | - | - | -"


def parse() -> argparse.Namespace:
    """The command line; its defaults are the shape of Llama 3.2 1B."""
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description="Packed bf16 training on one GPU.")
    for name, value in {"layers": 16, "hidden": 2048, "vocabulary": 128_256, "bin": 4096, "micro-batch": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=16)
    return parser.parse_args()


def measure(options: argparse.Namespace, lora: bool, attention: str, cuda: bool) -> str:
    """One training: what attended, and the last four columns; the first half of the updates warms up."""
    loaded = "flash_attention_2" if attention == "flash_attention_2" else "sdpa"
    model = build(options, loaded, torch.bfloat16 if cuda else torch.float32)
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    with tempfile.TemporaryDirectory() as folder:
        args = SFTArguments(
            output_dir=folder,
            max_length=options.bin,
            packing=True,
            packed_attention="auto" if attention == "per document" else "as_loaded",
            per_device_train_batch_size=options.micro_batch,
            max_steps=options.steps,
            logging_steps=options.steps // 2,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        adapter: Any = lora_config() if lora else None
        trainer = SFTTrainer(model, args, None, Dataset.from_list(list(rows(options))), peft_config=adapter)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    last = [entry for entry in trainer.state.log_history if "tokens_per_second" in entry][-1]
    peak = f"{torch.cuda.max_memory_allocated() / 2**30:.1f}" if cuda else "-"
    speed, mfu = f"{last['tokens_per_second']:,.0f}", f"{last['mfu']:.1%}" if "mfu" in last else "-"
    return f"{trainer.paths.attention.path} | {speed} | {mfu} | {peak} | {last['loss']:.4f}"


def build(options: argparse.Namespace, attention: str, dtype: torch.dtype) -> LlamaForCausalLM:
    """Random weights, the same each time."""
    heads = max(1, options.hidden // 64)
    config = LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=4 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 4),
        max_position_embeddings=options.bin,
        tie_word_embeddings=True,
        attn_implementation=attention,  # type: ignore[call-arg]
        dtype=dtype,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return cast(LlamaForCausalLM, model.to(dtype))


def rows(options: argparse.Namespace) -> Iterator[dict[str, list[int]]]:
    """Documents of 16 tokens to half a bin, enough for all updates."""
    random = np.random.default_rng(0)
    left = options.bin * options.micro_batch * options.steps
    while left > 0:
        length = int(random.integers(16, options.bin // 2))
        ids = random.integers(5, options.vocabulary, length).tolist()
        yield {"input_ids": ids, "labels": [-100] * (2 * length // 3) + ids[2 * length // 3 :]}
        left -= length


if __name__ == "__main__":
    sys.exit(main())
