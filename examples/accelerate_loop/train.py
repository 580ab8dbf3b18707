"""Supervised fine-tuning in a loop of your own: Accelerate, and the building blocks of sft_toolkit.

    accelerate launch examples/accelerate_loop/train.py --model FOLDER --data data/tickets/train.jsonl --output out

Nothing is hidden in a trainer: rows become tokens, tokens become packed rows, and an update is some micro-batches whose
summed losses are divided once, by the supervised tokens of all of them over all ranks. `tests/docs` holds this loop
against SFTTrainer: the same losses and weights.
"""

from __future__ import annotations

import argparse
import json
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, get_scheduler

from sft_toolkit.args import PreparationArguments
from sft_toolkit.attention.isolation import refuse_leaking
from sft_toolkit.attention.packed import PackedAttention
from sft_toolkit.data import EpochSampler, PackedCollator, tokenize_rows
from sft_toolkit.data.loading import for_training
from sft_toolkit.loss.supervised import SupervisedForward
from sft_toolkit.metering.accounting import TokenMeter


@dataclass
class Options:
    """What one might want to change."""

    max_length: int = 1024
    micro_batch: int = 1
    accumulation: int = 4
    epochs: int = 1
    learning_rate: float = 1e-4
    max_grad_norm: float = 1.0
    seed: int = 42


def train(model: Any, tokenizer: Any, rows: list[dict[str, Any]], options: Options) -> list[dict[str, float]]:
    """Train all weights of `model` in place; what was logged, an entry per update."""
    accelerator = Accelerator()
    ranks = accelerator.num_processes

    def sum_over_ranks(value: Tensor) -> Tensor:
        summed: Tensor = accelerator.reduce(value.to(accelerator.device), "sum")
        return summed

    # Rows -> tokens whose masks are proven -> bins of max_length. Blank bins even out the ranks; no row is repeated.
    policies = PreparationArguments(max_length=options.max_length, packing=True)
    tokens, _ = tokenize_rows(rows, policies, tokenizer)
    bins: Any = for_training(tokens, policies, options.seed)
    order = EpochSampler(len(bins), options.seed, pad_to_multiple_of=options.micro_batch * ranks)
    loader = DataLoader(bins, options.micro_batch, sampler=order, collate_fn=PackedCollator())

    optimizer = torch.optim.AdamW(model.parameters(), options.learning_rate, weight_decay=0.0)
    wrapped, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    updates = -(-len(loader) // options.accumulation) * options.epochs
    schedule = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=updates)

    # Prove on the model itself that documents attend to themselves alone, and that the loss may be computed in chunks.
    attention = PackedAttention()
    attention.switch_on(wrapped, model, half=accelerator.mixed_precision != "no")
    refuse_leaking(wrapped, model)
    forward = SupervisedForward(model)
    forward.try_chunks(wrapped)

    meter = TokenMeter()
    log: list[dict[str, float]] = []
    wrapped.train()
    for epoch in range(options.epochs):
        order.set_epoch(epoch)
        batches = iter(loader)
        while window := list(islice(batches, options.accumulation)):
            items = sum_over_ranks(meter.count(window))
            for number, batch in enumerate(window, start=1):
                # Gradients are exchanged once, with the last micro-batch.
                with nullcontext() if number == len(window) else accelerator.no_sync(wrapped):
                    totals, _ = forward(wrapped, batch)
                    # DDP averages gradients over the ranks; times their number it is the sum over all tokens.
                    accelerator.backward(totals.loss / items * ranks)
                meter.add(len(log), totals, totals.nll / items * ranks)
            norm = accelerator.clip_grad_norm_(model.parameters(), options.max_grad_norm)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            entry, _ = meter.log_entry(sum_over_ranks)
            log.append({**entry, "grad_norm": float(norm)})
            accelerator.print(f"update {len(log)} of {updates}: loss {entry['loss']:.4f}")
    attention.switch_off()
    return log


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Fine-tune a model on chats, in a loop written by hand.")
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--data", required=True, type=Path, help="JSONL of chats")
    parser.add_argument("--output", required=True, type=Path)
    given = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(given.model)
    model = AutoModelForCausalLM.from_pretrained(given.model, dtype=torch.float32)
    rows = [json.loads(line) for line in given.data.read_text(encoding="utf-8").splitlines() if line.strip()]
    train(model, tokenizer, rows, Options())
    if Accelerator().is_main_process:
        model.save_pretrained(given.output)
        tokenizer.save_pretrained(given.output)


if __name__ == "__main__":
    main()
