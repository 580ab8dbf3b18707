"""Small trainings for the tests: rows with a chosen number of labels, one SGD step, weights to compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from sft_toolkit import SFTArguments, SFTTrainer
from tests.tiny import chat, tiny_model, tiny_tokenizer


def rows_with_labels(*counts: int) -> list[dict[str, Any]]:
    """One conversation per count: the answer's bytes plus its end-of-turn token are that many supervised tokens."""
    letters = "abcdefghijklmnopqrstuvwxyz"
    return [{"messages": chat(f"question {i}", (letters[i:] + letters)[: count - 1])} for i, count in enumerate(counts)]


def sgd_arguments(folder: Path, **changes: Any) -> SFTArguments:
    """One plain SGD step of learning rate 1 without clipping, in file order: the weights show the gradient itself."""
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "max_length": 256,
        "optim": "sgd",
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return SFTArguments(**{**settings, **changes})


def trained(folder: Path, rows: list[dict[str, Any]], peft_config: Any = None, **changes: Any) -> SFTTrainer:
    """The trainer after its training on the tiny model."""
    trainer = SFTTrainer(
        model=tiny_model(),
        args=sgd_arguments(folder, **changes),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
        peft_config=peft_config,
    )
    trainer.train()
    return trainer


def largest_difference(one: SFTTrainer, other: SFTTrainer) -> float:
    """Largest absolute difference between two trainers' trainable weights."""
    left, right = dict(one.model.named_parameters()), dict(other.model.named_parameters())  # type: ignore[union-attr]
    assert left.keys() == right.keys()
    return max(float((left[n].detach() - right[n].detach()).abs().max()) for n in left if left[n].requires_grad)


def logged(trainer: SFTTrainer, key: str) -> list[float]:
    """All values that were logged under a key."""
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def lora() -> Any:
    """A LoRA whose B is not zero, so that its first gradient reaches A as well."""
    from peft import LoraConfig

    torch.manual_seed(0)
    return LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
