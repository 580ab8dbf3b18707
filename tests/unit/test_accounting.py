"""What a log entry says: scores of the tokens that were trained, time by phase; one reduction for all of it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import TrainerCallback

from sft_toolkit import SFTTrainer
from sft_toolkit.loss.reduction import Totals, score
from sft_toolkit.metering.accounting import EvalMeter, TokenMeter, mean_eval_loss
from sft_toolkit.metering.step_times import PHASES, StepTimes
from sft_toolkit.metering.utilisation import flops_per_token, peak_flops, utilisation_of
from tests.architectures import build
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import logged, lora, rows_with_labels, sgd_arguments, trained

ROWS = rows_with_labels(1, 15, 3, 25)
LABELS = [1, 15, 3, 25]


def by_hand(trainer: SFTTrainer) -> dict[str, float]:
    """Accuracy, NLL and entropy of the supervised tokens, from the logits of the untrained model."""
    model, sums = tiny_model().eval(), torch.zeros(3, dtype=torch.float64)
    for batch in trainer.get_train_dataloader():
        labels = batch.pop("labels")[:, 1:]
        logits = model(**batch, use_cache=False).logits[:, :-1][labels != -100].double()
        targets, logp = labels[labels != -100], logits.log_softmax(-1)
        entropy = -(logp.exp() * logp).sum()
        sums += torch.stack([(logits.argmax(-1) == targets).sum(), -logp.gather(1, targets[:, None]).sum(), entropy])
    names = ("token_accuracy", "loss", "entropy")
    return {name: float(total) / 44 for name, total in zip(names, sums, strict=True)}


@pytest.mark.parametrize("changes", [{}, {"loss_chunk": 8}, {"packing": True, "max_length": 80}, {"loss": "dft"}])
def test_training_and_evaluation_log_accuracy_and_entropy_of_every_token(tmp_path: Path, changes: Any) -> None:
    trainer = SFTTrainer(
        tiny_model(),
        sgd_arguments(tmp_path, log_entropy=True, gradient_accumulation_steps=4, **changes),
        train_dataset=ROWS,
        eval_dataset=ROWS,
        processing_class=tiny_tokenizer(),
    )
    expected = by_hand(trainer)
    before = trainer.evaluate()
    trainer.train()
    entry = next(entry for entry in trainer.state.log_history if "tokens" in entry)
    for name, value in expected.items():
        assert entry[name] == pytest.approx(value, rel=1e-5), name
        assert before[f"eval_{name}"] == pytest.approx(value, rel=1e-5), name


def test_entropy_is_not_computed_unless_asked_for(tmp_path: Path) -> None:
    trainer = trained(tmp_path, ROWS, per_device_train_batch_size=4)
    assert logged(trainer, "token_accuracy") != []
    assert logged(trainer, "entropy") == []
    assert score(torch.zeros(2, 10), torch.tensor([3, 0])).entropy is None


def test_the_entropy_of_a_token_that_cannot_be_is_no_nan() -> None:
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    assert float(score(logits, torch.tensor([0]), with_entropy=True).entropy or 0) == pytest.approx(math.log(2))


def test_the_phases_of_an_update_add_up_to_it(tmp_path: Path) -> None:
    trainer = trained(tmp_path, ROWS, per_device_train_batch_size=1, gradient_accumulation_steps=2, max_steps=2)
    for entry in (entry for entry in trainer.state.log_history if "tokens" in entry):
        phases = [entry[f"{phase}_seconds"] for phase in (*PHASES, "other")]
        assert all(seconds >= 0 for seconds in phases)
        assert sum(phases) == pytest.approx(entry["step_seconds"], abs=1e-5)
        assert min(entry["forward_seconds"], entry["backward_seconds"]) > 0.1 * entry["step_seconds"]


def test_time_goes_to_the_phase_it_was_spent_in(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr("sft_toolkit.metering.step_times.time.perf_counter", lambda: clock.now)
    times = StepTimes()

    def spend(seconds: float) -> None:
        clock.now += seconds

    for phase, seconds in (("data", 1), ("forward", 2), ("backward", 4), ("optimizer", 8), (None, 16), ("data", 32)):
        times.enter(phase)  # type: ignore[arg-type]
        spend(seconds)
    times.enter(None)
    with times.left_out():
        spend(100)
    assert times.take() == (63, [33, 2, 4, 8])
    spend(1000)
    times.restart()
    spend(1)
    assert times.take() == (1, [0, 0, 0, 0])


def test_saving_and_evaluating_slow_no_update_down(tmp_path: Path) -> None:
    class Slow(TrainerCallback):
        def on_prediction_step(self, *_: Any, **__: Any) -> None:
            clock.now += 100.0

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.now += 1.0

    clock = SimpleNamespace(now=0.0)
    args = sgd_arguments(
        tmp_path, max_steps=3, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1
    )
    trainer = SFTTrainer(tiny_model(), args, None, ROWS, ROWS, tiny_tokenizer(), callbacks=[Slow()])
    save = trainer._save_checkpoint

    def save_slowly(*given: Any) -> None:
        save(*given)
        clock.now += 1000.0

    trainer._save_checkpoint = save_slowly  # type: ignore[assignment,method-assign]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sft_toolkit.metering.step_times.time.perf_counter", lambda: clock.now)
        trainer.train()
    assert logged(trainer, "step_seconds") == [1.0, 1.0, 1.0]
    tokens = [0, *logged(trainer, "tokens")]
    assert logged(trainer, "tokens_per_second") == [b - a for a, b in pairwise(tokens)]


def totals(nll: float, tokens: int, correct: int = 0) -> Totals:
    return Totals(torch.tensor(nll), torch.tensor(nll), torch.tensor(correct), None, tokens, tokens)


def two_ranks(value: Tensor) -> Tensor:
    return 2 * value


def test_an_entry_takes_one_reduction(tmp_path: Path) -> None:
    meter, calls = TokenMeter(), []

    def reduce(value: Tensor) -> Tensor:
        calls.append(value.shape)
        return two_ranks(value)

    batch = {"labels": torch.tensor([[-100, 5, 6, -100]]), "attention_mask": torch.tensor([[1, 1, 1, 0]])}
    for update in range(3):
        assert int(meter.count([batch, batch])) == 4
        meter.add(update, totals(1.0, 2, 1), torch.tensor(0.25))
        meter.add(update, totals(math.nan if update == 1 else 1.0, 2, 1), torch.tensor(0.5))
    entry, bad = meter.log_entry(reduce)
    assert len(calls) == 1
    assert (entry["tokens"], entry["supervised_tokens"], entry["padding_share"]) == (36, 24, 0.25)
    assert (entry["token_accuracy"], entry["loss"]) == (0.5, 0.75)
    assert list(bad) == [1]
    assert math.isnan(bad[1])
    assert meter.log_entry(reduce) == ({}, {})


def test_weights_are_what_an_update_is_divided_by() -> None:
    labels, weights = torch.tensor([[-100, 5, 6, 7]]), torch.tensor([[1.0, 0.5, 0.0, 0.25]])
    assert float(TokenMeter().count([{"labels": labels, "loss_weights": weights}])) == 0.75


def test_eval_means_weigh_tokens_also_by_source() -> None:
    meter = EvalMeter([("a", 1), ("b", 2)])
    for nll, tokens in ((2.0, 1), (3.0, 3), (1.0, 1)):
        meter.add(totals(nll, tokens, 1))
    assert meter.means(two_ranks) == {"loss": 6 / 5, "token_accuracy": 3 / 5}
    assert meter.loss_by_part(two_ranks) == {"a": 2.0, "b": 1.0}
    assert EvalMeter().means(two_ranks) == {"loss": None}


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA GeForce RTX 4090", 165e12),
        ("Radeon", None),
    ],
)
def test_peaks_are_found_by_the_devices_name(device: str, peak: float | None) -> None:
    assert peak_flops(device, torch.bfloat16) == peak
    assert peak_flops(device, torch.float32) is None


def test_flops_count_what_a_training_must_compute() -> None:
    layers = 2 * (32 * (32 + 16 + 16 + 32) + 3 * 32 * 64)
    assert flops_per_token(tiny_model()) == (6 * layers, 6 * 32 * 261)
    assert flops_per_token(tiny_model(tie_word_embeddings=True)) == (6 * layers, 6 * 32 * 261)
    from peft import get_peft_model

    adapted = 2 * 4 * ((32 + 32) + (32 + 16))
    assert flops_per_token(get_peft_model(tiny_model(), lora())) == (4 * layers + 6 * adapted, 4 * 32 * 261)
    dense = {"num_experts_per_tok": 4, "num_local_experts": 4}
    all_experts, half = (flops_per_token(build("Mixtral", **dense | {"num_experts_per_tok": n}))[0] for n in (4, 2))
    assert all_experts - half == 6 * 2 * 2 * (3 * 32 * 64)  # 2 layers, 2 experts less


def test_utilisation_is_known_where_the_peak_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert utilisation_of(tiny_model(), torch.device("cpu"), torch.bfloat16) is None
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    found = utilisation_of(tiny_model(), torch.device("cuda"), torch.bfloat16)
    below, head = flops_per_token(tiny_model())
    assert found is not None
    assert found(1000, 100, 0.5) == pytest.approx((1000 * below + 100 * head) / (0.5 * 989e12))
    meter = TokenMeter()
    meter.utilisation = lambda tokens, supervised, seconds: tokens * 0.25
    meter.count([{"labels": torch.tensor([[5, 6]])}])
    assert meter.log_entry(two_ranks)[0]["mfu"] == 0.5  # of one rank: 2 of 4 tokens


def test_the_rows_that_even_out_the_ranks_are_no_tokens() -> None:
    from sft_toolkit.data.collate import PackedCollator, PaddedCollator
    from sft_toolkit.data.token_dataset import blank_row

    row = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}
    padded = PaddedCollator(0)([row, blank_row(), row])
    packed = PackedCollator()([{"documents": [row, row]}, {"documents": [blank_row()]}])
    for batch, slots in ((padded, 9), (packed, 7)):
        meter = TokenMeter()
        assert int(meter.count([batch])) == 4
        entry, _ = meter.log_entry(lambda value: value)
        assert (entry["tokens"], entry["padding_share"]) == (6, round(1 - 6 / slots, 4))


def test_the_document_names_every_key_that_is_logged(tmp_path: Path) -> None:
    document = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    changes: dict[str, Any] = {"eval_strategy": "epoch", "log_entropy": True, "loss": "dft"}
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, ROWS, ROWS, tiny_tokenizer())
    trainer.train()
    logged_keys = {key for entry in trainer.state.log_history for key in entry}
    assert {"objective", "eval_token_accuracy", "other_seconds"} <= logged_keys
    assert {key for key in logged_keys if f"`{key}`" not in document} == set()


def test_the_objective_of_a_search_is_the_eval_loss_or_the_mean_of_several() -> None:
    assert mean_eval_loss({"eval_loss": 2.0, "eval_a_loss": 7.0, "eval_runtime": 1.0}) == 2.0
    assert mean_eval_loss({"eval_a_loss": 3.0, "eval_b_loss": 4.0, "eval_a_runtime": 9.0, "epoch": 1.0}) == 3.5
