"""A stream serves every row once a pass, to one rank, in a fixed order; and goes on exactly where it was."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from datasets import IterableDataset

from sft_toolkit import ConfigError, DataError, SFTTrainer
from sft_toolkit.args import DataArguments, SourceArguments
from sft_toolkit.data import stream as streams
from sft_toolkit.data.prepare import check_options
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer
from sft_toolkit.data.stream import Place, RankStream
from sft_toolkit.data.stream_rows import one_pass, passes_of, reader_of
from sft_toolkit.data.tokenise import SourceTokenizer
from tests.tiny import chat, supervised_text, tiny_model, tiny_tokenizer
from tests.training import logged, sgd_arguments
from tests.unit.test_prepare import written

TOKENIZER = tiny_tokenizer()


def numbered(*names: str) -> list[dict[str, Any]]:
    return [{"messages": chat("q", name)} for name in names]


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "WINDOW_ROWS", 3)


def stream(folder: Path, rows: int = 10, rank: int = 0, ranks: int = 1, **changes: Any) -> RankStream:
    path = written(folder / "a.jsonl", numbered(*(f"row{i}" for i in range(rows))))
    data = DataArguments(train=[SourceArguments(path=path)], streaming=True, on_bad_row="drop")
    tokenizer = SourceTokenizer(data, Renderer(TOKENIZER), reader_of(data))
    return RankStream(
        lambda epoch: one_pass(passes_of(data), [1.0], None, 0, epoch), tokenizer, rank, ranks, **{"seed": 7, **changes}
    )


def said(items: list[list[dict[str, Any]]]) -> list[list[str]]:
    """What is learned of each row of each item."""
    return [
        [supervised_text(TOKENIZER, row["input_ids"], row["labels"]).removesuffix("<|im_end|>") for row in item]
        for item in items
    ]


def served(of: RankStream, *indices: int) -> list[list[str]]:
    return said([of.item(index) for index in indices])


ROWS = [f"row{i}" for i in range(10)]


def test_every_row_comes_once_a_pass_and_in_another_order_each_time(tmp_path: Path) -> None:
    passes = served(stream(tmp_path), *range(20))
    first, second = ([text for (text,) in part] for part in (passes[:10], passes[10:]))
    assert sorted(first) == sorted(second) == ROWS
    assert first != second != ROWS
    assert [sorted(first[i : i + 3]) for i in (0, 3, 6, 9)] == [ROWS[0:3], ROWS[3:6], ROWS[6:9], ROWS[9:]]
    in_order = served(stream(tmp_path, seed=None), *range(12))
    assert [text for (text,) in in_order] == [*ROWS, "row0", "row1"]


def test_ranks_share_the_rows_of_a_pass(tmp_path: Path) -> None:
    shares = [served(stream(tmp_path, rank=rank, ranks=3), *range(n)) for rank, n in enumerate((4, 3, 3))]
    assert [sorted(text for (text,) in share) for share in shares] == [
        ["row0", "row3", "row6", "row9"],
        ["row1", "row4", "row7"],
        ["row2", "row5", "row8"],
    ]


def test_bins_hold_whole_rows_of_one_window(tmp_path: Path) -> None:
    bins = served(stream(tmp_path, capacity=60), *range(7))  # rows of 26 tokens: two to a bin
    assert sorted(map(len, bins)) == [1, 1, 1, 1, 2, 2, 2]
    assert Counter(text for packed in bins for text in packed) == Counter(ROWS)


@pytest.mark.parametrize("capacity", [None, 60])
@pytest.mark.parametrize("index", [0, 1, 3, 5, 13])
def test_a_stream_goes_on_from_a_place_with_its_counts(tmp_path: Path, index: int, capacity: int | None) -> None:
    whole, other = (stream(tmp_path, ranks=2, rank=1, capacity=capacity) for _ in range(2))
    before = served(whole, *range(index))
    expected = served(whole, *range(index, index + 9))
    place = Place(**asdict(whole.place_of(index)))
    other.go_to(place)
    assert served(other, *range(index, index + 9)) == expected
    assert other.tally == whole.tally
    replayed = stream(tmp_path, ranks=2, rank=1, capacity=capacity)
    assert served(replayed, *range(index, index + 9)) == expected
    assert served(replayed, *range(index)) == before  # back to the beginning


def remembered(row: dict[str, Any], epoch: int, index: int) -> dict[str, Any]:
    return {**row, "labels": [epoch, index]}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_transform_is_told_the_pass_and_the_number_of_the_row_in_it(tmp_path: Path, ranks: int) -> None:
    """As for prepared rows, on any number of ranks, wherever rows were dropped before."""
    bad: dict[str, Any] = {"messages": []}
    rows = [*numbered("row0"), bad, *numbered("row2", "row3"), bad, *numbered("row5", "row6")]
    seen = []
    for rank in range(ranks):
        whole, other = (stream(tmp_path, rank=rank, ranks=ranks, transform=remembered) for _ in range(2))
        written(tmp_path / "a.jsonl", rows)
        kept = len(range(rank, 7, ranks)) - len({1, 4} & set(range(rank, 7, ranks)))
        for index in range(2 * kept):
            (row,), (name,) = whole.item(index), whole.names(index)
            assert name.endswith(f"a.jsonl, row {row['labels'][1] + 1}")
            seen.append(tuple(row["labels"]))
        last = 2 * kept - 1
        other.go_to(whole.place_of(last))
        assert other.item(last) == whole.item(last)
    assert sorted(seen) == [(epoch, index) for epoch in (0, 1) for index in (0, 2, 3, 5, 6)]


def test_counts_are_the_same_each_time_a_place_is_gone_to(tmp_path: Path) -> None:
    of = stream(tmp_path)
    written(tmp_path / "a.jsonl", [{"messages": []}, *numbered("row1", "row2", "row3")])
    place = of.place_of(0)
    for _ in range(2):
        of.go_to(place)
        of.item(0)
        assert of.tally.rows_dropped == {"bad_row": 1}


def test_memory_holds_one_window(tmp_path: Path) -> None:
    read: list[int] = []

    def endless(epoch: int) -> Iterator[RawRow]:
        number = 0
        while True:
            number += 1
            read.append(number)
            yield RawRow("a.jsonl", number, {"messages": chat("q", "a")})

    data = DataArguments(train=[SourceArguments(path="a.jsonl")], streaming=True)
    reader = SourceTokenizer(data, Renderer(TOKENIZER), reader_of_messages())
    of = RankStream(endless, reader, seed=0)
    of.item(100)
    assert len(read) == 102  # 34 windows of 3
    assert len(of._window) == 3


def reader_of_messages() -> Any:
    from sft_toolkit.data.formats import converter

    return converter("messages")


def test_bad_rows_are_counted_and_too_many_stop_the_stream(tmp_path: Path) -> None:
    rows = [*numbered("a", "b"), {"messages": []}] * 10
    path = written(tmp_path / "a.jsonl", rows)
    for limit, stops in ((0.5, False), (0.2, True)):
        data = DataArguments(train=[SourceArguments(path=path)], streaming=True, on_bad_row="drop", max_refused=limit)
        tokenizer = SourceTokenizer(data, Renderer(TOKENIZER), reader_of(data))
        of = RankStream(lambda epoch, data=data: one_pass(passes_of(data), [1.0], None, 0, epoch), tokenizer)  # type: ignore[misc]
        if stops:
            with pytest.raises(DataError, match="1 of 3 rows are refused"):
                of.item(0)
        else:
            assert len([of.item(i) for i in range(19)]) == 19
            assert (of.tally.rows_read, of.tally.rows_dropped) == (30, {"bad_row": 10})


def test_a_pass_without_a_row_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a whole pass left rank 1 of 2 without a row to train on; 0 rows were read"):
        stream(tmp_path, rows=1, rank=1, ranks=2).item(0)


def rows_of(letter: str, count: int) -> Any:
    return lambda: iter([RawRow(letter, number, {}) for number in range(1, count + 1)])


@pytest.mark.parametrize("until", ["first_exhausted", "all_exhausted"])
def test_sources_are_interleaved_by_their_weights(until: Any) -> None:
    sources, weights = [rows_of("a", 3000), rows_of("b", 1000), rows_of("c", 5)], [3.0, 1.0, 0.0]
    drawn = [raw.source for raw in one_pass(sources, weights, until, 0, 0)]
    counts = Counter(drawn)
    assert counts["c"] == 0
    assert 2.7 < counts["a"] / counts["b"] < 3.4
    assert (
        (counts["a"] == 3000 or counts["b"] == 1000)
        if until == "first_exhausted"
        else min(counts["a"] / 3, counts["b"]) >= 1000
    )
    assert drawn == [raw.source for raw in one_pass(sources, weights, until, 0, 0)]
    assert drawn[:50] != [raw.source for raw in islice(one_pass(sources, weights, until, 0, 1), 50)]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"val_split": 0.1}, "data.val_split: a stream has no rows to hold out; name files by data.eval"),
        ({"sampler": "by_length"}, "data.sampler: a stream is read in order; shuffle (within a window) or sequential"),
        (
            {"train": [SourceArguments(path="a", weight=2.0)]},
            "data.train: weights of a stream are probabilities; set data.mixing: interleave",
        ),
    ],
)
def test_what_a_stream_can_not_follow_is_refused(changes: dict[str, Any], problem: str) -> None:
    data = DataArguments(**{"train": [SourceArguments(path="a")], "streaming": True, **changes})
    with pytest.raises(ConfigError) as caught:
        check_options(data)
    assert problem in caught.value.problems


# ---- In a training ---------------------------------------------------------------------------------------------------


def iterable(count: int = 10) -> IterableDataset:
    return IterableDataset.from_generator(lambda: iter(numbered(*(f"row{i}" for i in range(count)))))


def test_a_stream_of_text_rows_is_trained_on_and_resumed_exactly(tmp_path: Path) -> None:
    changes = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 2,
        "train_sampling_strategy": "random",
        "packing": True,
        "max_length": 60,
        "learning_rate": 0.1,
    }
    whole = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, iterable(), None, TOKENIZER)
    whole.train()
    assert len(logged(whole, "loss")) == 6
    again = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, iterable(), None, TOKENIZER)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(again, "loss") == logged(whole, "loss")
    assert logged(again, "supervised_tokens") == logged(whole, "supervised_tokens")
    assert again.train_dataset.stream.tally == whole.train_dataset.stream.tally  # type: ignore[union-attr]
    (tmp_path / "checkpoint-4" / "stream-0.json").unlink()
    lost = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, iterable(), None, TOKENIZER)
    lost.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert logged(lost, "loss") == logged(whole, "loss")


def test_a_worker_that_reads_the_stream_changes_nothing(tmp_path: Path) -> None:
    """Losses, counts, names of rows, and what a checkpoint says of the place are those of a training without."""
    changes = {
        "max_steps": 6,
        "per_device_train_batch_size": 2,
        "save_strategy": "steps",
        "save_steps": 4,
        "packing": True,
        "max_length": 60,
        "transform": "tests.unit.test_loading.masked",
    }
    arguments = [
        sgd_arguments(tmp_path / str(n), dataloader_num_workers=n, train_sampling_strategy="random", **changes)
        for n in (0, 1)
    ]
    plain, worked, resumed = (
        SFTTrainer(tiny_model(), arguments[n], None, iterable(), None, TOKENIZER) for n in (0, 1, 1)
    )
    plain.train()
    worked.train()
    places = [json.loads((tmp_path / f"{n}/checkpoint-4/stream-0.json").read_text()) for n in (0, 1)]
    assert places[0] == places[1]
    assert places[1]["index"] > 0
    resumed.train(resume_from_checkpoint=str(tmp_path / "1" / "checkpoint-4"))
    for trainer in (worked, resumed):
        assert logged(trainer, "loss") == logged(plain, "loss")
        assert logged(trainer, "supervised_tokens") == logged(plain, "supervised_tokens")
        assert trainer.train_dataset.stream.tally == plain.train_dataset.stream.tally  # type: ignore[union-attr]
    bad = IterableDataset.from_generator(lambda: iter([*numbered(*ROWS), {"messages": []}]))
    stopped = SFTTrainer(tiny_model(), arguments[1], None, bad, None, TOKENIZER)
    with pytest.raises(DataError) as caught:
        stopped.train()
    assert str(caught.value) == "train_dataset, row 11: the conversation has no messages"
    last = 6 * 2 - 1
    assert worked.train_dataset.row_numbers(last) == plain.train_dataset.row_numbers(last) != []  # type: ignore[union-attr]


def test_a_stream_says_what_the_arguments_lack(tmp_path: Path) -> None:
    args = sgd_arguments(tmp_path, max_steps=-1, dataloader_num_workers=2)  # prefetching needs one
    with pytest.raises(ConfigError) as caught:
        SFTTrainer(tiny_model(), args, None, iterable(), None, TOKENIZER)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "training.max_steps",
        "training.dataloader_num_workers",
    ]
    assert "2 processes would each tokenise the whole stream" in caught.value.problems[1]
    spawned = sgd_arguments(tmp_path, max_steps=1, dataloader_num_workers=1, dataloader_multiprocessing_context="spawn")
    with pytest.raises(ConfigError, match="a worker that is started by 'spawn' can't take the stream with it"):
        SFTTrainer(tiny_model(), spawned, None, iterable(), None, TOKENIZER)
