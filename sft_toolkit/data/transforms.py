"""A user's function that changes a row each time it is trained on, seeded so that a resumed run repeats it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sft_toolkit.args import Named
from sft_toolkit.registry import bound

TokenRowDict = dict[str, Any]
"""`input_ids` and `labels` of one document, and `loss_weights` where not every token weighs 1: lists."""

Change = Callable[[TokenRowDict, np.random.Generator], Mapping[str, Any]]
"""(a copy of the row, random numbers for this row in this epoch) -> the row as it is trained on this time."""


class SeededTransform:
    """Applies a `Change` with random numbers that depend on (seed, epoch, index of the row) alone.

    Args:
        change: may shorten a row or relabel it; `labels` stay one per token.
        seed: not negative.
        longest: most tokens of a changed row; None lets no row grow, as packed rows can't.
        name: for messages.
    """

    def __init__(self, change: Change, seed: int, longest: int | None, name: str) -> None:
        self.change, self.seed, self.longest, self.name = change, seed, longest, name

    def __call__(self, row: TokenRowDict, epoch: int, index: int) -> TokenRowDict:
        """The row of `index`, counted from 0, as it is trained on in `epoch`.

        Raises:
            ValueError: what the function returned is no row, or a longer one than fits.
        """
        entropy = np.random.SeedSequence([self.seed, epoch + 1, index + 1])
        copy = {key: list(values) for key, values in row.items()}
        changed = self.change(copy, np.random.Generator(np.random.PCG64(entropy)))
        return self._checked(changed, row, index)

    def _checked(self, changed: Any, row: TokenRowDict, index: int) -> TokenRowDict:
        where = f"transform '{self.name}' on row {index} of the training data (from 0)"
        if not isinstance(changed, Mapping) or not {"input_ids", "labels"} <= changed.keys():
            raise ValueError(f"{where}: returned {type(changed).__name__}, expected a row with input_ids and labels")
        ids, labels = list(changed["input_ids"]), list(changed["labels"])
        before = len(row["input_ids"])
        room = before if self.longest is None else max(before, self.longest)
        if not ids or len(ids) != len(labels) or len(ids) > room:
            raise ValueError(
                f"{where}: returned {len(ids)} ids and {len(labels)} labels; expected 1 to {room}, as many of each"
            )
        if "loss_weights" not in row:
            return {"input_ids": ids, "labels": labels}
        weights = list(changed.get("loss_weights", ()))
        if len(weights) != len(ids):
            raise ValueError(f"{where}: returned {len(ids)} ids and {len(weights)} loss_weights; as many are needed")
        return {"input_ids": ids, "labels": labels, "loss_weights": weights}


def transform_of(named: Named, seed: int, longest: int | None) -> SeededTransform | None:
    """The transform that `data.transform` names: a function, or a class that is called with the options; None for None.

    Raises:
        ConfigError: an unknown name, options that it does not take, or a function of other arguments.
    """
    if named is None:
        return None
    name = named if isinstance(named, str) else next(iter(named))
    return SeededTransform(bound("transform", named, places=2), seed, longest, name)
