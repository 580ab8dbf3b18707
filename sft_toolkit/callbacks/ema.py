"""A moving average of the trained weights, which is what the run ends with."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from sft_toolkit.callbacks.files import in_output_dir
from sft_toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "ema.safetensors"


class EmaCallback(TrainerCallback):
    """Keeps `average = d average + (1 - d) weight` of every trainable parameter, in fp32, once per update.

    `d = min(decay, (1 + n) / (10 + n))` after n updates, so that the start is soon forgotten. When training ends the
    averages become the weights: `final/` holds them. Checkpoints hold the weights that are trained, and the averages
    in `ema.safetensors`; a resumed run goes on from both.

    Args:
        decay: share of the average that is kept at each update; 0.999 averages over about 1,000 updates.

    Raises:
        ConfigError: weights that are spread over processes, or `load_best_model_at_end`, which contradicts an average.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not 0 <= decay < 1:
            raise ConfigError(f"ema: decay is from 0 up to below 1, but is {decay}")
        self.decay = decay
        self.averages: dict[str, Tensor] = {}
        self._weights: dict[str, nn.Parameter] = {}
        self._updates = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if args.load_best_model_at_end:
            raise ConfigError("ema: an average of all updates is not the best model: leave load_best_model_at_end out")
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if any(hasattr(p, "ds_id") or type(p).__name__ == "DTensor" for p in self._weights.values()):
            raise ConfigError("ema: ZeRO-3 and FSDP spread the weights over processes: use zero2, or leave ema out")
        self._updates = state.global_step
        self.averages = {name: p.detach().float().clone() for name, p in self._weights.items()}
        if state.global_step:
            self._go_on(in_output_dir(args, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}") / FILE_NAME)

    @torch.no_grad()
    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._updates += 1
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates))
        for name, parameter in self._weights.items():
            self.averages[name].lerp_(parameter.detach().float(), 1 - decay)

    def add_to_checkpoint(self, folder: Path, args: TrainingArguments, state: TrainerState) -> None:
        """Write the averages into a checkpoint that is being written (SFTTrainer asks)."""
        if state.is_world_process_zero:
            save_file({name: t.cpu().contiguous() for name, t in self.averages.items()}, folder / FILE_NAME)

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # A stock Trainer asks for nothing before its checkpoint is written.
        folder = in_output_dir(args, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        if folder.is_dir() and not (folder / FILE_NAME).exists():
            self.add_to_checkpoint(folder, args, state)

    @torch.no_grad()
    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for name, parameter in self._weights.items():
            parameter.copy_(self.averages[name])
        self._weights, self.averages = {}, {}

    def _go_on(self, path: Path) -> None:
        held = load_file(path) if path.is_file() else {}
        if held.keys() != self.averages.keys():
            logger.warning("%s does not hold the averages of these weights: they start from the checkpoint's", path)
            return
        for name, tensor in held.items():
            self.averages[name].copy_(tensor)
