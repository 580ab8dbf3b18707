"""Whatever is optimised is divided once by the tokens of the update, and the logged NLL stays comparable."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sft_toolkit import ConfigError, SFTTrainer, load_config
from sft_toolkit.loss.objectives import dft, focal, label_smoothing, nll, resolve_objective
from sft_toolkit.loss.reduction import score
from sft_toolkit.registry import known, register
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, rows_with_labels, sgd_arguments, trained

ROWS = rows_with_labels(1, 15, 3, 25)
P = torch.tensor([0.9, 0.5, 0.1])
# Two entries in the vocabulary: the target has probability P.
LOGITS = torch.stack([torch.log(P), torch.log(1 - P)], dim=1)
TARGETS = torch.zeros(3, dtype=torch.int64)


@register("loss", "tests_squared_nll")
def squared_nll(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """An objective of a user."""
    return nll(logits, targets, weights) ** 2


def mean(logits: Tensor, targets: Tensor, weights: Tensor | None) -> Tensor:
    """The mistake that is easily made."""
    return nll(logits, targets, weights).mean()


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        (nll, [-math.log(p) for p in (0.9, 0.5, 0.1)]),
        (label_smoothing, [-0.95 * math.log(p) - 0.05 * math.log(1 - p) for p in (0.9, 0.5, 0.1)]),
        (focal, [-((1 - p) ** 2) * math.log(p) for p in (0.9, 0.5, 0.1)]),
        (dft, [-p * math.log(p) for p in (0.9, 0.5, 0.1)]),
    ],
)
def test_the_losses_are_their_formulas(objective: Any, expected: list[float]) -> None:
    assert objective(LOGITS, TARGETS, None).tolist() == pytest.approx(expected, rel=1e-5)
    weights = torch.tensor([0.5, 0.0, 2.0])
    weighted = [loss * weight for loss, weight in zip(expected, (0.5, 0.0, 2.0), strict=True)]
    assert objective(LOGITS, TARGETS, weights).tolist() == pytest.approx(weighted, rel=1e-5, abs=1e-7)


def test_dft_weighs_the_gradient_of_nll_by_the_probability() -> None:
    logits = LOGITS.clone().requires_grad_()
    (ours,) = torch.autograd.grad(dft(logits, TARGETS, None).sum(), logits)
    (plain,) = torch.autograd.grad(nll(logits, TARGETS, None).sum(), logits)
    torch.testing.assert_close(ours, plain * P[:, None])


def test_the_reduction_adds_up_and_keeps_the_nll_beside_it() -> None:
    totals = score(LOGITS, TARGETS, torch.tensor([1.0, 1.0, 0.5]), focal)
    expected = -(0.1**2) * math.log(0.9) - 0.5**2 * math.log(0.5) - 0.5 * 0.9**2 * math.log(0.1)
    assert totals.loss.item() == pytest.approx(expected, rel=1e-5)
    weighted = -math.log(0.9) - math.log(0.5) - 0.5 * math.log(0.1)  # weights belong to the data: NLL has them too
    assert totals.nll.item() == pytest.approx(weighted, rel=1e-5)
    assert totals.correct.item() == 2  # 0.9, and 0.5 which nothing exceeds
    assert not totals.nll.requires_grad


def test_an_objective_that_takes_a_mean_itself_is_refused() -> None:
    with pytest.raises(ValueError, match=r"an objective returns a loss per token: \(3,\), not \(\)"):
        score(LOGITS, TARGETS, None, mean)


@pytest.mark.parametrize("loss", ["focal", "dft", "label_smoothing", "tests_squared_nll", f"{__name__}.squared_nll"])
def test_every_layout_makes_the_same_step(tmp_path: Path, loss: str) -> None:
    reference = trained(tmp_path, ROWS, loss=loss, per_device_train_batch_size=4)
    split = trained(tmp_path, ROWS, loss=loss, per_device_train_batch_size=1, gradient_accumulation_steps=4)
    packed = trained(tmp_path, ROWS, loss=loss, packing=True, max_length=80, gradient_accumulation_steps=4)
    plain = trained(tmp_path, ROWS, per_device_train_batch_size=4)
    for other in (split, packed):
        assert largest_difference(reference, other) < 2e-6
        assert logged(other, "objective") == pytest.approx(logged(reference, "objective"), rel=1e-6)
        assert logged(other, "loss") == pytest.approx(logged(plain, "loss"), rel=1e-6)
    assert largest_difference(reference, plain) > 1e-4
    assert logged(reference, "objective")[0] != pytest.approx(logged(plain, "loss")[0], rel=1e-4)
    assert logged(plain, "objective") == []  # there `loss` is it


def test_evaluation_is_nll_whatever_is_optimised(tmp_path: Path) -> None:
    losses = [
        SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, ROWS, ROWS, tiny_tokenizer()).evaluate()
        for changes in ({}, {"loss": "dft"}, {"label_smoothing_factor": 0.3})
    ]
    assert losses[0]["eval_loss"] == losses[1]["eval_loss"] == losses[2]["eval_loss"]


def test_label_smoothing_is_that_of_torch_by_either_name(tmp_path: Path) -> None:
    by_factor = trained(tmp_path, ROWS, label_smoothing_factor=0.1, per_device_train_batch_size=4)
    by_name = trained(tmp_path, ROWS, loss="label_smoothing", per_device_train_batch_size=4)
    assert largest_difference(by_factor, by_name) == 0.0
    logits, targets = torch.randn(4, 9), torch.tensor([0, 3, 1, 8])
    expected = nn.CrossEntropyLoss(reduction="sum", label_smoothing=0.3)(logits, targets)
    smoothed = score(logits, targets, None, resolve_objective("nll", 0.3))
    torch.testing.assert_close(smoothed.loss, expected)


def test_options_reach_the_objective() -> None:
    steep: Any = resolve_objective({"focal": {"gamma": 3.0}}, 0.0)
    torch.testing.assert_close(steep(LOGITS, TARGETS, None), focal(LOGITS, TARGETS, None, gamma=3.0))
    smoothed: Any = resolve_objective({"label_smoothing": {"share": 0.3}}, 0.0)
    torch.testing.assert_close(smoothed(LOGITS, TARGETS, None), label_smoothing(LOGITS, TARGETS, None, share=0.3))
    with pytest.raises(ConfigError, match=r"loss 'focal': unknown option 'gama'; did you mean 'gamma'"):
        resolve_objective({"focal": {"gama": 3.0}}, 0.0)
    with pytest.raises(ConfigError, match=r"loss 'nll': unknown option 'share' \(it takes no options\)"):
        resolve_objective({"nll": {"share": 0.3}}, 0.0)


def test_what_cannot_be_meant_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"label_smoothing_factor: 0\.1 belongs to loss: nll or label_smoothing"):
        resolve_objective("focal", 0.1)
    with pytest.raises(ConfigError, match="unknown loss 'focall'; did you mean 'focal'"):
        resolve_objective("focall", 0.0)
    token_rows = [{"input_ids": [5, 6, 7], "labels": [5, 6, 7]}]  # left to Trainer, with its own loss
    with pytest.raises(ConfigError, match="loss: 'focal' would be ignored"):
        SFTTrainer(tiny_model(), sgd_arguments(tmp_path, loss="focal"), None, token_rows)
    with pytest.raises(ConfigError, match="loss: 'focal' would be ignored"):
        SFTTrainer(
            tiny_model(),
            sgd_arguments(tmp_path, loss="focal"),
            train_dataset=ROWS,
            processing_class=tiny_tokenizer(),
            compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.sum(),
        )


def test_a_configuration_names_it(tmp_path: Path) -> None:
    assert {"dft", "focal", "label_smoothing", "nll"} <= set(known("loss"))
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    lines = [
        f"model: {{name_or_path: {tmp_path}}}",
        f"data: {{train: {tmp_path / 'rows.jsonl'}}}",
        f"training: {{output_dir: {tmp_path / 'out'}, loss: NAME}}",
    ]
    file = tmp_path / "run.yaml"
    file.write_text("\n".join(lines).replace("NAME", "dft"), encoding="utf-8")
    assert load_config(file).training["loss"] == "dft"
    file.write_text("\n".join(lines).replace("NAME", "{focal: {gamma: 3}}"), encoding="utf-8")
    assert load_config(file).training["loss"] == {"focal": {"gamma": 3}}
    file.write_text("\n".join(lines).replace("NAME", "dtf"), encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown loss 'dtf'; did you mean 'dft'"):
        load_config(file)
