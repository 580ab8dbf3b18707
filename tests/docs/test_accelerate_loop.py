"""The loop of `examples/accelerate_loop` and SFTTrainer train the same."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit import SFTTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import logged, rows_with_labels, sgd_arguments

EXAMPLE = Path(__file__).parents[2] / "examples" / "accelerate_loop" / "train.py"
ROWS = rows_with_labels(1, 15, 3, 25, 2, 9, 4, 11)


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    spec = importlib.util.spec_from_file_location("accelerate_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "accelerate_loop", module)  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_the_loop_by_hand_and_the_trainer_train_the_same(example: Any, tmp_path: Path) -> None:
    model = tiny_model()
    settings: dict[str, Any] = {"max_length": 80, "learning_rate": 0.01, "max_grad_norm": 0.5}
    options = example.Options(**settings, accumulation=3, epochs=2)
    log = example.train(model, tiny_tokenizer(), ROWS, options)
    args = sgd_arguments(
        tmp_path,
        **settings,
        packing=True,
        optim="adamw_torch",
        lr_scheduler_type="linear",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        num_train_epochs=2,
        max_steps=-1,
        train_sampling_strategy="random",
    )
    trainer = SFTTrainer(tiny_model(), args, None, ROWS, None, tiny_tokenizer())
    trainer.train()
    assert len(log) == 4  # 5 bins: windows of 3 and 2, twice
    for key in ("loss", "grad_norm", "token_accuracy", "tokens", "supervised_tokens"):
        assert [entry[key] for entry in log] == pytest.approx(logged(trainer, key), rel=1e-6), key
    weights = dict(trainer.model.named_parameters())  # type: ignore[union-attr]
    for name, weight in model.named_parameters():
        assert float((weights[name] - weight).abs().max()) < 1e-6, name
