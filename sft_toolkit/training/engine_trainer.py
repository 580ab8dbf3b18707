"""Trainer beside an engine: what was asked for engages, and nothing of it stays behind in the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import Trainer, TrainerCallback

from sft_toolkit.engines.deepspeed_config import check_client_optimizer
from sft_toolkit.engines.distributed import asked_by
from sft_toolkit.engines.engagement import check_engaged, engaged
from sft_toolkit.engines.environment import Footprint
from sft_toolkit.engines.experts import mark_expert_blocks
from sft_toolkit.engines.resume_world import (
    RecordsWorld,
    World,
    check_world,
    mend_loaded_optimizer,
    put_together,
    world_of,
)
from sft_toolkit.errors import ConfigError
from sft_toolkit.training_args import SFTArguments

if TYPE_CHECKING:
    from transformers.trainer_utils import EvalLoopOutput


class EngineTrainer(Trainer):
    """`transformers.Trainer`, with its engine watched where the arguments are `SFTArguments`.

    Raises:
        ConfigError: an optimizer that offload would silently replace by another algorithm; at the start of `train`,
            another strategy or another number of processes than was asked for.
    """

    _carried = False  # the optimizer state comes from another number of ranks
    _decays: Sequence[float] = ()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.footprint = Footprint()
        with self.footprint.recorded():
            super().__init__(*args, **kwargs)
        if not isinstance(self.args, SFTArguments):
            return
        if self.args.deepspeed and (self.optimizer is not None or self.lr_scheduler is not None):
            raise ConfigError(  # transformers.integrations.deepspeed.deepspeed_init drops both without a word
                "optimizers: under DeepSpeed Trainer makes its own and would ignore these; choose with optim and "
                "lr_scheduler_type, pass optimizer_cls_and_kwargs, or override create_optimizer in a subclass"
            )
        if isinstance(self.model, nn.Module) and asked_by(self.args).strategy == "zero3":
            mark_expert_blocks(self.model)
        self.add_callback(_AskedIsEngaged(self))
        self.add_callback(RecordsWorld())

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's, with the variables of its engine in place; a checkpoint of other ranks is carried over.

        Raises:
            ConfigError: the checkpoint can't be gone on from by these ranks; says how to.
            CheckpointError: its optimizer state can't be put together.
        """
        with self.footprint.in_place():
            self._tell_transformers()
            if isinstance(resume_from_checkpoint, str) and isinstance(self.args, SFTArguments):
                self._carry_over(Path(resume_from_checkpoint), world_of(self.args))
            return super().train(resume_from_checkpoint, *args, **kwargs)

    def _carry_over(self, checkpoint: Path, now: World) -> None:
        settings = getattr(self.args, "hf_deepspeed_config", None)
        others = check_world(checkpoint, now)
        if settings is None:
            return
        if others and self.is_world_process_zero():
            put_together(checkpoint)
        self.accelerator.wait_for_everyone()
        self._carried = others
        if others or "checkpoint" in settings.config:
            settings.config["checkpoint"] = {**settings.config.get("checkpoint", {}), "load_universal": others}

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As `train`."""
        with self.footprint.in_place():
            self._tell_transformers()
            return super().evaluation_loop(*args, **kwargs)

    # Trainer sets it before accelerate replaces it, also with what a subclass's `create_optimizer` has made: no other
    # public place sees that optimizer.
    @property
    def optimizer(self) -> Any:
        """The optimizer; under offload, setting one that DeepSpeed would replace by another algorithm is refused."""
        return self.__dict__.get("optimizer")

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        args = getattr(self, "args", None)
        settings = getattr(args, "hf_deepspeed_config", None)
        known = optimizer is None or optimizer is self.optimizer
        if not known and settings is not None and isinstance(args, SFTArguments):
            check_client_optimizer(optimizer, settings.config)
            if hasattr(optimizer, "param_groups") and not type(optimizer).__module__.startswith("accelerate."):
                self._decays = [group.get("weight_decay", 0.0) for group in optimizer.param_groups]
        self.__dict__["optimizer"] = optimizer

    def _tell_transformers(self) -> None:
        """Transformers asks the newest arguments whether ZeRO-3 is on; here the trainer that works must answer."""
        settings = getattr(self.args, "hf_deepspeed_config", None)
        if settings is not None:
            from transformers.integrations.deepspeed import set_hf_deepspeed_config

            set_hf_deepspeed_config(settings)  # type: ignore[no-untyped-call]


class _AskedIsEngaged(TrainerCallback):
    """Refuses to begin with another engine than the arguments ask for."""

    def __init__(self, trainer: EngineTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        check_engaged(asked_by(args), engaged(self.trainer))
        if self.trainer._carried:
            mend_loaded_optimizer(self.trainer.model_wrapped, self.trainer._decays)
