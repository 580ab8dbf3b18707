"""The loss is a sum over supervised tokens, whichever way the logits were computed."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sft_toolkit.loss.reduction import next_token_targets, projects_only_kept, router_loss, score, supervised_logits
from tests.tiny import tiny_model


def test_a_target_is_the_label_of_the_next_position() -> None:
    labels = torch.tensor([[-100, -100, 7, 8], [5, 6, -100, -100]])
    assert next_token_targets(labels).tolist() == [[-100, 7, 8, -100], [6, -100, -100, -100]]


def test_uniform_logits_cost_the_log_of_the_vocabulary_per_token() -> None:
    totals = score(torch.zeros(2, 10), torch.tensor([3, 0]))
    assert totals.loss.item() == pytest.approx(2 * math.log(10), rel=1e-6)
    assert totals.nll.item() == pytest.approx(2 * math.log(10), rel=1e-6)


def test_the_sum_is_that_of_torch() -> None:
    logits, targets = torch.randn(4, 9, requires_grad=True), torch.tensor([0, 3, 1, 8])
    totals, expected = score(logits, targets), nn.functional.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(totals.loss, expected)
    assert totals.correct.item() == (logits.argmax(-1) == targets).sum().item()
    torch.testing.assert_close(*(torch.autograd.grad(loss, logits)[0] for loss in (totals.loss, expected)))


def test_a_micro_batch_without_a_supervised_token_gives_zero_and_still_a_graph() -> None:
    logits = torch.zeros(0, 10, requires_grad=True)
    totals = score(logits, torch.zeros(0, dtype=torch.int64))
    totals.loss.backward()
    assert (totals.loss.item(), totals.nll.item(), totals.correct.item()) == (0.0, 0.0, 0)
    assert logits.grad is not None


def test_the_sum_is_taken_in_fp32_whatever_the_dtype_of_the_logits() -> None:
    logits = torch.randn(4, 1000, dtype=torch.bfloat16)
    targets = torch.tensor([1, 2, 3, 4])
    assert score(logits, targets).loss.dtype is torch.float32
    assert torch.equal(score(logits, targets).loss, score(logits.float(), targets).loss)


def test_weights_count_in_what_is_optimised_and_in_the_nll() -> None:
    totals = score(torch.zeros(2, 10), torch.tensor([3, 0]), torch.tensor([0.25, 0.5]))
    assert totals.loss.item() == pytest.approx(0.75 * math.log(10), rel=1e-6)
    assert totals.nll.item() == pytest.approx(0.75 * math.log(10), rel=1e-6)
    assert (totals.tokens, float(totals.weight)) == (2, 0.75)


def test_kept_and_full_logits_give_the_same_rows() -> None:
    model = tiny_model()
    assert projects_only_kept(model)
    ids = torch.randint(5, 261, (2, 6))
    labels = torch.full_like(ids, -100)
    labels[0, 3:], labels[1, 5] = ids[0, 3:], ids[1, 5]
    targets = next_token_targets(labels)
    kept = model(ids, logits_to_keep=targets != -100).logits
    assert kept.shape == (4, 261)
    few, few_targets = supervised_logits(kept, targets)
    all_rows, all_targets = supervised_logits(model(ids).logits, targets)
    torch.testing.assert_close(few, all_rows)
    assert few_targets.tolist() == all_targets.tolist() == [*ids[0, 3:].tolist(), ids[1, 5].item()]


def test_a_module_that_transformers_does_not_know_gets_all_logits() -> None:
    assert not projects_only_kept(nn.Linear(2, 2))


def test_virtual_tokens_in_front_are_cut_off() -> None:
    logits = torch.arange(2 * 5 * 3, dtype=torch.float32).view(2, 5, 3)  # 2 virtual tokens, 3 of the row
    targets = torch.tensor([[4, -100, -100], [-100, -100, 9]])
    rows, kept = supervised_logits(logits, targets)
    assert rows.tolist() == [logits[0, 2].tolist(), logits[1, 4].tolist()]
    assert kept.tolist() == [4, 9]


def test_the_router_loss_is_weighted_by_the_micro_batchs_supervised_tokens() -> None:
    outputs, config = SimpleNamespace(aux_loss=torch.tensor(2.0)), SimpleNamespace(router_aux_loss_coef=0.25)
    assert float(router_loss(outputs, config, torch.tensor(6))) == 3.0
    assert router_loss(SimpleNamespace(aux_loss=None), config, torch.tensor(6)) == 0.0
