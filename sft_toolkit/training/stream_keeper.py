"""Keeps the place of a stream in every checkpoint, and says at the end what became of its rows."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback

from sft_toolkit.data.report import Tally, describe, total
from sft_toolkit.data.stream import Place, Streamed
from sft_toolkit.errors import CheckpointError

logger = logging.getLogger(__name__)

REPORT = "data_report.json"


class StreamKeeper(TrainerCallback):
    """A callback of trainings on a stream.

    A checkpoint gets `stream-RANK.json`. Where one lacks it, the stream is read from its beginning: slower, but the
    rows are the same.

    Args:
        dataset: of this rank.
    """

    def __init__(self, dataset: Streamed) -> None:
        self.dataset = dataset

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Go to the place of the checkpoint that the training resumes from."""
        file = _file(args, state.global_step)
        if not state.global_step:
            return
        if not file.is_file():
            logger.warning("%s is missing: the stream is read from its beginning", file)
            return
        position = json.loads(file.read_text(encoding="utf-8"))
        ranks = position.pop("ranks")
        if ranks != args.world_size:
            raise CheckpointError(f"{file}: the stream was read by {ranks} processes, not {args.world_size}")
        self.dataset.stream.go_to(Place(**position))

    def add_to_checkpoint(self, folder: Path, args: Any, state: Any) -> None:
        """Write down where this rank is, into a checkpoint that is being written."""
        items = args.per_device_train_batch_size * args.gradient_accumulation_steps
        position = self.dataset.position(state.global_step, items)
        file = folder / _name(args)
        file.write_text(json.dumps(position, ensure_ascii=False), encoding="utf-8")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Add up the counts of all ranks for the console and `data_report.json`."""
        tally = total(Tally(**counts) for counts in gather_object([self.dataset.stream.tally.as_dict()]))
        if args.process_index:
            return
        logger.info("%s", describe("stream", tally))
        path = Path(args.output_dir) / REPORT
        if path.is_file():
            report = json.loads(path.read_text(encoding="utf-8"))
            path.write_text(
                json.dumps({**report, **tally.as_dict()}, ensure_ascii=False, indent=2) + "\n", encoding="utf-8"
            )


def _file(args: Any, step: int) -> Path:
    return Path(args.output_dir) / f"checkpoint-{step}" / _name(args)


def _name(args: Any) -> str:
    return f"stream-{args.process_index}.json"


def keepers_of(dataset: Any) -> list[TrainerCallback]:
    """The keeper of a streamed data set; none for others."""
    return [StreamKeeper(dataset)] if isinstance(dataset, Streamed) else []
