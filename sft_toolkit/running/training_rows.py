"""The training rows of a run: prepared ones, or the stream that makes them while the training goes on."""

from __future__ import annotations

from typing import Any, cast

from sft_toolkit.args import DataArguments
from sft_toolkit.data.loading import for_training, seed_of
from sft_toolkit.data.prepare import Prepared
from sft_toolkit.data.streaming import stream_sources
from sft_toolkit.errors import ConfigError
from sft_toolkit.training_args import SFTArguments


def training_rows(data: DataArguments, args: SFTArguments, tokenizer: Any, prepared: Prepared) -> Any:
    """What `SFTTrainer` trains on."""
    if data.streaming:
        return stream_sources(data, tokenizer, args)
    return for_training(cast(Any, prepared.train), args, seed_of(args), prepared.plan)


def refuse_no_updates(args: SFTArguments, prepared: Prepared) -> None:
    """Refuse a run that would end well without one update: every batch is an incomplete one, and those are dropped."""
    if prepared.train is None:
        return
    rows = len(prepared.train) if prepared.plan is None else len(prepared.plan.bins)
    batch = args.per_device_train_batch_size * args.world_size
    if args.dataloader_drop_last and rows < batch:
        what = "rows" if prepared.plan is None else "packed rows"
        raise ConfigError(
            f"training.dataloader_drop_last: true leaves nothing to train on: {rows} {what}, and a batch takes {batch} "
            f"(per_device_train_batch_size {args.per_device_train_batch_size} x {args.world_size} processes)"
        )
