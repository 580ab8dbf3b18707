"""What a step costs beside the model: SFTTrainer and stock Trainer in turns, on one layer and the same token rows.

    python -m benchmarks.overhead [--rounds N] [--steps N] [--hidden N] [--profile FILE]

CPU time of this process, so that others on the machine count little; the median over rounds of ratios of one round.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import logging
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from datasets import Dataset
from transformers import DataCollatorForSeq2Seq, PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.parts import build_model, build_tokenizer, tokenise
from benchmarks.setting import BYTES, TICKETS, Setting, read_rows
from benchmarks.systems import trainer_options
from sft_toolkit import SFTArguments, SFTTrainer
from sft_toolkit.data.token_dataset import RowsDataset

SETTING = Setting(
    data=TICKETS,
    tokenizer=BYTES,
    rows=64,
    layers=1,
    hidden=64,
    batch=4,
    max_length=512,
    steps=0,
    warmup=1,
    learning_rate=1e-4,
    lora=False,
)


class CpuClock(TrainerCallback):
    """CPU-seconds per update, the warm-up left out."""

    def __init__(self, warmup: int) -> None:
        self.warmup, self.began, self.each = warmup, 0.0, 0.0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Called after each update."""
        now = time.process_time()
        if state.global_step == self.warmup:
            self.began = now
        elif state.global_step > self.warmup:
            self.each = (now - self.began) / (state.global_step - self.warmup)


def stock(setting: Setting, tokens: list[Any], tokenizer: Any, folder: str) -> Trainer:
    """`transformers.Trainer` with its own collator."""
    args = TrainingArguments(**trainer_options(setting, False, folder))
    model = build_model(setting, tokenizer)
    return Trainer(model, args, DataCollatorForSeq2Seq(tokenizer), Dataset.from_list(tokens))


def toolkit(setting: Setting, tokens: list[Any], tokenizer: Any, folder: str) -> Trainer:
    """`SFTTrainer` with its own loss, order, counts and logs."""
    args = SFTArguments(**trainer_options(setting, False, folder), activation_checkpointing=False, max_length=512)
    rows = RowsDataset(Dataset.from_list(tokens))
    return SFTTrainer(build_model(setting, tokenizer), args, None, rows, processing_class=tokenizer)


def timed(build: Callable[..., Trainer], setting: Setting, tokens: list[Any], tokenizer: Any) -> float:
    """CPU-milliseconds of an update."""
    clock = CpuClock(setting.warmup)
    with tempfile.TemporaryDirectory() as folder:
        trainer = build(setting, tokens, tokenizer, folder)
        trainer.add_callback(clock)
        trainer.remove_callback(PrinterCallback)
        gc.collect()
        trainer.train()
    return 1000 * clock.each


def main() -> None:
    """Print both and their ratio."""
    parser = argparse.ArgumentParser("python -m benchmarks.overhead", description="SFTTrainer's cost over Trainer.")
    add = parser.add_argument
    add("--rounds", type=int, default=7)
    add("--steps", type=int, default=60)
    add("--hidden", type=int, default=64)
    add("--logging-steps", type=int, default=1)
    add("--profile", type=Path, help="cProfile file of one training of SFTTrainer, for python -m pstats")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    setting = Setting(**{**vars(SETTING), "steps": options.steps, "warmup": 5, "hidden": options.hidden})
    tokenizer = build_tokenizer(setting)
    tokens = tokenise(read_rows(setting), tokenizer, setting.max_length)
    systems = {"stock": stock, "toolkit": toolkit}
    found: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(options.rounds + 1):
        for name in list(systems)[:: 1 if number % 2 else -1]:
            spent = timed(systems[name], setting, tokens, tokenizer)
            if number:  # the first round warms up
                found[name].append(spent)
    ratios = [own / other for own, other in zip(found["toolkit"], found["stock"], strict=True)]
    for name, each in found.items():
        print(f"{name:8} {median(each):7.2f} CPU-ms per update (best {min(each):.2f})")
    print(
        f"overhead {100 * (median(ratios) - 1):+.1f} % (median of {len(ratios)} rounds), one layer of {options.hidden}"
    )
    if options.profile:
        with cProfile.Profile() as profile:
            timed(toolkit, setting, tokens, tokenizer)
        profile.dump_stats(options.profile)


if __name__ == "__main__":
    main()
