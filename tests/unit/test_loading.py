"""What the trainer reads: the order that a sampler names, rows after a resume, losses of the parts of held-out sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sft_toolkit import SFTTrainer
from sft_toolkit.data.loading import batches_by_part, evaluation_order, for_evaluation, for_training, training_order
from sft_toolkit.data.prepare import tokenize_rows
from sft_toolkit.data.sampler import in_parts
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset
from sft_toolkit.data.transforms import TokenRowDict
from sft_toolkit.errors import ConfigError
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import logged, rows_with_labels, sgd_arguments
from tests.unit.token_rows import token_rows

HERE = __name__
COUNTS = (2, 5, 9, 3, 7, 4, 8, 6, 11, 10)


def masked(row: TokenRowDict, rng: np.random.Generator) -> TokenRowDict:
    """A random half of the labels is not learned this time."""
    row["labels"] = [label if rng.random() < 0.5 else -100 for label in row["labels"]]
    return row


def rows() -> list[dict[str, Any]]:
    return [{**row, "level": -count} for row, count in zip(rows_with_labels(*COUNTS), COUNTS, strict=True)]


def seen(trainer: SFTTrainer) -> list[int]:
    """Labels of each micro-batch, in order: they tell the rows apart."""
    return [int((batch["labels"][:, 1:] != -100).sum()) for batch in trainer.get_train_dataloader()]


def trainer_for(folder: Path, **changes: Any) -> SFTTrainer:
    args = sgd_arguments(folder, **{"per_device_train_batch_size": 1, **changes})
    return SFTTrainer(tiny_model(), args, None, rows(), None, tiny_tokenizer())


def test_the_sampler_decides_the_order_of_the_rows(tmp_path: Path) -> None:
    assert seen(trainer_for(tmp_path, sampler="sequential", train_sampling_strategy="random")) == list(COUNTS)
    easy = {"curriculum": {"start": 0.0, "steps": 99}}
    assert seen(trainer_for(tmp_path, sampler=easy)) == sorted(COUNTS)
    hard = {"curriculum": {"by": "level", "start": 0.0, "steps": 99}}
    assert seen(trainer_for(tmp_path, sampler=hard)) == sorted(COUNTS, reverse=True)
    assert sorted(seen(trainer_for(tmp_path, train_sampling_strategy="random"))) == sorted(COUNTS)
    assert seen(trainer_for(tmp_path)) == list(COUNTS)  # train_sampling_strategy: sequential


def test_token_rows_follow_the_sampler_too(tmp_path: Path) -> None:
    tokens = token_rows(*COUNTS)
    easy = {"curriculum": {"start": 0.0, "steps": 99}}
    args = sgd_arguments(tmp_path, sampler=easy, per_device_train_batch_size=1)
    trainer = SFTTrainer(tiny_model(), args, None, tokens, None, tiny_tokenizer())
    assert seen(trainer) == [count - 1 for count in sorted(COUNTS)]  # the first label of a row is not learned


def test_a_curriculum_counts_the_updates_of_the_whole_batch(tmp_path: Path) -> None:
    args = sgd_arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=2, sampler="curriculum")
    dataset = RowsDataset(token_rows(*range(1, 13)))
    order = training_order(dataset, args, micro_batch=2)
    assert dataset.facts(4).updates_per_epoch == 3
    assert max(order.order(0)[:4]) < 4  # the first update of four draws from the easiest tenth, or from what it needs


def test_a_wrong_sampler_is_refused_when_training_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown sampler 'curiculum'"):
        trainer_for(tmp_path, sampler="curiculum")


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "sampler",
    [{"curriculum": {"steps": 8}}, {"by_length": {"window": 2}}, {"staged": {"stages": [{"sources": ["*"]}]}}],
)
def test_a_run_resumed_in_the_middle_of_an_epoch_sees_the_same_rows(
    tmp_path: Path, sampler: dict[str, Any], workers: int, packing: bool
) -> None:
    if packing and "by_length" in sampler:
        return
    changes: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 1 if packing else 2,
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 7,  # in the middle of the second epoch of 5 updates
        "packing": packing,
        "max_length": 130,
        "sampler": sampler,
        "transform": f"{HERE}.masked",
        "dataloader_num_workers": workers,
    }
    whole = trainer_for(tmp_path, **changes)
    whole.train()
    again = trainer_for(tmp_path, **changes)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-7"))
    assert logged(again, "loss") == logged(whole, "loss")
    assert logged(again, "supervised_tokens") == logged(whole, "supervised_tokens")
    per_step = np.diff([0.0, *logged(whole, "supervised_tokens")]).tolist()
    assert per_step[:5] != per_step[5:10]  # the transform drew anew in the second epoch


def test_rows_that_diverge_are_named_under_any_order(tmp_path: Path) -> None:
    trainer = trainer_for(tmp_path, sampler={"curriculum": {"start": 0.0, "steps": 99}}, transform=f"{HERE}.masked")
    list(trainer.get_train_dataloader())
    easiest = [COUNTS.index(count) + 1 for count in sorted(COUNTS)]
    assert [trainer.rows_of_update(update) for update in range(10)] == [[n] for n in easiest]


def test_blanks_keep_the_parts_of_a_held_out_set_apart() -> None:
    assert in_parts([3, 1], 2) == [0, 1, 2, -1, 3, -1]
    assert in_parts([4], 2) == [0, 1, 2, 3]
    assert in_parts([], 2) == []


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("batch", [1, 2, 3, 8])
def test_each_part_of_a_held_out_set_has_its_own_loss(tmp_path: Path, packing: bool, batch: int) -> None:
    tokenizer, held = tiny_tokenizer(), rows_with_labels(*COUNTS[:5])
    args = sgd_arguments(tmp_path, per_device_eval_batch_size=batch, packing=packing)
    tokens, _ = tokenize_rows(held, args, tokenizer)
    dataset = for_evaluation(tokens, args, [("one", 2), ("two", 3)])
    trainer = SFTTrainer(tiny_model(), args, None, held, dataset, tokenizer)
    metrics = trainer.evaluate()
    alone = {
        "eval_one_loss": SFTTrainer(tiny_model(), args, None, held, held[:2], tokenizer).evaluate()["eval_loss"],
        "eval_two_loss": SFTTrainer(tiny_model(), args, None, held, held[2:], tokenizer).evaluate()["eval_loss"],
        "eval_loss": SFTTrainer(tiny_model(), args, None, held, held, tokenizer).evaluate()["eval_loss"],
    }
    found = {key: value for key, value in metrics.items() if key.endswith("loss")}
    assert found == pytest.approx(alone, rel=1e-6)


def test_on_several_ranks_a_part_fills_whole_rounds_of_batches(tmp_path: Path) -> None:
    class Ranks:
        """Of TrainingArguments, what counts."""

        eval_batch_size = 2
        world_size = 2

    args = sgd_arguments(tmp_path)
    dataset = for_evaluation(token_rows(*[3] * 7), args, [("one", 5), ("two", 2)])
    order = evaluation_order(dataset, Ranks(), by_part=True)
    assert list(order) == [0, 1, 2, 3, 4, -1, -1, -1, 5, 6, -1, -1]
    assert batches_by_part(dataset, Ranks()) == [("one", 2), ("two", 1)]
    assert list(evaluation_order(dataset, Ranks(), by_part=False)) == [0, 1, 2, 3, 4, 5, 6, -1]


def test_all_logits_of_a_metric_hold_no_blank_rows(tmp_path: Path) -> None:
    tokenizer, held = tiny_tokenizer(), rows_with_labels(*COUNTS[:5])
    args = sgd_arguments(tmp_path, per_device_eval_batch_size=2)
    tokens, _ = tokenize_rows(held, args, tokenizer)
    dataset = for_evaluation(tokens, args, [("one", 2), ("two", 3)])
    shapes = []

    def count(prediction: Any) -> dict[str, float]:
        shapes.append(len(prediction.predictions))
        return {}

    trainer = SFTTrainer(tiny_model(), args, None, held, dataset, tokenizer, compute_metrics=count)
    assert "eval_one_loss" not in trainer.evaluate()
    assert shapes == [5]


def test_training_data_takes_the_plan_that_was_made(tmp_path: Path) -> None:
    args = sgd_arguments(tmp_path, packing=True, max_length=16)
    dataset = for_training(token_rows(3, 6, 4, 7), args, seed=1)
    assert isinstance(dataset, PackedDataset)
    assert [int(torch.tensor([len(d["input_ids"]) for d in dataset[i]["documents"]]).sum()) for i in range(2)] == [
        16,
        4,
    ]
