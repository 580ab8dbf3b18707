"""Checkpoints that are written while training goes on: what it changes is copied at the end of a step.

Everything small (tokenizer, schedule, random states, counters) is written at once. Weights and optimizer state are
copied into host memory, and a thread writes them, through a shallow copy of the trainer that nobody else sees.
`torch.distributed.checkpoint.async_save` does the same for a format of its own; this one writes that of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from sft_toolkit.checkpoints.background import Background
from sft_toolkit.checkpoints.snapshot import in_host_memory
from sft_toolkit.errors import ConfigError


def async_save_problems(args: Any) -> Iterator[str]:
    """Why `async_save` can't hold under these arguments, by their keys."""
    if not args.async_save:
        return
    where = "async_save: copies weights and optimizer state, which "
    if args.deepspeed:
        yield where + "DeepSpeed keeps and writes itself, all ranks together; leave it out"
    if args.fsdp:
        yield where + "FSDP spreads over processes; leave it out"
    if args.parallelism_config is not None and args.parallelism_config.tp_enabled:
        yield where + "tensor parallelism spreads over processes; leave it out"
    if args.push_to_hub and args.hub_strategy != "end":
        yield f"async_save: hub_strategy {args.hub_strategy} uploads at the save itself; write hub_strategy: end"


class Copied:
    """The large part of a checkpoint, in host memory; None where this rank writes none."""

    weights: dict[str, Tensor] | None = None
    optimizer: dict[str, Any] | None = None


class BehindTrainer(Trainer):
    """Trainer, whose checkpoints can be split into what is written now and what is written later.

    Two private methods are overridden; `tests/resume/test_async_save.py` pins what is relied on.
    """

    _copied: Copied | None = None  # while a checkpoint is split: where the copies go
    _weights: dict[str, Tensor] | None = None  # of the shallow copy: what it writes

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._behind = Background("checkpoint-writer")
        problems = list(async_save_problems(self.args)) if hasattr(self.args, "async_save") else []
        if problems:
            raise ConfigError(problems)

    @contextmanager
    def splitting(self) -> Iterator[Copied]:
        """What Trainer saves in here is copied where it is large, and written where it is small."""
        self._copied = copied = Copied()
        try:
            yield copied
        finally:
            self._copied = None

    def write_copied(self, copied: Copied, folder: Path) -> None:
        """Write the large part; for the thread."""
        writer = copy.copy(self)
        # A tokenizer in Rust can't be written while the training thread encodes with it: it is written already.
        writer.processing_class = writer.data_collator = cast(Any, None)
        writer._copied, writer._weights = None, copied.weights
        if copied.weights is not None:
            writer.save_model(str(folder), _internal_call=True)
        if copied.optimizer is not None:
            torch.save(copied.optimizer, folder / OPTIMIZER_NAME)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's; the weights of a checkpoint that is split are copied."""
        if self._copied is None or output_dir is None:
            super().save_model(output_dir, _internal_call)
            return
        if self.args.should_save:
            model = cast(nn.Module, self.model)
            self._copied.weights = in_host_memory(model.state_dict(), self._is_constant())
            if self.processing_class is not None:
                self.processing_class.save_pretrained(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        super()._save(output_dir, self._weights if state_dict is None else state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._copied is None:
            super()._save_optimizer_and_scheduler(output_dir)
        elif self.args.should_save:
            self._copied.optimizer = in_host_memory(cast(Any, self.optimizer).state_dict())
            torch.save(cast(Any, self.lr_scheduler).state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _is_constant(self) -> Any:
        """The base under an adapter: no update changes it, and it may be larger than the host's memory."""
        if not hasattr(self.model, "peft_config"):
            return lambda _: False
        parameters = cast(nn.Module, self.model).parameters()
        changing = {p.data_ptr() for group in cast(Any, self.optimizer).param_groups for p in group["params"]}
        frozen = {p.data_ptr() for p in parameters if not p.requires_grad} - changing
        return lambda tensor: tensor.data_ptr() in frozen
