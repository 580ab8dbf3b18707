"""What each rank does in `test_one_loss_over_ranks.py`: several small trainings in one process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sft_toolkit import SFTTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import lora, rows_with_labels, sgd_arguments


def train_all(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name of a case -> what came out of it on this rank."""
    return {name: train_one(Path(folder) / name, **case) for name, case in cases.items()}


def train_one(
    folder: Path, counts: list[int], eval_counts: list[int], adapter: bool = False, **changes: Any
) -> dict[str, Any]:
    """Train on rows with these label counts; weights, logs and what this rank was given to read."""
    trainer = SFTTrainer(
        tiny_model(),
        sgd_arguments(folder, **changes),
        train_dataset=rows_with_labels(*counts),
        eval_dataset=rows_with_labels(*eval_counts),
        processing_class=tiny_tokenizer(),
        peft_config=lora() if adapter else None,
    )
    read = [int((batch["labels"] != -100).sum()) for batch in trainer.get_train_dataloader()]
    trainer.train()
    model: Any = trainer.model
    trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return {
        "world_size": trainer.args.world_size,
        "supervised_read": read,
        "history": trainer.state.log_history,
        "eval_loss": trainer.evaluate()["eval_loss"],
        "weights": {name: p.detach().flatten()[:64].tolist() for name, p in trainable},
        "checkpoints": sorted(path.name for path in folder.glob("checkpoint-*")),
    }
