"""Which row comes when: the order of an epoch, the same on every rank, and the blanks that even out the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
from torch.utils.data import Sampler

BLANK = -1
"""Index of the blank row that fills up a rank's share: it has no supervised token, so it changes no result."""


def permutation(size: int, *entropy: int) -> npt.NDArray[np.int64]:
    """0 to `size` - 1 in an order fixed by whole numbers that are not negative (seed, epoch, ...), for ever.

    numpy guarantees the raw stream of a bit generator over versions, but not its `permutation` (NEP 19).
    """
    return np.argsort(random_bits(size, *entropy), kind="stable")


def random_bits(size: int, *entropy: int) -> npt.NDArray[np.uint64]:
    """`size` random numbers of 64 bits, fixed by `entropy`."""
    return np.random.PCG64(np.random.SeedSequence(list(entropy))).random_raw(size)


class EpochSampler(Sampler[int]):
    """The order of all rows in an epoch, a function of (seed, epoch) alone.

    Every rank iterates the same order and takes its own batches from it; a resumed run finds its place by counting.

    Args:
        size: number of rows (packed: bins).
        seed: not negative.
        shuffle: False yields 0, 1, 2, ... in every epoch.
        pad_to_multiple_of: append `BLANK` (-1) until the length divides. With micro-batch x ranks here, all ranks get
            equally many full batches and no row is repeated (accelerate would start again from the first rows). The
            data set answers index -1 with a blank row (`RowsDataset`, `PackedDataset`).
        ordering: epoch -> the `size` indices of that epoch, instead of shuffling (see `orders`).

    Attributes:
        stamps_epoch: iteration yields `index + epoch * size`, from which the data set knows the epoch, in worker
            processes too (see `RowsDataset.transform`).
    """

    def __init__(
        self,
        size: int,
        seed: int,
        shuffle: bool = True,
        pad_to_multiple_of: int = 1,
        ordering: Callable[[int], Sequence[int]] | None = None,
    ) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.blanks = -size % pad_to_multiple_of
        self.ordering = ordering
        self.stamps_epoch = False
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; called by transformers and accelerate before each epoch."""
        self.epoch = epoch

    def order(self, epoch: int) -> Sequence[int]:
        """All indices of an epoch, blanks at the end."""
        blanks = [BLANK] * self.blanks
        if self.ordering is not None:
            return [*self._checked(self.ordering(epoch)), *blanks]
        if not self.shuffle:
            return [*range(self.size), *blanks]
        return [*permutation(self.size, self.seed, epoch).tolist(), *blanks]

    def _checked(self, order: Sequence[int]) -> Sequence[int]:
        if len(order) != self.size or (self.size and not -1 <= min(order) <= max(order) < self.size):
            raise ValueError(f"the order of an epoch needs {self.size} indices from 0 to {self.size - 1}: {order!r}")
        return order

    def of_update(self, update: int, rows_per_update: int) -> list[int]:
        """Indices, without blanks, of the 0-based `update` over all ranks, counted from the start of the run."""
        epoch, place = divmod(update, max(1, -(-len(self) // rows_per_update)))
        indices = self.order(epoch)[place * rows_per_update : (place + 1) * rows_per_update]
        return [index for index in indices if index != BLANK]

    def __iter__(self) -> Iterator[int]:
        order, shift = self.order(self.epoch), self.epoch * self.size
        if not self.stamps_epoch or not shift:
            return iter(order)
        return iter([index if index == BLANK else index + shift for index in order])

    def __len__(self) -> int:
        return self.size + self.blanks


class StreamOrder(EpochSampler):
    """0, 1, 2, ... without a list of them: the positions of a whole training on a stream."""

    def order(self, epoch: int) -> Sequence[int]:
        """All positions."""
        return range(self.size)


def in_parts(sizes: Sequence[int], multiple: int) -> list[int]:
    """0, 1, 2, ... with blanks behind each part until its length divides: no batch then holds rows of two parts.

    Worked example: `in_parts([3, 1], 2)` is `[0, 1, 2, -1, 3, -1]`.
    """
    order: list[int] = []
    start = 0
    for size in sizes:
        order += [*range(start, start + size), *[BLANK] * (-size % multiple)]
        start += size
    return order
