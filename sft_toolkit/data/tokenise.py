"""Rows of a source -> batches of token rows, every row counted. Memory holds one batch, whatever the file's size."""

from __future__ import annotations

import gc
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from sft_toolkit.args import PreparationArguments
from sft_toolkit.data.carried import NOTHING, Carried
from sft_toolkit.data.conversation import IGNORED, Conversation, Example, PlainText, RowError
from sft_toolkit.data.lengths import TOO_LONG, fit
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import BAD_ROW, Refusal, Renderer, Tokens
from sft_toolkit.data.report import Tally
from sft_toolkit.data.split import content_key
from sft_toolkit.errors import DataError

SCHEMA = pa.schema(
    [
        ("input_ids", pa.list_(pa.int32())),
        ("labels", pa.list_(pa.int32())),
        ("loss_weights", pa.list_(pa.float32())),
        ("row", pa.int64()),
        ("source", pa.string()),
        ("content", pa.uint64()),
    ]
)
"""`loss_weights` is null where every token weighs 1, `row` the 1-based number in `source`, `content` the key of
`split.content_key`."""

BATCH_ROWS = 1000
BATCH_CHARACTERS = 1_000_000  # encoding needs about 200 bytes per token beside the ids: 100 MB at most


@dataclass
class SourceTokenizer:
    """Turns the rows of one source into tokens and counts what happens to each.

    Args:
        args: policies for bad and long rows.
        renderer: renders and masks; its notes are counted here as warnings.
        read: a raw row -> an example; raises RowError with the reason.
        carried: columns of the files that are kept beside the tokens.
    """

    args: PreparationArguments
    renderer: Renderer
    read: Callable[[RawRow], Example]
    carried: Carried = NOTHING
    tally: Tally = field(default_factory=Tally)

    @property
    def schema(self) -> pa.Schema:
        """`SCHEMA`, and behind it the carried columns."""
        return pa.schema([*SCHEMA, *(pa.field(name, kind) for name, kind in self.carried.fields())])

    def batches(self, rows: Iterable[RawRow]) -> Iterator[pa.RecordBatch]:
        """Token rows of `schema`, in the order of the rows.

        The first label of a row is -100: nothing stands before its token to predict it from.

        Raises:
            DataError: a bad row with `on_bad_row: error`, or a long one with `too_long: error`; names file and row.
        """
        unread = iter(rows)
        while pending := self._some(unread):
            yield self._encode(pending)

    def _some(self, unread: Iterator[RawRow]) -> list[_Pending]:
        """The rows of the next batch; none at the end."""
        pending: list[_Pending] = []
        characters = 0
        with _no_garbage_collection():
            for raw in unread:
                self.tally.rows_read += 1
                read = self._read(raw)
                if read is None:
                    continue
                pending.append(read)
                characters += _size(read.example)
                if len(pending) == BATCH_ROWS or characters >= BATCH_CHARACTERS:
                    break
        return pending

    def _read(self, raw: RawRow) -> _Pending | None:
        reason = raw.error
        if reason is None:
            try:
                return _Pending(raw, self.read(raw), self.carried.values(raw))
            except RowError as error:
                reason = str(error)
        self._refuse(raw, BAD_ROW, reason)
        return None

    def _encode(self, pending: list[_Pending]) -> pa.RecordBatch:
        with _no_garbage_collection():
            return self._encoded(pending)

    def _encoded(self, pending: list[_Pending]) -> pa.RecordBatch:
        results = self.renderer.encode([row.example for row in pending])
        fitted = (self._fitted(row.raw, result) for row, result in zip(pending, results, strict=True))
        kept = [(row, tokens) for row, tokens in zip(pending, fitted, strict=True) if tokens is not None]
        columns: list[list[Any]] = [
            [row.raw.number for row, _ in kept],
            [row.raw.source for row, _ in kept],
            [content_key(row.example) for row, _ in kept],
            *(list(values) for values in zip(*(row.carried for row, _ in kept), strict=True)),
        ]
        schema = self.schema
        columns += [[]] * (len(schema) - 3 - len(columns))  # no row is kept: zip knows no columns
        arrays = [
            _lists([tokens.input_ids for _, tokens in kept]),
            _lists([[IGNORED, *tokens.labels[1:]] for _, tokens in kept]),
            _weights([tokens.weights for _, tokens in kept]),
            *(pa.array(column, type=field.type) for column, field in zip(columns, list(schema)[3:], strict=True)),
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def _fitted(self, raw: RawRow, result: Tokens | Refusal) -> Tokens | None:
        """The row within `max_length`, counted; None where it is dropped."""
        if isinstance(result, Refusal):
            self._refuse(raw, result.reason, result.detail)
            return None
        fitted = fit(result, self.args.max_length, self.args.too_long)
        if fitted.tokens is None:
            if fitted.reason == TOO_LONG and self.args.too_long == "error":
                raise DataError(
                    f"{raw.place}: {len(result.input_ids)} tokens, more than max_length {self.args.max_length}; raise "
                    "it, or choose what happens to long rows by too_long: drop, truncate_right, ..."
                )
            self.tally.drop(str(fitted.reason), raw.place)
            return None
        self.tally.rows_truncated += fitted.truncated
        for note in result.notes:
            self.tally.warn(note, [raw.place])
        labels = fitted.tokens.labels
        self.tally.keep(len(labels), len(labels) - 1 - labels[1:].count(IGNORED))
        return fitted.tokens

    def _refuse(self, raw: RawRow, reason: str, detail: str) -> None:
        if self.args.on_bad_row == "error":
            raise DataError(f"{raw.place}: {detail}")
        self.tally.drop(reason, raw.place, detail)


class _Pending(NamedTuple):
    """A row that waits to be encoded together with others."""

    raw: RawRow
    example: Example
    carried: list[Any]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Many long lists without cycles are made and dropped in a batch: going through them again and again to find
    garbage took a sixth of the preparation. What is garbage in cycles is found behind the batch."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _lists(rows: list[list[int]]) -> pa.Array:
    """`pa.array(rows)` as lists of int32, in two thirds of the time."""
    offsets = np.zeros(len(rows) + 1, dtype=np.int32)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    values = array("i")
    for row in rows:
        values.fromlist(row)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.frombuffer(values, dtype=np.int32)))


def _weights(rows: list[list[float] | None]) -> pa.Array:
    kind = pa.list_(pa.float32())
    return pa.array(rows, type=kind) if any(rows) else pa.nulls(len(rows), kind)


def _size(example: Example) -> int:
    """Characters of an example, roughly; decides when a batch is big enough."""
    if isinstance(example, Conversation):
        return sum(len(message.content or "") for message in example.messages)
    if isinstance(example, PlainText):
        return len(example.prompt) + len(example.completion)
    return len(example.input_ids)
