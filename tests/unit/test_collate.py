"""Exact tensors of the padded and the packed layout."""

from __future__ import annotations

from typing import Any

import datasets
import numpy as np
import pytest
import torch

from sft_toolkit.data.collate import PackedCollator, PaddedCollator
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset, row_lengths

A: dict[str, Any] = {"input_ids": [3, 65, 66, 4], "labels": [-100, -100, 66, 4]}
B: dict[str, Any] = {"input_ids": [3, 67], "labels": [-100, 67]}
C: dict[str, Any] = {"input_ids": [68, 69, 70], "labels": [68, 69, 70]}


def token_dataset() -> datasets.Dataset:
    return datasets.Dataset.from_list([{**row, "row": i + 1, "source": "x"} for i, row in enumerate((A, B, C))])


def test_rows_are_padded_on_the_right() -> None:
    batch = PaddedCollator(pad_token_id=0)([A, B])
    assert {name: tensor.dtype for name, tensor in batch.items()} == {
        "input_ids": torch.int64,
        "attention_mask": torch.int64,
        "labels": torch.int64,
    }
    assert batch["input_ids"].tolist() == [[3, 65, 66, 4], [3, 67, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 66, 4], [-100, 67, -100, -100]]


def test_a_pad_token_that_is_the_end_of_turn_stays_supervised_where_it_is_text() -> None:
    batch = PaddedCollator(pad_token_id=4)([A, B])
    assert batch["input_ids"].tolist() == [[3, 65, 66, 4], [3, 67, 4, 4]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 66, 4], [-100, 67, -100, -100]]


def test_the_length_is_rounded_up_to_a_multiple() -> None:
    batch = PaddedCollator(pad_token_id=0, pad_to_multiple_of=8)([B])
    assert batch["input_ids"].tolist() == [[3, 67, 0, 0, 0, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 0, 0, 0, 0, 0, 0]]
    assert PaddedCollator(pad_token_id=0, pad_to_multiple_of=2)([B])["input_ids"].shape == (1, 2)


def test_the_first_label_of_a_document_has_nothing_to_be_predicted_from() -> None:
    assert PaddedCollator(pad_token_id=0)([C])["labels"].tolist() == [[-100, 69, 70]]
    packed = PackedCollator()([{"documents": [C, C]}])
    assert packed["labels"].tolist() == [[-100, 69, 70, -100, 69, 70]]


def test_a_bin_is_one_row_with_restarting_positions_and_no_mask() -> None:
    batch = PackedCollator()([{"documents": [A, B, C]}])
    assert set(batch) == {"input_ids", "labels", "position_ids"}
    assert batch["input_ids"].tolist() == [[3, 65, 66, 4, 3, 67, 68, 69, 70]]
    assert batch["labels"].tolist() == [[-100, -100, 66, 4, -100, 67, -100, 69, 70]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0, 1, 0, 1, 2]]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_several_bins_of_a_batch_stand_one_behind_the_other() -> None:
    batch = PackedCollator()([{"documents": [B]}, {"documents": [C]}])
    assert batch["input_ids"].tolist() == [[3, 67, 68, 69, 70]]
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1, 2]]


def test_arrays_and_tensors_collate_like_lists_and_stay_untouched() -> None:
    arrays = {"input_ids": np.array([68, 69], dtype=np.int32), "labels": np.array([68, 69], dtype=np.int32)}
    tensors = {"input_ids": torch.tensor([68, 69]), "labels": torch.tensor([68, 69])}
    assert PaddedCollator(pad_token_id=0)([arrays, tensors])["labels"].tolist() == [[-100, 69], [-100, 69]]
    assert arrays["labels"].tolist() == [68, 69]
    assert tensors["labels"].tolist() == [68, 69]


def test_ids_and_labels_of_different_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="2 ids, 1 labels"):
        PaddedCollator(pad_token_id=0)([{"input_ids": [1, 2], "labels": [1]}])


def test_rows_dataset_serves_tokens_and_a_blank_row() -> None:
    rows = RowsDataset(token_dataset())
    assert len(rows) == 3
    assert rows[0] == A
    assert rows[2] == C
    assert rows[-1] == {"input_ids": [0], "labels": [-100]}


def test_packed_dataset_serves_bins_in_the_order_of_the_plan_and_a_blank_bin() -> None:
    bins = PackedDataset(token_dataset(), [[2, 0], [1]])
    assert len(bins) == 2
    assert bins[0] == {"documents": [C, A]}
    assert bins[1] == {"documents": [B]}
    assert bins[-1] == {"documents": [{"input_ids": [0], "labels": [-100]}]}


def test_row_numbers_are_those_of_the_source() -> None:
    tokens = token_dataset().select([2, 0, 1])
    assert RowsDataset(tokens).row_numbers(0) == [3]
    assert PackedDataset(tokens, [[0, 1], [2]]).row_numbers(0) == [3, 1]
    assert RowsDataset(tokens.remove_columns(["row"])).row_numbers(2) == [3]


def test_lengths_follow_a_selection_of_rows() -> None:
    tokens = token_dataset()
    assert row_lengths(tokens).tolist() == [4, 2, 3]
    assert row_lengths(tokens.select([2, 2, 1])).tolist() == [3, 3, 2]
    assert row_lengths(tokens.select([])).tolist() == []


def test_a_row_that_brings_its_own_mask_keeps_it() -> None:
    rows = [
        {"input_ids": [0, 0, 7], "labels": [-100, -100, 7], "attention_mask": [0, 0, 1]},  # padded on the left already
        {"input_ids": [8, 9], "labels": [8, 9]},
    ]
    assert PaddedCollator(pad_token_id=0)(rows)["attention_mask"].tolist() == [[0, 0, 1], [1, 1, 0]]


def test_rows_of_several_sources_are_named_with_their_source() -> None:
    tokens = datasets.Dataset.from_dict(
        {
            "input_ids": [[5, 6]] * 3,
            "labels": [[5, 6]] * 3,
            "row": [3, 1, 2],
            "source": ["a.jsonl", "b.json", "b.json"],
        }
    )
    assert RowsDataset(tokens).row_numbers(0) == ["a.jsonl, line 3"]
    assert PackedDataset(tokens, [[0, 2], [1]]).row_numbers(0) == ["a.jsonl, line 3", "b.json, row 2"]
