"""How much room on the disk checkpoints and the final weights take, asked before training and before each save."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import broadcast_object_list
from torch import nn

from sft_toolkit.checkpoints.checkpoint import checkpoints
from sft_toolkit.checkpoints.disk import free_bytes, in_words
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Trainer

# Optimizers whose state is smaller than two moments of each weight.
_SMALL_STATE = ("8bit", "4bit", "lion", "galore", "apollo", "adafactor")


def saved_parameters(trainer: Trainer) -> list[nn.Parameter]:
    """All of the model, or with an adapter the trained ones."""
    is_adapter = hasattr(trainer.model, "peft_config")
    return [p for p in cast(nn.Module, trainer.model).parameters() if p.requires_grad or not is_adapter]


def weight_bytes(trainer: Trainer) -> int:
    """What saving the model writes."""
    return sum(elements(p) * p.element_size() for p in saved_parameters(trainer))


def whole_model_bytes(trainer: Trainer) -> int:
    """What the plain model takes, an adapter added in."""
    names = cast(nn.Module, trainer.model).named_parameters()
    return sum(elements(p) * p.element_size() for name, p in names if "lora_" not in name)


def checkpoint_bytes(trainer: Trainer) -> int:
    """About how large a checkpoint gets: the weights, and what the optimizer holds of them or will hold."""
    if trainer.args.save_only_model:
        return weight_bytes(trainer)
    states = getattr(trainer.optimizer, "state", None) or {}
    held = sum(t.numel() * t.element_size() for s in states.values() for t in s.values() if torch.is_tensor(t))
    return weight_bytes(trainer) + (held or _optimizer_to_come(trainer))


def _optimizer_to_come(trainer: Trainer) -> int:
    """The state that the optimizer will hold; 0 for one that is not known, so that nothing is refused for it."""
    defaults = getattr(trainer.optimizer, "defaults", {})
    name = f"{trainer.args.optim} {type(trainer.optimizer).__name__}".lower()
    if any(small in name for small in _SMALL_STATE):
        return 0
    has_betas = "betas" in defaults or (trainer.is_deepspeed_enabled and not defaults and "adam" in name)
    moments = 2 if has_betas else 1 if defaults.get("momentum") else 0
    trained = [p for p in saved_parameters(trainer) if p.requires_grad]
    # ZeRO's moments are fp32, those of torch have the type of their weight.
    return sum(moments * (4 if trainer.is_deepspeed_enabled else p.element_size()) * elements(p) for p in trained)


def elements(parameter: nn.Parameter | Tensor) -> int:
    """Of the whole parameter: ZeRO-3 holds a part of it here."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


@dataclass(frozen=True)
class Room:
    """What a run still writes.

    Attributes:
        checkpoint: bytes of one checkpoint.
        at_end: bytes of `final/` and `merged/`.
        held: checkpoints that are there already.
        to_come: checkpoints that will be written.
        limit: `save_total_limit`.
    """

    checkpoint: int
    at_end: int
    held: int
    to_come: int
    limit: int | None

    @property
    def more(self) -> int:
        """Checkpoints more than now, at the most: a new one is written before the oldest goes."""
        if self.limit is None or self.to_come == 0:
            return self.to_come
        return min(self.to_come, max(1, self.limit + 1 - self.held))

    @property
    def whole(self) -> int:
        """Bytes for everything at its fullest: during the last save, or when the final weights lie beside them all."""
        kept = self.more if self.limit is None else max(0, min(self.limit, self.held + self.to_come) - self.held)
        return max(self.more * self.checkpoint, kept * self.checkpoint + self.at_end)

    @property
    def least(self) -> int:
        """Bytes without which it can't even end: one checkpoint more, and the final weights."""
        if self.to_come == 0:
            return self.at_end
        frees_one = self.limit is not None and self.held >= self.limit
        return max(self.checkpoint, self.at_end) if frees_one else self.checkpoint + self.at_end


def room_for(trainer: Any, at_end: int) -> Room:
    """What the training that begins still writes into its output folder."""
    args, state = trainer.args, trainer.state
    return Room(
        checkpoint=checkpoint_bytes(trainer),
        at_end=at_end,
        held=len(checkpoints(Path(args.output_dir))),
        to_come=_saves_to_come(args, state),
        limit=args.save_total_limit and max(args.save_total_limit, 1 + bool(args.load_best_model_at_end)),
    )


def _saves_to_come(args: Any, state: Any) -> int:
    steps = int(state.max_steps) - int(state.global_step)
    if args.save_strategy == "no" or steps <= 0:
        return 0
    if args.save_strategy == "steps":
        every = int(state.save_steps or args.save_steps)
        return int(state.max_steps) // every - int(state.global_step) // every + bool(state.max_steps % every)
    if args.save_strategy == "epoch":
        return max(1, int(state.num_train_epochs) - int(state.epoch or 0))
    return 1  # best: nobody knows how often


def check_room(room: Room, folder: Path) -> str | None:
    """What to warn of where not everything fits; None where it does.

    Raises:
        ConfigError: not even one checkpoint and the final weights fit.
    """
    free = free_bytes(folder)
    if free is None:
        return None
    parts = f"a checkpoint takes about {in_words(room.checkpoint)}"
    if room.at_end:
        parts += f", what is written at the end about {in_words(room.at_end)}"
    if free < room.least:
        raise ConfigError(
            f"training.output_dir: '{folder}' has {in_words(free)} free, and {parts}: the run could not be saved; make "
            "room there, or choose an output_dir on another disk"
        )
    if free < room.whole:
        kept = f"{room.more} of them are kept at once" if room.limit else f"all {room.more} of them are kept"
        return (
            f"'{folder}' has {in_words(free)} free, and the run takes up to {in_words(room.whole)}: {parts}, and "
            f"{kept}{'' if room.limit == 1 else ' (training.save_total_limit keeps fewer)'}"
        )
    return None


def room_or_refusal(trainer: Any, at_end: int) -> str | None:
    """`check_room` for what a training that begins will write, by the first rank's disk; all ranks have to ask.

    Raises:
        ConfigError: on every rank alike.
    """
    said: list[Any] = [None, None]
    if trainer.is_world_process_zero():
        try:
            said[0] = check_room(room_for(trainer, at_end), Path(trainer.args.output_dir))
        except ConfigError as error:
            said[1] = str(error)
    if trainer.args.world_size > 1:
        broadcast_object_list(said)
    if said[1] is not None:
        raise ConfigError(said[1])
    return cast("str | None", said[0])


def refuse_full_disk(folder: Path, needed: int) -> None:
    """Raise what writing would raise, before anything is written; `needed` is what surely will be."""
    free = free_bytes(folder)
    if free is not None and free < needed:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
