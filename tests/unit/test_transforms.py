"""Transforms see the epoch and the row, and nothing else that could differ in a resumed run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

from sft_toolkit.data.sampler import EpochSampler
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset
from sft_toolkit.data.transforms import TokenRowDict, transform_of
from sft_toolkit.errors import ConfigError
from tests.unit.token_rows import token_rows

TOKENS = token_rows(4, 5, 6)


def renumber(row: TokenRowDict, rng: np.random.Generator, low: int = 100) -> TokenRowDict:
    """All ids become one random number."""
    number = int(rng.integers(low, low + 1000))
    return {"input_ids": [number] * len(row["input_ids"]), "labels": row["labels"]}


class Relabel:
    """A transform with state of its own."""

    def __init__(self, label: int) -> None:
        self.label = label

    def __call__(self, row: TokenRowDict, rng: np.random.Generator) -> TokenRowDict:
        row["labels"] = [self.label] * len(row["labels"])
        return row


def longer(row: TokenRowDict, rng: np.random.Generator) -> TokenRowDict:
    return {key: [*values, 1] for key, values in row.items()}


def nothing(row: TokenRowDict, rng: np.random.Generator) -> Any:
    return None


HERE = __name__


def drawn(dataset: RowsDataset, index: int) -> int:
    return int(dataset[index]["input_ids"][0])


def test_a_row_changes_with_its_epoch_and_repeats_within_it() -> None:
    dataset = RowsDataset(TOKENS, transform_of(f"{HERE}.renumber", seed=42, longest=10))
    by_epoch = [[drawn(dataset, epoch * 3 + row) for row in range(3)] for epoch in range(3)]
    again = RowsDataset(TOKENS, transform_of(f"{HERE}.renumber", seed=42, longest=10))
    assert [[drawn(again, epoch * 3 + row) for row in range(3)] for epoch in range(3)] == by_epoch
    assert len({number for numbers in by_epoch for number in numbers}) == 9
    other = RowsDataset(TOKENS, transform_of(f"{HERE}.renumber", seed=43, longest=10))
    assert drawn(other, 0) != by_epoch[0][0]
    assert dataset.tokens[0]["input_ids"] == [1, 1, 1, 1]


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_know_the_epoch(workers: int) -> None:
    dataset = RowsDataset(TOKENS, transform_of(f"{HERE}.renumber", seed=42, longest=10))
    sampler = EpochSampler(3, 0, shuffle=False, pad_to_multiple_of=2)
    sampler.stamps_epoch = True
    loader: Any = DataLoader(
        dataset, batch_size=2, sampler=sampler, num_workers=workers, collate_fn=list, persistent_workers=workers > 0
    )
    for epoch in range(2):
        sampler.set_epoch(epoch)
        seen = [row["input_ids"][0] for batch in loader for row in batch]
        assert seen == [*(drawn(dataset, epoch * 3 + row) for row in range(3)), 0]


def test_packed_rows_are_changed_by_their_own_index() -> None:
    transform = transform_of(f"{HERE}.renumber", seed=42, longest=None)
    rows, packed = RowsDataset(TOKENS, transform), PackedDataset(TOKENS, [[2, 0], [1]], transform)
    first = packed[0]["documents"]
    assert [document["input_ids"][0] for document in first] == [drawn(rows, 2), drawn(rows, 0)]
    second_epoch = packed[1 + 2]["documents"]
    assert [document["input_ids"][0] for document in second_epoch] == [drawn(rows, 1 + 3)]


def test_options_reach_functions_and_classes() -> None:
    function = transform_of({f"{HERE}.renumber": {"low": 5000}}, seed=1, longest=10)
    assert function is not None
    assert function({"input_ids": [1], "labels": [1]}, 0, 0)["input_ids"][0] >= 5000
    made = transform_of({f"{HERE}.Relabel": {"label": -100}}, seed=1, longest=10)
    assert made is not None
    assert made({"input_ids": [1, 2], "labels": [1, 2]}, 0, 0) == {"input_ids": [1, 2], "labels": [-100, -100]}
    assert transform_of(None, 1, 10) is None


@pytest.mark.parametrize(
    ("named", "message"),
    [
        ("nowhere", "unknown transform 'nowhere'"),
        ({f"{HERE}.renumber": {"hi": 1}}, f"transform '{HERE}.renumber': unknown option 'hi' (accepted: low)"),
        ("os.getcwd", "transform 'os.getcwd': it is called with 2 arguments, but: too many positional arguments"),
        ({f"{HERE}.Relabel": {}}, f"transform '{HERE}.Relabel': missing option 'label'"),
    ],
)
def test_what_can_not_be_called_is_refused(named: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        transform_of(named, 0, None)
    assert str(caught.value).startswith(message)


def test_a_packed_row_may_not_grow_and_a_padded_one_to_max_length() -> None:
    row: Mapping[str, list[int]] = {"input_ids": [1, 2], "labels": [1, 2]}
    padded = transform_of(f"{HERE}.longer", 0, 3)
    assert padded is not None
    assert padded(dict(row), 0, 0)["input_ids"] == [1, 2, 1]
    packed = transform_of(f"{HERE}.longer", 0, None)
    assert packed is not None
    with pytest.raises(ValueError, match="returned 3 ids and 3 labels; expected 1 to 2, as many of each"):
        packed(dict(row), 0, 7)


def test_a_transform_that_returns_no_row_is_named() -> None:
    broken = transform_of(f"{HERE}.nothing", 0, None)
    assert broken is not None
    message = rf"^transform '{HERE}\.nothing' on row 7 .*: returned NoneType, expected a row with input_ids and labels$"
    with pytest.raises(ValueError, match=message):
        broken({"input_ids": [1], "labels": [1]}, 0, 7)
