"""One rank of `benchmarks.memory`: a tiny training, then the one that is measured."""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from peft import LoraConfig
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.memory import LENGTH, TINY, WIDE, peak
from sft_toolkit import SFTArguments, SFTTrainer
from sft_toolkit.engines.engagement import engaged
from sft_toolkit.planning.memory import memory_of
from sft_toolkit.planning.setup import setup_of
from sft_toolkit.planning.shape import shape_of


def train(sizes: dict[str, Any], case: dict[str, Any]) -> tuple[SFTTrainer, int]:
    """Three updates on token rows of `LENGTH`; the trainer, and the bytes that `plan` predicts for one rank."""
    options = {key: value for key, value in case.items() if key not in ("ranks", "adapter", "rows")}
    micro = case.get("rows", 1)
    with tempfile.TemporaryDirectory() as folder:
        model: Any = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=8, num_key_value_heads=4))
        args = SFTArguments(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=micro,
            max_length=LENGTH,
            packing=True,  # rows of tokens take this trainer's own loss only where they are packed
            save_strategy="no",
            logging_steps=1,
            disable_tqdm=True,
            **options,
        )
        ids = [[(i + j) % 500 for j in range(LENGTH)] for i in range(24)]
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=[{"input_ids": row, "labels": row} for row in ids],
            peft_config=LoraConfig(r=16, target_modules="all-linear") if case.get("adapter") else None,
        )
        trainer.train()
    found = engaged(trainer)
    shape = shape_of(trainer.model)  # type: ignore[arg-type]
    devices = {"devices": found.world_size, "devices_per_node": found.world_size}
    setup = setup_of(args, shape, on_cpu=True, precision="fp32", strategy=found.strategy, **devices)
    memory = memory_of(shape, setup)
    if os.environ.get("RANK", "0") == "0":
        print({part: round(size / 2**20) for part, size in memory.device.items()}, file=sys.stderr)
    return trainer, memory.per_device


def main() -> None:
    """Write what was predicted and measured; only rank 0."""
    case, result = json.loads(sys.argv[1]), Path(sys.argv[2])
    train(TINY, case)
    gc.collect()
    before = psutil.Process().memory_info().rss  # not its peak: what the tiny training gave back is used again
    _, predicted = train(WIDE, case)
    if os.environ.get("RANK", "0") == "0":
        result.write_text(json.dumps({"predicted": predicted, "measured": peak() - before}), encoding="utf-8")


if __name__ == "__main__":
    main()
