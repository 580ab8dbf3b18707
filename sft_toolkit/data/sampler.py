"""Which row comes when: the order of an epoch, and how evaluation rows are dealt out to ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler

BLANK = -1
"""Index of the blank row that fills up a rank's share: it has no supervised token, so it changes no result."""


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
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True, pad_to_multiple_of: int = 1) -> None:
        self.size = size
        self.seed = seed
        self.shuffle = shuffle
        self.blanks = -size % pad_to_multiple_of
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of the next iteration; called by transformers and accelerate before each epoch."""
        self.epoch = epoch

    def order(self, epoch: int) -> list[int]:
        """All indices of an epoch, blanks at the end."""
        blanks = [BLANK] * self.blanks
        if not self.shuffle:
            return [*range(self.size), *blanks]
        # numpy guarantees the raw stream of a bit generator over versions, but not `permutation` (NEP 19).
        stream = np.random.PCG64(np.random.SeedSequence([self.seed, epoch]))
        return [*np.argsort(stream.random_raw(self.size), kind="stable").tolist(), *blanks]

    def of_update(self, update: int, rows_per_update: int) -> list[int]:
        """Indices, without blanks, of the 0-based `update` over all ranks, counted from the start of the run."""
        epoch, place = divmod(update, max(1, -(-len(self) // rows_per_update)))
        indices = self.order(epoch)[place * rows_per_update : (place + 1) * rows_per_update]
        return [index for index in indices if index != BLANK]

    def __iter__(self) -> Iterator[int]:
        return iter(self.order(self.epoch))

    def __len__(self) -> int:
        return self.size + self.blanks
