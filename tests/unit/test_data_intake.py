"""What is handed to SFTTrainer as data and can't be trained on is said in words, with the row, before step 1."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset, DatasetDict, IterableDataset
from transformers import TrainingArguments

from sft_toolkit import ConfigError, DataError, SFTTrainer
from tests.tiny import chat, tiny_model, tiny_tokenizer
from tests.training import sgd_arguments

TEXT = [{"messages": chat("a", "b")}]


def token_row(ids: Any, labels: Any = None) -> dict[str, Any]:
    return {"input_ids": ids, "labels": ids if labels is None else labels}


def built(folder: Path, train: Any, evaluation: Any = None, plain: bool = False, **changes: Any) -> SFTTrainer:
    args = TrainingArguments(str(folder), use_cpu=True) if plain else sgd_arguments(folder, **changes)
    return SFTTrainer(tiny_model(), args, None, train, evaluation, tiny_tokenizer())


def refused(error: type[Exception], folder: Path, train: Any, evaluation: Any = None, **changes: Any) -> str:
    with pytest.raises(error) as caught:
        built(folder, train, evaluation, **changes)
    return str(caught.value)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_an_id_without_embedding_row_is_named_by_row_before_the_training(
    tmp_path: Path, as_dataset: bool, plain: bool
) -> None:
    rows: Any = [token_row([5, 6]), token_row([5, 261])]
    rows = Dataset.from_list(rows) if as_dataset else rows
    message = "train_dataset, row 2: input_ids holds 261; the model has the ids 0 to 260"
    assert refused(DataError, tmp_path, rows, plain=plain) == message
    good = [token_row([5, 6])]
    assert refused(DataError, tmp_path, good, rows, plain=plain) == message.replace("train", "eval")
    in_a_set = refused(DataError, tmp_path, good, {"dev": rows}, plain=plain)
    assert in_a_set == message.replace("train_dataset", "eval_dataset['dev']")


@pytest.mark.parametrize("as_dataset", [False, True])
@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (token_row([5, -1]), "input_ids holds -1; the model has the ids 0 to 260"),
        (token_row([]), "input_ids is empty"),
        (token_row([5, 6], [5, 300]), "labels holds 300; expected -100 or an id of 0 to 260"),
        (token_row([5, 6], [-1, 6]), "labels holds -1; expected -100 or an id of 0 to 260"),
        (token_row([5, 6], [5]), "input_ids has 2 tokens, labels has 1"),
    ],
)
def test_every_wrong_token_row_is_named(tmp_path: Path, row: dict[str, Any], problem: str, as_dataset: bool) -> None:
    rows: Any = [token_row([5, 6]), token_row([7], [-100]), row]
    rows = Dataset.from_list(rows) if as_dataset else rows
    assert refused(DataError, tmp_path, rows) == f"train_dataset, row 3: {problem}"
    assert refused(DataError, tmp_path, rows, packing=True) == f"train_dataset, row 3: {problem}"


def test_tensors_and_a_held_out_set_of_a_later_evaluation_are_checked_too(tmp_path: Path) -> None:
    rows = [{"input_ids": torch.tensor([5, 999]), "labels": torch.tensor([5, 6])}]
    assert "row 1: input_ids holds 999" in refused(DataError, tmp_path, rows)
    trainer = built(tmp_path, TEXT)
    with pytest.raises(DataError, match="eval_dataset, row 1: input_ids holds 999"):
        trainer.evaluate(cast(Any, rows))


def test_a_tokenizer_with_more_ids_than_the_model_is_seen_on_text_rows_of_any_module(tmp_path: Path) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model(vocab_size=100)

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.inner.get_input_embeddings()

    args = sgd_arguments(tmp_path, activation_checkpointing=False)
    with pytest.raises(DataError, match=r"train_dataset, row 1: input_ids holds \d+; the model has the ids 0 to 99"):
        SFTTrainer(Wrapped(), args, None, TEXT, None, tiny_tokenizer())


def test_text_rows_of_unknown_columns_are_listed_with_the_formats(tmp_path: Path) -> None:
    message = refused(DataError, tmp_path, [{"question": "a", "answer": "b", "id": 1}])
    assert "no format fits the columns found: answer, id, question" in message
    assert "rename_columns" in message
    assert "prompt_completion: prompt, completion" in message


@pytest.mark.parametrize("rows", [[], Dataset.from_list([]), Dataset.from_dict({"messages": []})])
def test_no_rows_are_refused(tmp_path: Path, rows: Any) -> None:
    assert refused(DataError, tmp_path, rows) == "train_dataset: there are no rows"
    assert refused(DataError, tmp_path, TEXT, rows) == "eval_dataset: there are no rows"


@pytest.mark.parametrize("plain", [False, True])
def test_several_splits_are_not_one_training_set(tmp_path: Path, plain: bool) -> None:
    splits = DatasetDict(train=Dataset.from_list(TEXT), test=Dataset.from_list(TEXT))
    message = refused(ConfigError, tmp_path, splits, plain=plain)
    assert message == "train_dataset is a DatasetDict with the parts train, test: pass one"


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("path", ["rows.jsonl", Path("rows.jsonl")])
def test_a_path_is_no_data_set(tmp_path: Path, path: Any, plain: bool) -> None:
    message = refused(ConfigError, tmp_path, path, plain=plain)
    assert "('rows.jsonl'), expected a datasets.Dataset, a list of rows" in message
    assert "load_dataset('json', data_files='rows.jsonl', split='train')" in message


def test_text_rows_under_plain_arguments_name_the_arguments_that_render_them(tmp_path: Path) -> None:
    message = "train_dataset holds text rows (messages): render them with args=SFTArguments"
    assert refused(ConfigError, tmp_path, TEXT, plain=True) == message
    assert refused(ConfigError, tmp_path, Dataset.from_list(TEXT), plain=True) == message


def test_text_rows_with_a_collator_of_the_users_own_are_the_users_business(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, remove_unused_columns=False)
    trainer = SFTTrainer(tiny_model(), args, lambda rows: {"rows": rows}, TEXT)
    assert next(iter(trainer.get_train_dataloader())) == {"rows": TEXT}


def test_rows_that_are_no_mappings_are_named(tmp_path: Path) -> None:
    assert "train_dataset, row 1: is text, expected a mapping" in refused(DataError, tmp_path, ["hello"])
    later = refused(DataError, tmp_path, [*TEXT, ["hello"]])
    assert later.startswith("train_dataset, row 2: is a list, expected a mapping of column to value")


def test_a_held_out_stream_of_text_rows_is_refused(tmp_path: Path) -> None:
    stream = IterableDataset.from_generator(lambda: iter(TEXT))
    assert "eval_dataset: a stream of text rows; held-out rows" in refused(ConfigError, tmp_path, TEXT, stream)


def test_rows_beyond_text_are_left_to_trainer(tmp_path: Path) -> None:
    rows = [{"pixel_values": torch.zeros(3), "text": "a cat", "labels": 1}]
    assert built(tmp_path, rows).train_dataset is rows


def test_rows_that_are_all_dropped_stop_before_the_weights_of_a_named_model_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("sft_toolkit.model.loading.load_model", lambda *a, **k: pytest.fail("the weights were loaded"))
    args = sgd_arguments(tmp_path, max_length=12)
    with pytest.raises(DataError, match="train_dataset: no row is left to train on, 1 were read"):
        SFTTrainer(str(tmp_path / "model"), args, None, TEXT)


@pytest.mark.parametrize("column", ["loss_weights", "attention_mask"])
@pytest.mark.parametrize("as_dataset", [False, True])
def test_a_column_beside_the_tokens_has_one_value_for_each(tmp_path: Path, column: str, as_dataset: bool) -> None:
    rows: Any = [{**token_row([5, 6]), column: [1, 1]}, {**token_row([5, 6, 7]), column: [1]}]
    rows = Dataset.from_list(rows) if as_dataset else rows
    message = f"train_dataset, row 2: input_ids has 3 tokens, {column} has 1"
    assert refused(DataError, tmp_path, rows) == message


def test_weights_of_token_rows_count(tmp_path: Path) -> None:
    ids = [5, 6, 7, 8]
    weighted = [{**token_row(ids), "loss_weights": [1.0, 1.0, 0.0, 1.0]}]
    masked = [token_row(ids, [5, 6, -100, 8])]
    losses = []
    for i, rows in enumerate((weighted, masked)):
        trainer = built(tmp_path / str(i), rows, max_steps=1)
        trainer.train()
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("as_dataset", [False, True])
def test_labels_that_teach_nothing_are_refused_or_counted(
    tmp_path: Path, as_dataset: bool, caplog: pytest.LogCaptureFixture
) -> None:
    silent = [token_row([5, 6], [-100, -100]), token_row([5, 6, 7], [5, -100, -100])]  # a first label is never learned
    rows: Any = Dataset.from_list(silent) if as_dataset else silent
    message = "train_dataset: there is nothing to learn, all labels of all 2 rows are -100"
    assert refused(DataError, tmp_path, rows) == message
    assert refused(DataError, tmp_path, rows, packing=True) == message
    some: Any = [token_row([5, 6]), *silent, token_row([7, 8])]
    some = Dataset.from_list(some) if as_dataset else some
    found = "train_dataset: 2 of 4 rows have no supervised token; the first is row 2."
    assert refused(DataError, tmp_path, some) == f"{found} on_bad_row='drop' leaves them out"
    trainer = built(tmp_path, some, on_bad_row="drop")
    assert [row["input_ids"] for row in cast(Any, trainer.train_dataset)] == [[5, 6], [7, 8]]
    assert [r.getMessage() for r in caplog.records if "supervised" in r.getMessage()] == [f"{found} They are left out"]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"foo": 1}], "the rows have the columns foo; expected text (messages, conversations, instruction and output, "
         "prompt and completion, text) or tokens (input_ids and labels)"),
        ([{"input_ids": [5, 6], "attention_mask": [1, 1]}], "the rows have input_ids and no labels; add them (-100 "
         "where nothing is learned; a copy of input_ids learns everything) or pass a data_collator that does"),
    ],
)  # fmt: skip
def test_rows_without_a_column_that_the_model_takes(tmp_path: Path, rows: Any, said: str) -> None:
    assert refused(DataError, tmp_path, rows) == f"train_dataset: {said}"
    assert refused(DataError, tmp_path, TEXT, {"dev": rows}) == f"eval_dataset['dev']: {said}"
    assert refused(DataError, tmp_path, Dataset.from_list(rows)) == f"train_dataset: {said}"


def test_numbers_iterators_and_mixed_rows(tmp_path: Path) -> None:
    numbers = refused(DataError, tmp_path, [1, 2])
    assert numbers == "train_dataset, row 1: 1 is no row; expected a mapping such as {'messages': [...]}"
    once = refused(ConfigError, tmp_path, (row for row in TEXT))
    assert once.startswith("train_dataset is a generator, which ends after one pass, expected a datasets.Dataset, a")
    tokens = token_row([5, 6])
    said = "the rows before hold tokens (input_ids), and this one none"
    assert refused(DataError, tmp_path, [tokens, tokens, *TEXT]) == f"train_dataset, row 3: {said}"
    said = "the rows before hold no tokens (input_ids), and this one some"
    assert refused(DataError, tmp_path, [*TEXT, tokens]) == f"train_dataset, row 2: {said}"
