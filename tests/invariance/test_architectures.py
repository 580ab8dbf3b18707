"""The loss is right for every architecture: it is that of the model's own logits, whichever path computes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.nn.functional import cross_entropy

from sft_toolkit import SFTTrainer
from sft_toolkit.data.collate import PaddedCollator
from tests.architectures import FAMILIES, build, lora_on_the_head
from tests.tiny import tiny_tokenizer
from tests.training import logged, rows_with_labels, sgd_arguments

ROWS = rows_with_labels(1, 15, 3, 25)


def trained(folder: Path, model: Any, **changes: Any) -> SFTTrainer:
    trainer = SFTTrainer(model, sgd_arguments(folder, loss_chunk=8, **changes), None, ROWS, None, tiny_tokenizer())
    trainer.train()
    return trainer


def plain_step(model: Any, rows: Any) -> tuple[float, list[float], dict[str, torch.Tensor]]:
    """NLL, what is optimised where that is more, weights after one SGD step of rate 1; from the model's own logits."""
    total, auxiliary = torch.zeros(()), torch.zeros(())
    for i in range(len(ROWS)):
        batch = PaddedCollator(0)([rows[i]])
        labels = batch.pop("labels")
        outputs = model(**batch, use_cache=False)
        total = total + cross_entropy(outputs.logits[0, :-1].float(), labels[0, 1:], reduction="sum")
        if getattr(outputs, "aux_loss", None) is not None:
            auxiliary = auxiliary + 0.5 * outputs.aux_loss * (labels[0, 1:] != -100).sum()
    objective = (total + auxiliary) / 44
    objective.backward()
    with torch.no_grad():
        weights = {n: p - p.grad if p.grad is not None else p.clone() for n, p in model.named_parameters()}
    return total.item() / 44, [objective.item()] if auxiliary else [], weights


def assert_same_step(trainer: SFTTrainer, reference: Any, rows: Any) -> None:
    loss, objective, weights = plain_step(reference.train(), rows)
    assert logged(trainer, "loss")[0] == pytest.approx(loss, rel=1e-6)
    assert logged(trainer, "objective") == pytest.approx(objective, rel=1e-6)
    after = dict(trainer.model.named_parameters())  # type: ignore[union-attr]
    assert after.keys() == weights.keys()
    for name, expected in weights.items():
        difference = float((after[name].detach() - expected).abs().max())
        assert difference < 2e-6, name


def token_rows(folder: Path) -> Any:
    """The rows as tokens, one document each."""
    return SFTTrainer(build("Llama"), sgd_arguments(folder), None, ROWS, None, tiny_tokenizer()).train_dataset


@pytest.mark.parametrize("family", FAMILIES)
def test_an_accumulated_step_is_that_of_the_models_own_logits(tmp_path: Path, family: str) -> None:
    make, path = FAMILIES[family]
    trainer = trained(tmp_path, make(), per_device_train_batch_size=1, gradient_accumulation_steps=4)
    assert trainer.loss_path == path
    assert_same_step(trainer, make(), token_rows(tmp_path))


@pytest.mark.parametrize(
    "family", [name for name in FAMILIES if not name.endswith(("router-loss", "linear-attention"))]
)
def test_a_packed_step_is_that_of_the_rows_alone(tmp_path: Path, family: str) -> None:
    make, path = FAMILIES[family]
    trainer = trained(tmp_path, make(), packing=True, max_length=128, gradient_accumulation_steps=2)
    assert trainer.loss_path == path
    assert trainer.paths.attention.proven is (None if family.startswith("gemma2") else True)
    assert_same_step(trainer, make(), token_rows(tmp_path))


@pytest.mark.parametrize("packing", [False, True])
def test_an_adapter_on_the_head_learns_what_the_models_own_logits_teach(tmp_path: Path, packing: bool) -> None:
    models = [get_peft_model(build("Llama"), lora_on_the_head()) for _ in range(2)]
    trainer = trained(tmp_path, models[0], packing=packing, max_length=128, per_device_train_batch_size=4)
    assert trainer.loss_path == "chunked"
    assert_same_step(trainer, models[1], token_rows(tmp_path))


def test_a_model_that_names_no_head_is_trained_on_all_its_logits(tmp_path: Path) -> None:
    class Headless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = build("Llama")
            self.config = self.inner.config

        def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
            return self.inner(input_ids=input_ids, attention_mask=attention_mask)

    trainer = trained(tmp_path, Headless(), gradient_accumulation_steps=4, per_device_train_batch_size=1)
    assert trainer.loss_path == "all logits"
    loss, _, _ = plain_step(build("Llama"), token_rows(tmp_path))
    assert logged(trainer, "loss")[0] == pytest.approx(loss, rel=1e-6)
