"""What the ranks of `test_other_world.py` do: trainings that stop, and trainings that go on with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_toolkit import SFTArguments, SFTTrainer
from sft_toolkit.engines.engagement import describe, engaged
from sft_toolkit.errors import ConfigError
from tests.training import logged, lora, rows_with_labels


def train_all(model_dir: str, runs: list[dict[str, Any]]) -> list[Any]:
    """What each run returned, one after the other in the same processes."""
    return [train_one(model_dir, **run) for run in runs]


def train_one(
    model_dir: str, output_dir: str, resume: str | None = None, adapter: bool = False, **changes: Any
) -> dict[str, Any] | str:
    """Losses of four updates, a checkpoint after the second, and the start-up block; a message where it is refused."""
    args = SFTArguments(
        output_dir=str(Path(output_dir)),
        per_device_train_batch_size=1,
        max_steps=4,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        learning_rate=0.01,
        weight_decay=0.5,  # norms and biases have none: groups that are mixed up show
        disable_tqdm=True,
        **changes,
    )
    rows = rows_with_labels(1, 15, 3, 25, 2, 9, 4, 11)
    trainer = SFTTrainer(model_dir, args, train_dataset=rows, peft_config=lora() if adapter else None)
    try:
        trainer.train(resume_from_checkpoint=resume)
    except ConfigError as error:
        return str(error)
    return {"loss": logged(trainer, "loss"), "block": describe(engaged(trainer))}
