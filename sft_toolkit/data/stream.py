"""Rows that are tokenised and packed while the training goes on, for sources that are too large for a token cache.

Each rank takes every n-th row of the mixture, so that a row is tokenised once over all ranks. It reads a window of its
rows, tokenises them, packs them among themselves and serves them in an order drawn for that window: memory holds one
window, whatever the size of the sources. A window depends on nothing but the rows before it, so a place in the stream
is three numbers, and a resumed run reads on exactly where the interrupted one was.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from sft_toolkit.data.packing import best_fit_decreasing
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.report import Tally, too_many_refused
from sft_toolkit.data.sampler import permutation
from sft_toolkit.data.stream_notes import Note, WindowNotes
from sft_toolkit.data.token_dataset import PackedDataset, Parts, RowsDataset, TokenRowDict, Transform
from sft_toolkit.data.tokenise import SourceTokenizer
from sft_toolkit.errors import DataError

WINDOW_ROWS = 2_000
WINDOW_CHARACTERS = 8_000_000
_KEPT_PLACES = 64  # a loader reads ahead of what is trained on; a checkpoint asks for the latter

Epoch = Callable[[int], Iterator[RawRow]]
"""epoch -> the rows of all ranks, in order."""


@dataclass(frozen=True)
class Place:
    """Where a window begins.

    Attributes:
        index: items that this rank served before.
        epoch: pass over the mixture.
        rows: of all ranks, read before in this pass.
        tally: counts of this rank until here.
    """

    index: int
    epoch: int
    rows: int
    tally: dict[str, Any]


_BEGINNING = Place(0, 0, 0, Tally().as_dict())


class RankStream:
    """The endless stream of items (rows or bins) of one rank.

    Args:
        epoch: begins a pass over the mixture.
        tokenizer: counts in its tally what happened to the rows.
        rank, ranks: which rows are this rank's: every `ranks`-th one.
        seed: of the order within a window; None leaves rows in the order of their files.
        capacity: tokens of a bin; None serves rows.
        name: for messages.
        transform: changes each row when it is served, by (epoch, number of the row in its pass).
    """

    def __init__(
        self,
        epoch: Epoch,
        tokenizer: SourceTokenizer,
        rank: int = 0,
        ranks: int = 1,
        seed: int | None = None,
        capacity: int | None = None,
        name: str = "data.train",
        transform: Transform | None = None,
    ) -> None:
        self.rank, self.ranks = rank, ranks
        self._epoch_rows, self._tokenizer, self._name = epoch, tokenizer, name
        self._seed, self._capacity, self._transform = seed, capacity, transform
        self._notes = WindowNotes()
        self.go_to(_BEGINNING)

    @property
    def tally(self) -> Tally:
        """What happened to the rows of this rank so far."""
        noted = [Tally(**note.following["tally"]) for note in self._notes.read()[-1:]]
        return max([self._tokenizer.tally, *noted], key=lambda tally: tally.rows_read)

    def go_to(self, place: Place) -> None:
        """Read on from a place; rows before it are read, not tokenised."""
        self._tokenizer.tally = Tally(**deepcopy(place.tally))  # it counts on; the place does not
        self._place = place
        self._rows = self._epoch_rows(place.epoch)
        for _ in range(place.rows):
            next(self._rows)
        self._items: list[list[int]] = []
        self._window: list[TokenRowDict] = []
        self._names: list[str] = []
        self._numbers: list[int] = []
        self._notes.forget()
        self._next = place
        self._places = deque([place], maxlen=_KEPT_PLACES)
        self._served_in_pass = place.rows > 0

    def place_of(self, index: int) -> Place:
        """The beginning of the window that holds an item that was served lately, or is the next one."""
        places = [*self._places, *(Place(**note.following) for note in self._notes.read())]
        before = [place for place in places if place.index <= index]
        return max(before, key=lambda place: (place.index, place.epoch, place.rows), default=_BEGINNING)

    def item(self, index: int) -> list[TokenRowDict]:
        """The rows of an item, one or a bin of them; items are asked for in order."""
        if index < self._place.index:
            self.go_to(self.place_of(index))
        while index >= self._next.index:
            self._read_window()
        return [self._changed(row) for row in self._items[index - self._place.index]]

    def names(self, index: int) -> list[str]:
        """ "file, row N" of the rows of an item, as far as they are still held."""
        if 0 <= index - self._place.index < len(self._items):
            return [self._names[row] for row in self._items[index - self._place.index]]
        noted = (note for note in self._notes.read() if 0 <= index - note.first < len(note.names))
        return next((list(note.names[index - note.first]) for note in noted), [])

    def _changed(self, row: int) -> TokenRowDict:
        plain = self._window[row]
        return plain if self._transform is None else self._transform(plain, self._place.epoch, self._numbers[row])

    def _read_window(self) -> None:
        self._place = place = self._next
        read, pending = self._own_rows(place.rows)
        self._tokenise(pending)
        self._items = self._arranged(place)
        self._served_in_pass |= bool(self._items)
        ended = read < 0
        counts = self._tokenizer.tally.as_dict()
        self._next = Place(place.index + len(self._items), place.epoch + ended, 0 if ended else read, counts)
        self._places.append(self._next)
        names = [[self._names[row] for row in item] for item in self._items]
        self._notes.write(Note(place.index, asdict(self._next), names))
        if ended:
            self._begin_again()

    def _tokenise(self, pending: dict[int, RawRow]) -> None:
        self._window, self._names, self._numbers = [], [], []
        unmatched = iter(pending.items())
        for batch in self._tokenizer.batches(pending.values()):
            columns = batch.select(["input_ids", "labels", "loss_weights"]).to_pylist()
            self._window += [{key: value for key, value in row.items() if value is not None} for row in columns]
            kept = zip(batch.column("source").to_pylist(), batch.column("row").to_pylist(), strict=True)
            for source, number in kept:  # in the order of `pending`, from which rows may have been dropped
                self._names.append(f"{source}, row {number}")
                self._numbers.append(next(n for n, raw in unmatched if (raw.source, raw.number) == (source, number)))
        if refused := too_many_refused(self._name, self._tokenizer.tally, self._tokenizer.args.max_refused):
            raise DataError(refused)

    def _own_rows(self, read: int) -> tuple[int, dict[int, RawRow]]:
        """Rows of all ranks that were read in this pass (-1 at its end), and those of this rank among the new ones, by
        their number in the pass, from 0."""
        pending: dict[int, RawRow] = {}
        characters = 0
        for raw in self._rows:
            read += 1
            if (read - 1) % self.ranks != self.rank:
                continue
            pending[read - 1] = raw
            characters += len(str(raw.row))
            if len(pending) == WINDOW_ROWS or characters >= WINDOW_CHARACTERS:
                return read, pending
        return -1, pending

    def _begin_again(self) -> None:
        if not self._served_in_pass:
            raise DataError(
                f"{self._name}: a whole pass left rank {self.rank} of {self.ranks} without a row to train on; "
                f"{self._tokenizer.tally.rows_read} rows were read, dropped: {self._tokenizer.tally.rows_dropped}"
            )
        self._served_in_pass = False
        self._rows = self._epoch_rows(self._next.epoch)

    def _arranged(self, place: Place) -> list[list[int]]:
        lengths = [len(row["input_ids"]) for row in self._window]
        items = [[row] for row in range(len(lengths))]
        if self._capacity is not None and lengths:
            items = best_fit_decreasing(lengths, self._capacity)
        if self._seed is None:
            return items
        return [items[i] for i in permutation(len(items), self._seed, place.epoch, place.rows)]


class Streamed:
    """What both layouts of a stream share: global positions of a training -> items of this rank.

    Args:
        stream: of this rank.
        micro_batch: accelerate deals out batches of so many positions to the ranks in turn.
        length: positions of the whole training, over all ranks.
    """

    def __init__(self, stream: RankStream, micro_batch: int, length: int) -> None:
        self.stream, self._micro_batch, self._length = stream, micro_batch, length
        self.parts: Parts = ()
        self.transform: Transform | None = None  # the stream's own, which knows the pass
        self.weighted = True  # some row yet to come may be

    def __len__(self) -> int:
        return self._length

    def row_numbers(self, index: int) -> list[str]:
        """Names of the rows of a position, as far as this rank has them."""
        mine, number = self._number(index)
        return self.stream.names(number) if mine else []

    def _number(self, index: int) -> tuple[bool, int]:
        batch, place = divmod(index, self._micro_batch)
        turn, rank = divmod(batch, self.stream.ranks)
        return rank == self.stream.rank, turn * self._micro_batch + place

    def position(self, update: int, items_per_update: int) -> dict[str, Any]:
        """Where this rank is after so many updates, as plain data."""
        return {"ranks": self.stream.ranks, **asdict(self.stream.place_of(update * items_per_update))}


class StreamedRows(Streamed, RowsDataset):
    """Rows of a stream, to be padded."""

    def __getitem__(self, index: int) -> TokenRowDict:
        return self.stream.item(self._number(index)[1])[0]


class StreamedBins(Streamed, PackedDataset):
    """Bins of a stream."""

    def __getitem__(self, index: int) -> dict[str, list[TokenRowDict]]:
        return {"documents": self.stream.item(self._number(index)[1])}
