"""What each rank does in `test_one_loss_over_ranks.py`: several small trainings in one process group."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from sft_toolkit import SFTTrainer
from tests.distributed.breaking import RaisesOnEveryRank
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import logged, lora, rows_with_labels, sgd_arguments


def train_all(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Name of a case -> what came out of it on this rank."""
    found = {name: train_one(Path(folder) / name, **case) for name, case in cases.items()}
    return {**found, "after an error": fail_and_go_on(Path(folder))}


def fail_and_go_on(folder: Path) -> dict[str, Any]:
    """An error that all ranks meet behind step 3 of 5, with a checkpoint in the writing; then the rest."""

    def built(output_dir: Path, *callbacks: TrainerCallback, **changes: Any) -> SFTTrainer:
        settings = {"optim": "adamw_torch", "learning_rate": 1e-3, "max_steps": 5, "async_save": True, **changes}
        model, rows = tiny_model(attention_dropout=0.1), rows_with_labels(1, 5, 3, 9, 2, 7)
        arguments = sgd_arguments(output_dir, **settings)
        return SFTTrainer(model, arguments, None, rows, processing_class=tiny_tokenizer(), callbacks=list(callbacks))

    whole = built(folder / "whole")
    whole.train()
    broken = built(folder / "broken", RaisesOnEveryRank(at_step=3), save_strategy="steps", save_steps=2)
    said = ""
    try:
        broken.train()
    except RuntimeError as error:
        said = str(error)
    found = sorted(path.name for path in (folder / "broken").iterdir())
    resumed = built(folder / "broken")
    resumed.train(resume_from_checkpoint=True)
    return {"said": said, "found": found, "losses": [logged(trainer, "loss") for trainer in (whole, resumed)]}


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
