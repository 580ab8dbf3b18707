"""One loss whatever the split: every supervised token of an update weighs the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sft_toolkit import SFTTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, lora, rows_with_labels, sgd_arguments, trained

ROWS = rows_with_labels(1, 15, 3, 25)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    "layout",
    [
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        {"per_device_train_batch_size": 4, "activation_checkpointing": False},
        {"packing": True, "max_length": 256, "per_device_train_batch_size": 1},
        {"packing": True, "max_length": 80, "gradient_accumulation_steps": 4, "per_device_train_batch_size": 1},
    ],
    ids=["1x4", "2x2", "4x1-without-checkpointing", "one-bin", "several-bins"],
)
def test_every_layout_makes_the_same_step(tmp_path: Path, layout: dict[str, Any], adapter: bool) -> None:
    reference = trained(tmp_path, ROWS, lora() if adapter else None, per_device_train_batch_size=4)
    other = trained(tmp_path, ROWS, lora() if adapter else None, **layout)
    assert largest_difference(reference, other) < 1e-6
    assert logged(other, "loss")[0] == pytest.approx(logged(reference, "loss")[0], rel=1e-6)
    assert logged(other, "grad_norm")[0] == pytest.approx(logged(reference, "grad_norm")[0], rel=1e-5)
    assert logged(other, "supervised_tokens") == [44]


def test_the_step_is_that_of_a_hand_written_loop(tmp_path: Path) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    total, count = torch.zeros(()), 0
    for row in ROWS:
        rendered = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        prompt = tokenizer.encode(str(rendered).partition("assistant\n")[0] + "assistant\n")
        ids = tokenizer.encode(str(rendered))[:-1]  # without the newline at the end
        labels = torch.tensor([-100] * len(prompt) + ids[len(prompt) :])
        logits = model(torch.tensor([ids])).logits[0]
        total = total + torch.nn.functional.cross_entropy(logits[:-1], labels[1:], reduction="sum")
        count += int((labels != -100).sum())
    (total / count).backward()
    assert count == 44
    ours = trained(tmp_path, ROWS, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    after = dict(ours.model.named_parameters())  # type: ignore[union-attr]
    for name, weight in model.named_parameters():
        assert weight.grad is not None
        torch.testing.assert_close(after[name], weight.detach() - weight.grad, rtol=0, atol=1e-6)
    assert logged(ours, "loss")[0] == pytest.approx(total.item() / count, rel=1e-6)


def test_a_last_partial_window_is_divided_by_its_own_count(tmp_path: Path) -> None:
    rows = rows_with_labels(1, 15, 3, 25, 2, 9, 4)  # 7 rows: windows of 4 and 3
    two_steps = trained(
        tmp_path, rows, max_steps=2, per_device_train_batch_size=1, gradient_accumulation_steps=4, learning_rate=0.1
    )
    reference = trained(tmp_path, rows, max_steps=2, per_device_train_batch_size=4, learning_rate=0.1)
    assert largest_difference(reference, two_steps) < 1e-6
    assert logged(two_steps, "loss") == pytest.approx(logged(reference, "loss"), rel=1e-6)
    assert logged(two_steps, "supervised_tokens") == [44, 59]


def evaluated(folder: Path, rows: list[dict[str, Any]], **changes: Any) -> float:
    trainer = SFTTrainer(
        model=tiny_model(),
        args=sgd_arguments(folder, **changes),
        eval_dataset=rows,
        processing_class=tiny_tokenizer(),
    )
    return float(trainer.evaluate()["eval_loss"])


def test_eval_loss_weighs_tokens_whatever_the_batch(tmp_path: Path) -> None:
    rows = rows_with_labels(1, 15, 3, 25, 2, 9, 4)
    losses = [evaluated(tmp_path, rows, per_device_eval_batch_size=n) for n in (1, 2, 8)]
    losses.append(evaluated(tmp_path, rows, per_device_eval_batch_size=1, packing=True, max_length=90))
    alone = [evaluated(tmp_path, [row]) for row in rows]
    truth = sum(loss * n for loss, n in zip(alone, (1, 15, 3, 25, 2, 9, 4), strict=True)) / 59
    assert losses == pytest.approx([truth] * 4, rel=1e-5)


def test_packed_documents_see_only_themselves(tmp_path: Path) -> None:
    for attention in ("sdpa", "eager"):
        model = tiny_model()
        model.set_attn_implementation(attention)
        settings = sgd_arguments(tmp_path, packing=True)
        trainer = SFTTrainer(model, settings, train_dataset=ROWS, processing_class=tiny_tokenizer())
        trainer.train()
        assert logged(trainer, "loss")[0] == pytest.approx(evaluated(tmp_path, ROWS), abs=1e-5)
