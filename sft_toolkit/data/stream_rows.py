"""Rows of sources that are read again and again without ever being held: one pass over a mixture, and its formats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from sft_toolkit.args import DataArguments, SourceArguments, StoppingStrategy
from sft_toolkit.data.conversation import Example
from sft_toolkit.data.maps import WatchedMaps
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.source_tokens import formats_by_file
from sft_toolkit.data.sources import expand, read_rows
from sft_toolkit.errors import ConfigError, DataError

Pass = Callable[[], Iterator[RawRow]]
"""Begins a pass over a source."""

HEAD_ROWS = 1000
"""Rows of each file that its format is told from; a later row that does not fit is a bad row."""

_STREAM = 0x73747265
_DRAWS = 4096


def one_pass(
    sources: Sequence[Pass], weights: Sequence[float], until: StoppingStrategy | None, seed: int, epoch: int
) -> Iterator[RawRow]:
    """The rows of one epoch, in an order that depends on (seed, epoch) alone.

    Args:
        sources: begun once, with `all_exhausted` as often as needed.
        weights: probabilities up to a factor, for interleaving.
        until: how interleaving ends; None reads one source behind the other.
    """
    if until is None:
        yield from chain.from_iterable(source() for source in sources)
        return
    limits = np.cumsum(np.asarray(weights) / np.sum(weights))
    reading, used_up = [source() for source in sources], set[int]()
    needed = {number for number, weight in enumerate(weights) if weight > 0}
    for number in _draws(limits, seed, epoch):
        row = next(reading[number], None)
        if row is None:
            used_up.add(number)
            if until == "first_exhausted" or used_up == needed:
                return
            reading[number] = sources[number]()
            row = next(reading[number])
        yield row


def _draws(limits: np.ndarray[tuple[int], np.dtype[np.float64]], seed: int, epoch: int) -> Iterator[int]:
    generator = np.random.PCG64(np.random.SeedSequence([seed, epoch, _STREAM]))
    last = len(limits) - 1
    while True:
        drawn = np.searchsorted(limits, generator.random_raw(_DRAWS) / 2.0**64, side="right")
        yield from np.minimum(drawn, last).tolist()


def passes_of(data: DataArguments) -> list[Pass]:
    """A pass for each source of `data.train`."""

    def of(source: SourceArguments) -> Pass:
        return lambda: read_rows(source, data.on_bad_row, streaming=True)

    return [of(source) for source in data.train]


def reader_of(data: DataArguments) -> Callable[[RawRow], Example]:
    """A row of any source -> an example.

    Raises:
        DataError: a file whose first rows fit no format.
        ConfigError: a file that two sources name, so that a row would not know whose maps to follow.
    """
    readers: dict[str, WatchedMaps] = {}
    for source in data.train:
        formats = _formats(source, data)
        maps = WatchedMaps(source, formats)
        for file in formats:
            if file in readers:
                raise ConfigError(f"data.train: {file} is named twice, which streaming can't tell apart")
            readers[file] = maps
    return lambda raw: readers[raw.source](raw)


def _formats(source: SourceArguments, data: DataArguments) -> dict[str, str]:
    """The format of each file, from its first rows."""
    asked = source.format if source.format != "auto" else data.format
    formats: dict[str, str] = {}
    for path in map(str, expand(source)) if expand(source) else [source.path]:
        if asked != "auto":
            formats[path] = asked
            continue
        limit = HEAD_ROWS if source.max_rows is None else min(HEAD_ROWS, source.max_rows)
        head = read_rows(replace(source, path=path, max_rows=limit), data.on_bad_row, streaming=True)
        found = formats_by_file(head, source.columns)
        if path not in found:
            raise DataError(f"{path}: none of the first {limit} rows can be read, so the format can't be told")
        formats |= found
    return formats
