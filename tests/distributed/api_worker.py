"""What the ranks of `test_python_api.py` do: trainings started from Python, one after the other in one process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_toolkit import SFTArguments, SFTTrainer
from sft_toolkit.engines.engagement import engaged
from sft_toolkit.errors import ConfigError
from tests.distributed.routed import RoutedForCausalLM, called_experts
from tests.training import logged, rows_with_labels

CLASSES: dict[str, Any] = {"auto": AutoModelForCausalLM, "routed": RoutedForCausalLM}


class WithSgd(SFTTrainer):
    """A user's subclass that brings an optimizer of its own."""

    def create_optimizer(self, model: Any = None) -> Any:
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)  # type: ignore[union-attr]
        return self.optimizer


def train_all(model_dir: str, folder: str, runs: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name of a run -> what came out of it, and what it left behind in the process."""
    return {
        name: train_one(output_dir=Path(folder) / name, **{"model_dir": model_dir, **run}) for name, run in runs.items()
    }


def train_one(
    model_dir: str, output_dir: Path, own_optimizer: str | None = None, loads_by: str | None = None, **changes: Any
) -> dict[str, Any] | str:
    """A training of two updates with a model given by name; the message where it is refused.

    Args:
        own_optimizer: "passed" as `optimizers=`, or "overridden" in a subclass; SGD either way.
        loads_by: a class of `CLASSES`, whose from_pretrained the user calls, behind the arguments, for the module.
    """
    before = dict(os.environ)
    settings = {"per_device_train_batch_size": 1, "max_steps": 2, "logging_steps": 1, "save_strategy": "no", **changes}
    args = SFTArguments(output_dir=str(output_dir), disable_tqdm=True, **settings)
    weights = [torch.nn.Parameter(torch.zeros(1))]
    try:
        trainer = (WithSgd if own_optimizer == "overridden" else SFTTrainer)(
            CLASSES[loads_by].from_pretrained(model_dir, dtype=torch.float32) if loads_by else model_dir,
            args,
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            train_dataset=rows_with_labels(1, 15, 3, 25),
            optimizers=(torch.optim.SGD(weights) if own_optimizer == "passed" else None, None),
        )
        trainer.train()
    except ConfigError as error:
        return str(error)
    trainer.save_model()
    return {
        "engaged": engaged(trainer).strategy,
        "loss": logged(trainer, "loss"),
        "experts": called_experts(trainer.model),
        "precision": trainer.accelerator.mixed_precision,
        "environment_changed": sorted(n for n in {*before, *os.environ} if before.get(n) != os.environ.get(n)),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
