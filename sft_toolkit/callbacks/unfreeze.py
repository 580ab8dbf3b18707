"""Layers that join the training one after the other (Howard and Ruder, 2018: gradual unfreezing)."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.errors import ConfigError
from sft_toolkit.model.freezing import matching

logger = logging.getLogger(__name__)


TAKEN_STOCK = (
    "unfreeze: DeepSpeed, FSDP and DDP take stock of the trainable weights once; use one process, or DDP with "
    "training.ddp_find_unused_parameters: true"
)


class UnfreezeCallback(TrainerCallback):
    """Trains what the schedule has named so far; everything else that is trainable waits, its weights untouched.

    A waiting weight has no gradient: the optimizer passes over it, weight decay included, and the backward stops
    where nothing below is trained. What was frozen before the training began stays so.

    Args:
        schedule: {share of the run, from 0 up to below 1: patterns on parameter names}, as in
            `{0: ["lm_head*"], 0.25: ["*.layers.1.*"]}`; patterns add up.

    Raises:
        ConfigError: a pattern in vain, a share outside of the run, or an engine that takes stock of the trainable
            weights once, at the start.
    """

    def __init__(self, schedule: Mapping[Any, Sequence[str]]) -> None:
        try:
            given = {float(share): [p] if isinstance(p, str) else list(p) for share, p in schedule.items()}
        except ValueError as error:
            raise ConfigError(f"unfreeze: a share of the run is a number from 0 to 1: {error}") from error
        wrong = [share for share in given if not 0 <= share < 1]
        if wrong or not given:
            raise ConfigError(f"unfreeze: shares of the run are from 0 up to below 1, not {wrong or 'none at all'}")
        self.schedule = dict(sorted(given.items()))
        self._names: list[tuple[float, set[str]]] = []
        self._waiting: dict[str, nn.Parameter] = {}

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **kwargs: Any,
    ) -> None:
        if args.deepspeed or args.fsdp or (args.world_size > 1 and not args.ddp_find_unused_parameters):
            raise ConfigError(TAKEN_STOCK)
        bare = getattr(model, "module", model) if args.world_size > 1 else model
        self._names = [(share, matching(bare, patterns, "unfreeze")) for share, patterns in self.schedule.items()]
        self._waiting = {name: p for name, p in bare.named_parameters() if p.requires_grad}
        for parameter in self._waiting.values():
            parameter.requires_grad_(False)
        self._release(state)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._release(state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for parameter in self._waiting.values():
            parameter.requires_grad_(True)
        self._waiting = {}

    def _release(self, state: TrainerState) -> None:
        done = state.global_step / max(state.max_steps, 1)
        while self._names and self._names[0][0] <= done:
            _, names = self._names.pop(0)
            joining = [self._waiting.pop(name) for name in sorted(names & self._waiting.keys())]
            for parameter in joining:
                parameter.requires_grad_(True)
            size = sum(parameter.numel() for parameter in joining)
            if state.is_world_process_zero:
                logger.info("step %d: %s more parameters are trained", state.global_step, f"{size:,}")
