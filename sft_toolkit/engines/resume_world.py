"""A checkpoint meets another number of ranks: found before training, carried over where that is exact, else refused.

DDP's optimizer state is whole and fits any number of ranks. ZeRO's is in pieces, one per rank: DeepSpeed's universal
format puts it together (https://www.deepspeed.ai/tutorials/universal-checkpointing/). Either way the batch of an update
has to stay what it was, or the schedule and the place in the data would mean something else.
"""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback
from transformers.trainer_callback import ExportableState

from sft_toolkit.engines.distributed import asked_by
from sft_toolkit.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)

STATE = "trainer_state.json"
UNIVERSAL = "_universal"


@dataclass(frozen=True)
class World:
    """Who makes an update: the strategy (`none` and `ddp` are one here), ranks, rows of an update over all ranks."""

    strategy: str
    world_size: int
    global_batch: int


class RecordsWorld(TrainerCallback, ExportableState):
    """Writes into each `trainer_state.json` who wrote it; Trainer keeps it under `stateful_callbacks`."""

    world: World | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After Trainer has restored callbacks: what was must not replace what is."""
        self.world = world_of(args)

    def state(self) -> dict[str, Any]:
        """What Trainer restores (nothing), and what `written_by` reads."""
        return {"args": {}, "attributes": {}, "world": None if self.world is None else vars(self.world)}


def world_of(args: SFTArguments) -> World:
    """Who makes the updates of these arguments."""
    rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    strategy = asked_by(args).strategy
    return World("ddp" if strategy in ("auto", "none") else strategy, args.world_size, rows)


def written_by(checkpoint: Path) -> World | None:
    """Who wrote this checkpoint; None where that can't be told (a stock one of several ranks has no batch in it)."""
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return World(**state["stateful_callbacks"][RecordsWorld.__name__]["world"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def check_world(checkpoint: Path, now: World) -> bool:
    """Whether the optimizer state has to be put together for the ranks that run now.

    Raises:
        ConfigError: the batch of an update, or the kind of optimizer state, is another one; says how to go on.
    """
    before = written_by(checkpoint)
    if before is None:
        pieces = _pieces(checkpoint)
        return pieces not in (0, now.world_size) and now.strategy.startswith("zero")
    if before.strategy != now.strategy:
        raise ConfigError(
            f"{checkpoint} was written under {before.strategy}, and this is {now.strategy}: the optimizer state of one "
            f"is of no use to the other. Set the strategy back, or {_from_the_weights(checkpoint)}"
        )
    if before.global_batch != now.global_batch:
        raise ConfigError(
            f"{checkpoint} was written with {before.global_batch} rows an update over {before.world_size} ranks, and "
            f"now {now.world_size} make it {now.global_batch}: the schedule and the place in the data would be wrong. "
            f"Set training.global_batch_size: {before.global_batch}, or {_from_the_weights(checkpoint)}"
        )
    if before.world_size != now.world_size:
        logger.warning(
            "%s was written by %d ranks, and %d go on: losses are those of the same run but for rounding and dropout",
            *(checkpoint, before.world_size, now.world_size),
        )
    return before.world_size != now.world_size and now.strategy.startswith("zero")


def _from_the_weights(checkpoint: Path) -> str:
    adapter = (checkpoint / "adapter_config.json").is_file()
    key = "lora.adapter" if adapter else "model.name_or_path"
    return f"start anew from its weights: {key}: {checkpoint} and another training.output_dir"


def _pieces(checkpoint: Path) -> int:
    """Ranks whose share of ZeRO's optimizer state lies there."""
    names = [path.name for path in checkpoint.glob("global_step*/*_optim_states.pt")]
    return len({found[1] for name in names if (found := re.search(r"zero_pp_rank_(\d+)_", name))})


def put_together(checkpoint: Path) -> None:
    """Write `global_stepN_universal` beside `global_stepN`, in a process of its own; for one rank to call.

    Raises:
        CheckpointError: DeepSpeed can't convert it; exit code 2, with the way that is left.
    """
    step = (checkpoint / "latest").read_text(encoding="utf-8").strip()
    latest = checkpoint / f"latest{UNIVERSAL}"  # written last
    if latest.is_file() and latest.read_text(encoding="utf-8").strip() == step + UNIVERSAL:
        return
    logger.info("putting the optimizer state of %s together for another number of ranks", checkpoint)
    paths = ["--input_folder", str(checkpoint / step), "--output_folder", str(checkpoint / (step + UNIVERSAL))]
    workers = ["--num_extract_workers", "1", "--num_merge_workers", "1"]
    launched = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "GROUP_", "ROLE_", "TORCHELASTIC_", "ACCELERATE_")
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *paths, *workers, "--inject_missing_state"],
        capture_output=True,
        text=True,
        env={name: value for name, value in os.environ.items() if not name.startswith(launched)},
    )
    if done.returncode or not latest.is_file():
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise CheckpointError(
            f"{checkpoint}: its optimizer state can't be put together for another number of ranks ({reason}). Go on "
            f"with as many ranks as wrote it, or {_from_the_weights(checkpoint)}",
            exit_code=2,
        )


def mend_loaded_optimizer(engine: Any, decays: Sequence[float]) -> None:
    """Undo two mistakes of DeepSpeed 0.19.8 in loading a universal checkpoint at stage 3.

    `load_hp_checkpoint_state_from_checkpoint_dir_stage3` gives every group one and the same `step` tensor, which each
    of them then counts up, and the first group's settings, so that norms and biases decay.

    Args:
        decays: weight decay of each group of the optimizer, as it was made.
    """
    optimizer = engine.optimizer.optimizer
    for state in optimizer.state.values():
        if hasattr(state.get("step"), "clone"):
            state["step"] = state["step"].clone()
    if len(decays) == len(optimizer.param_groups):
        for group, decay in zip(optimizer.param_groups, decays, strict=True):
            group["weight_decay"] = decay
