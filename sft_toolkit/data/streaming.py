"""`data.streaming: true`: sources, or rows from Python, as the stream of a rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase

from sft_toolkit.args import DataArguments, PreparationArguments
from sft_toolkit.data.formats import converter
from sft_toolkit.data.orders import ordering_of
from sft_toolkit.data.readers.columnar import drop_nulls
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer
from sft_toolkit.data.source_tokens import formats_by_file
from sft_toolkit.data.stream import Epoch, RankStream, Streamed, StreamedBins, StreamedRows
from sft_toolkit.data.stream_notes import worker_problem
from sft_toolkit.data.stream_rows import HEAD_ROWS, one_pass, passes_of, reader_of
from sft_toolkit.data.tokenise import SourceTokenizer
from sft_toolkit.data.transforms import SeededTransform, transform_of
from sft_toolkit.errors import ConfigError


def streaming_problems(data: DataArguments) -> list[str]:
    """Options of section `data` that a stream can't follow."""
    if not data.streaming:
        return []
    problems = []
    if data.val_split:
        problems.append("data.val_split: a stream has no rows to hold out; name files by data.eval")
    if data.mixing == "concatenate" and any(source.weight != 1.0 for source in data.train):
        problems.append("data.train: weights of a stream are probabilities; set data.mixing: interleave")
    return [*problems, *_order_problems(data, "data.")]


def check_stream(args: Any, streaming: bool) -> None:
    """What the arguments of a training on a stream must say.

    Raises:
        ConfigError: with everything that is missing.
    """
    problems = []
    if streaming and args.max_steps <= 0:
        problems.append("training.max_steps: a stream has no end, so data.streaming needs it")
    if streaming and (problem := worker_problem(args)):
        problems.append(problem)
    if problems:
        raise ConfigError(problems)


def _order_problems(args: PreparationArguments, prefix: str) -> list[str]:
    if _order(args) in ("shuffle", "sequential"):
        return []
    return [f"{prefix}sampler: a stream is read in order; shuffle (within a window) or sequential"]


def _order(args: PreparationArguments) -> str:
    return type(ordering_of(args.sampler)).__name__.lower()


def stream_sources(data: DataArguments, tokenizer: PreTrainedTokenizerBase, args: Any) -> StreamedRows | StreamedBins:
    """The training rows of a configuration.

    Args:
        args: `SFTArguments`; says how many positions the training has and which of them are this rank's.

    Raises:
        ConfigError, DataError: as `stream_rows.reader_of` and `check_stream`.
    """
    check_stream(args, streaming=True)
    return _laid_out(
        _stream(data, tokenizer, args.process_index, args.world_size, _seed(args), _epochs(data, args)), args
    )


def sample(data: DataArguments, tokenizer: PreTrainedTokenizerBase, rows: int) -> Dataset:
    """The first rows of the stream, in the order of their files, with the columns of prepared rows."""
    reader = _tokenizer(data, tokenizer, reader_of(data))
    until = None if data.mixing == "concatenate" else data.stopping_strategy
    first = one_pass(passes_of(data), [source.weight for source in data.train], until, 0, 0)
    found: list[dict[str, Any]] = []
    for raw in first:
        for batch in reader.batches(iter([raw])):
            found += batch.select(["input_ids", "labels", "row", "source"]).to_pylist()
        if len(found) >= rows:
            break
    return Dataset.from_list(found)


def stream_iterable(dataset: Any, args: Any, tokenizer: PreTrainedTokenizerBase, name: str) -> Streamed:
    """Text rows of an iterable data set, which is gone through again and again."""
    check_stream(args, streaming=True)
    if problems := _order_problems(args, ""):
        raise ConfigError(problems)

    def rows(epoch: int) -> Iterator[RawRow]:
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)
        for number, row in enumerate(dataset, 1):
            yield RawRow(name, number, _plain(row, dataset))

    head = [raw for raw, _ in zip(rows(0), range(HEAD_ROWS), strict=False)]
    read = converter(formats_by_file(head, {})[name])
    reader = _tokenizer(args, tokenizer, read)
    capacity = args.max_length if args.packing else None
    shares = args.process_index, args.world_size, _seed(args) if _order(args) == "shuffle" else None
    return _laid_out(RankStream(rows, reader, *shares, capacity, name, _transform(args, _seed(args))), args)


def _plain(row: Mapping[str, Any], dataset: Any) -> dict[str, Any]:
    return dict(drop_nulls(dict(row)) if isinstance(dataset, IterableDataset) else row)


def _stream(
    data: DataArguments, tokenizer: PreTrainedTokenizerBase, rank: int, ranks: int, seed: int, epochs: Epoch
) -> RankStream:
    reader = _tokenizer(data, tokenizer, reader_of(data))
    shuffled = seed if _order(data) == "shuffle" else None
    capacity = data.max_length if data.packing else None
    return RankStream(epochs, reader, rank, ranks, shuffled, capacity, transform=_transform(data, seed))


def _transform(args: PreparationArguments, seed: int) -> SeededTransform | None:
    return transform_of(args.transform, seed, None if args.packing else args.max_length)


def _epochs(data: DataArguments, args: Any) -> Epoch:
    passes, weights = passes_of(data), [source.weight for source in data.train]
    until = None if data.mixing == "concatenate" else data.stopping_strategy
    return lambda epoch: one_pass(passes, weights, until, _seed(args), epoch)


def _tokenizer(args: PreparationArguments, tokenizer: PreTrainedTokenizerBase, read: Any) -> SourceTokenizer:
    return SourceTokenizer(args, Renderer(tokenizer, args.supervise, cuts=args.too_long not in ("drop", "error")), read)


def _laid_out(stream: RankStream, args: Any) -> StreamedRows | StreamedBins:
    micro = args.per_device_train_batch_size
    length = args.max_steps * args.gradient_accumulation_steps * micro * args.world_size
    return StreamedBins(stream, micro, length) if args.packing else StreamedRows(stream, micro, length)


def _seed(args: Any) -> int:
    return int(args.seed if args.data_seed is None else args.data_seed)
