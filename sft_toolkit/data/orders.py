"""The orders that `data.sampler` names. Each is a function of (facts about the rows, seed, epoch) and nothing else,
so that every rank finds the same one and a resumed run finds its place in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from sft_toolkit.args import Named
from sft_toolkit.data.facts import Floats, Ints, RowFacts
from sft_toolkit.data.sampler import permutation, random_bits
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.registry import bound, build

BANDS = 16
"""Packed, a curriculum fills its bins from this many bands of difficulty, each by itself."""


class Ordering:
    """Base class of all orders; a user's own is `@register("sampler", "name")` on a subclass with its own `order`."""

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """The indices of an epoch: `facts.size` of them, from 0 to `facts.size` - 1."""
        raise NotImplementedError

    def columns(self) -> list[str]:
        """Number columns of the files that `order` reads; they are kept beside the tokens."""
        return []

    def check_packing(self) -> None:
        """Raises ConfigError for an order that makes no sense on packed bins."""

    def bin_groups(self, facts: RowFacts) -> Ints | None:
        """A number per row: rows of different numbers never share a bin. None packs all rows together."""
        return None


class Shuffle(Ordering):
    """Another random order in each epoch."""

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """Every index once."""
        indices: list[int] = permutation(facts.size, seed, epoch).tolist()
        return indices


class Sequential(Ordering):
    """The order of the files, in every epoch."""

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """Every index once."""
        return range(facts.size)


class ByLength(Ordering):
    """Rows of similar length come in one update, updates in random order: less padding, still shuffled.

    Args:
        window: so many updates' rows are drawn at random and then sorted; larger pads less and shuffles less.
    """

    def __init__(self, window: int = 50) -> None:
        if window < 1:
            raise ValueError(f"window is {window}; at least 1 update")
        self.window = window

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """Every index once."""
        drawn, step = permutation(facts.size, seed, epoch), facts.rows_per_update
        updates: list[npt.NDArray[np.int64]] = []
        for start in range(0, facts.size, step * self.window):
            rows = drawn[start : start + step * self.window]
            rows = rows[np.argsort(-facts.lengths[rows], kind="stable")]
            updates += [rows[i : i + step] for i in range(0, len(rows), step)]
        whole = facts.size // step  # the smaller last update stays the last: it would shift those behind it
        shuffled = [updates[i] for i in permutation(whole, seed, epoch, 1)] + updates[whole:]
        indices: list[int] = np.concatenate([*shuffled, np.zeros(0, dtype=np.int64)]).astype(np.int64).tolist()
        return indices

    def check_packing(self) -> None:
        """Refused: packed rows have no padding to save."""
        raise ConfigError("by_length saves padding, and packed rows have none; take sampler or packing out")


class Curriculum(Ordering):
    """From easy to hard: an update draws from the rows that are easy enough by then, each row once an epoch.

    The share of the rows that may be drawn grows from `start` to 1 over the first `steps` updates (Platanios et al.
    2019, arXiv:1903.09848, who draw with repetition). Behind that, epochs are shuffled.

    Args:
        by: `length` (tokens), or a number column of the files.
        score: instead of `by`, the dotted path of a function (token row) -> number.
        steps: updates until all rows may be drawn; by default the first epoch.
        start: share of the rows that the first update draws from.
        pacing: how the share grows: `linear`, or `sqrt` (quickly at first).
        reverse: large numbers are easy.
    """

    def __init__(
        self,
        by: str = "length",
        score: str | None = None,
        steps: int | None = None,
        start: float = 0.1,
        pacing: Literal["linear", "sqrt"] = "linear",
        reverse: bool = False,
    ) -> None:
        if not 0 <= start <= 1:
            raise ValueError(f"start is {start}; expected a share from 0 to 1")
        if steps is not None and steps < 1:
            raise ValueError(f"steps is {steps}; at least 1 update")
        if pacing not in ("linear", "sqrt"):
            raise ValueError(f"unknown pacing '{pacing}'{did_you_mean(pacing, ['linear', 'sqrt'])} (linear or sqrt)")
        self.by, self.steps, self.start, self.pacing, self.reverse = by, steps, start, pacing, reverse
        self.score: Callable[[Mapping[str, Any]], float] | None = (
            None if score is None else bound("sampler", score, places=1)
        )
        self._ranking: tuple[RowFacts, Ints] | None = None

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """Every index once."""
        pool: list[int] = []
        ranking, draws = self._easy_first(facts).tolist(), random_bits(facts.size, seed, epoch).tolist()
        indices = []
        for drawn, limit in enumerate(self._limits(facts, epoch)):
            pool += ranking[drawn + len(pool) : limit]
            place = draws[drawn] % len(pool)
            pool[place], pool[-1] = pool[-1], pool[place]
            indices.append(pool.pop())
        return indices

    def columns(self) -> list[str]:
        """The column of `by`, if it is one."""
        return [] if self.score is not None or self.by == "length" else [self.by]

    def bin_groups(self, facts: RowFacts) -> Ints | None:
        """Bands of equal size and rising difficulty: a bin has one difficulty."""
        groups = np.empty(facts.size, dtype=np.int64)
        groups[self._easy_first(facts)] = np.arange(facts.size) * BANDS // max(1, facts.size)
        return groups

    def _limits(self, facts: RowFacts, epoch: int) -> list[int]:
        """How many of the easiest rows are in play at each position of an epoch; one more than were drawn at least."""
        progress = np.minimum(facts.updates(epoch) / (self.steps or facts.updates_per_epoch), 1.0)
        if self.pacing == "linear":
            share = self.start + (1 - self.start) * progress
        else:
            share = np.sqrt(self.start**2 + (1 - self.start**2) * progress)
        limits: list[int] = np.maximum(np.ceil(share * facts.size), np.arange(1, facts.size + 1)).astype(int).tolist()
        return limits

    def _easy_first(self, facts: RowFacts) -> Ints:
        if self._ranking is None or self._ranking[0] is not facts:
            numbers = self._numbers(facts)
            self._ranking = facts, np.argsort(-numbers if self.reverse else numbers, kind="stable")
        return self._ranking[1]

    def _numbers(self, facts: RowFacts) -> Floats:
        if self.score is not None:
            return facts.score(self.score)
        return facts.lengths if self.by == "length" else facts.column(self.by)


def ordering_of(named: Named, default: str = "shuffle") -> Ordering:
    """The order that `data.sampler` names: a name, or `{name: {option: value}}`; None is `default`.

    Raises:
        ConfigError: an unknown name, an option that it does not take, or a thing that is no order.
    """
    name, options = (named or default, {}) if not isinstance(named, dict) else next(iter(named.items()))
    ordering = build("sampler", name, options)
    if not isinstance(ordering, Ordering):
        raise ConfigError(f"sampler '{name}' makes a {type(ordering).__name__}; expected an orders.Ordering")
    return ordering
