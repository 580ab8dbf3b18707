"""A stock `transformers.Trainer` on the tiny model, for tests of callbacks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.tiny import tiny_model


class OtherRank(TrainerCallback):
    """Makes the callbacks after it believe that this process is not the first one."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        state.is_world_process_zero = state.is_local_process_zero = False


def token_rows(count: int = 8) -> list[dict[str, list[int]]]:
    """Rows of 12 random byte tokens, the last 6 supervised; always the same ones."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 261, (count, 12), generator=generator).tolist()
    return [{"input_ids": row, "attention_mask": [1] * 12, "labels": [-100] * 6 + row[6:]} for row in ids]


def arguments(output_dir: Path, **changes: Any) -> TrainingArguments:
    """Three steps of two rows on the CPU; every step is logged, none saved."""
    options: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "logging_steps": 1,
        "save_strategy": "no",
        "learning_rate": 1e-2,
        "disable_tqdm": True,
        "logging_nan_inf_filter": False,
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(output_dir), **{**options, **changes})


def stock_trainer(output_dir: Path, callbacks: list[TrainerCallback], **changes: Any) -> Trainer:
    """A Trainer of its own model; nothing but `callbacks` says anything."""
    trainer = Trainer(
        model=tiny_model(),
        args=arguments(output_dir, **changes),
        train_dataset=token_rows(),
        eval_dataset=token_rows(4),
        callbacks=callbacks,
    )
    for callback in list(trainer.callback_handler.callbacks):
        if type(callback).__name__ == "PrinterCallback":
            trainer.remove_callback(callback)
    return trainer


def state(step: int = 0, **changes: Any) -> TrainerState:
    """What a callback sees at `step` of 10 on the first process."""
    return TrainerState(**{"global_step": step, "max_steps": 10, **changes})
