"""Layout `tokenized`: `input_ids` with `labels` or a mask of what is learned, and `loss_weights`."""

from __future__ import annotations

from typing import TypeVar

from sft_toolkit.data.conversation import IGNORED, RowError, TokenRow
from sft_toolkit.data.layouts.values import Row, describe, list_of, required

T = TypeVar("T")

MASKS = ("loss_mask", "assistant_masks", "assistant_mask", "completion_mask")


def from_tokenized(row: Row) -> TokenRow:
    """`labels` as they are, or made from the first mask of `MASKS` (1 = learned); padding is taken off.

    Padding is where `attention_mask` is 0, never where an id looks like padding.
    """
    ids = _integers(row, "input_ids", smallest=0)
    mask = next((name for name in MASKS if row.get(name) is not None), None)
    if row.get("labels") is not None:
        labels = _integers(row, "labels", smallest=IGNORED)
    elif mask is not None:
        chosen = _same_length(_mask(row, mask), ids, mask)
        labels = [i if on else IGNORED for i, on in zip(ids, chosen, strict=True)]
    else:
        known = ", ".join(("labels", *MASKS))
        raise RowError(f"beside input_ids one of {known} is needed; to learn every token, repeat input_ids as labels")
    labels = _same_length(labels, ids, "labels")
    weights = _numbers(row, "loss_weights") if row.get("loss_weights") is not None else None
    if weights is not None:
        _same_length(weights, ids, "loss_weights")
        labels = [label if weight else IGNORED for label, weight in zip(labels, weights, strict=True)]
    if row.get("attention_mask") is None:
        return TokenRow(ids, labels, weights)
    real = _same_length(_mask(row, "attention_mask"), ids, "attention_mask")
    kept = [i for i, on in enumerate(real) if on]
    return TokenRow([ids[i] for i in kept], [labels[i] for i in kept], weights and [weights[i] for i in kept])


def _mask(row: Row, column: str) -> list[int]:
    values: list[int] = list_of(required(row, column), column)
    return values if {*map(type, values)} == {bool} else _integers(row, column, smallest=0)


def _integers(row: Row, column: str, smallest: int) -> list[int]:
    values = list_of(required(row, column), column)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int) or value < smallest:
            raise RowError(f"{column}[{index}] is {describe(value)}, not an integer of at least {smallest}")
    return values


def _numbers(row: Row, column: str) -> list[float]:
    values = list_of(required(row, column), column)
    for index, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise RowError(f"{column}[{index}] is {describe(value)}, not a number")
    return [float(value) for value in values]


def _same_length(values: list[T], ids: list[int], column: str) -> list[T]:
    if len(values) != len(ids):
        raise RowError(f"input_ids has {len(ids)} tokens, {column} has {len(values)}")
    return values
