"""A message's weight counts in the loss and in what it is divided by, the same however rows are split or packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from sft_toolkit import SFTTrainer
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, rows_with_labels, sgd_arguments, trained

WEIGHTS = (0.5, None, 2.0, 0.25)  # of answers with 1, 15, 3 and 25 labels
ROWS = rows_with_labels(1, 15, 3, 25)
for row, weight in zip(ROWS, WEIGHTS, strict=True):
    row["messages"][1]["weight"] = weight


def by_hand(rows: list[dict[str, Any]]) -> torch.Tensor:
    """Sum of weight x NLL over sum of weights, row by row in plain PyTorch, of the untrained model."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    total, weights = torch.zeros(()), 0.0
    for row in rows:
        messages = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        text = str(tokenizer.apply_chat_template(messages, tokenize=False)).removesuffix("\n")
        answer = len(tokenizer.encode(messages[1]["content"])) + 1
        ids = torch.tensor([tokenizer.encode(text)])
        nll = cross_entropy(model(ids).logits[0, -answer - 1 : -1], ids[0, -answer:], reduction="sum")
        weight = row["messages"][1]["weight"]
        weight = 1.0 if weight is None else weight
        total, weights = total + weight * nll, weights + weight * answer
    return total / weights


LAYOUTS: list[dict[str, Any]] = [
    {"per_device_train_batch_size": 4},
    {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
    {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "loss_chunk": 4},
    {"packing": True, "max_length": 256},
    {"packing": True, "max_length": 80, "gradient_accumulation_steps": 4},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["4x1", "1x4", "2x2 chunked", "one bin", "several bins"])
def test_every_layout_makes_the_weighted_step(tmp_path: Path, layout: dict[str, Any]) -> None:
    ours = trained(tmp_path, ROWS, **layout)
    loss = by_hand(ROWS)
    assert logged(ours, "loss") == [pytest.approx(loss.item(), rel=1e-5)]
    assert logged(ours, "supervised_tokens") == [44]
    reference = trained(tmp_path, ROWS, per_device_train_batch_size=4)
    assert largest_difference(reference, ours) < 1e-6
    unweighted = trained(tmp_path, rows_with_labels(1, 15, 3, 25), **layout)
    assert largest_difference(unweighted, ours) > 1e-3


def test_an_update_of_rows_without_weights_is_not_lost_beside_weighted_ones(tmp_path: Path) -> None:
    rows = [ROWS[1], ROWS[3]]  # one update each: the first row has no weight of its own
    ours = trained(tmp_path, rows, max_steps=2, per_device_train_batch_size=1, learning_rate=0.0)
    assert logged(ours, "loss") == [pytest.approx(by_hand([row]).item(), rel=1e-5) for row in rows]


@pytest.mark.parametrize("changes", [{"per_device_eval_batch_size": 3}, {"packing": True, "max_length": 90}])
def test_the_eval_loss_is_weighted_too(tmp_path: Path, changes: dict[str, Any]) -> None:
    args = sgd_arguments(tmp_path, **changes)
    trainer = SFTTrainer(tiny_model(), args, eval_dataset=ROWS, processing_class=tiny_tokenizer())
    assert trainer.evaluate()["eval_loss"] == pytest.approx(by_hand(ROWS).item(), rel=1e-5)
