"""Sources -> token rows, counted; what is cached is what an empty cache would give."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from torch.utils.data import Dataset as TorchDataset
from transformers import PreTrainedTokenizerFast

from sft_toolkit.args import DataArguments, PreparationArguments, SourceArguments
from sft_toolkit.data.packing import best_fit_decreasing
from sft_toolkit.data.prepare import Prepared, prepare, tokenize_rows
from sft_toolkit.data.token_dataset import PackedDataset, row_lengths
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.registry import register
from tests.tiny import CHATML, chat, supervised_text, tiny_tokenizer

TOKENIZER = tiny_tokenizer()


def written(path: Path, rows: Iterable[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chats(*pairs: tuple[str, str]) -> list[dict[str, Any]]:
    return [{"messages": chat(user, answer)} for user, answer in pairs]


def numbered(count: int, start: int = 0) -> list[dict[str, Any]]:
    return chats(*((f"q{i}", f"a{i}") for i in range(start, start + count)))


def data(tmp_path: Path, *train: str | SourceArguments, **options: Any) -> DataArguments:
    sources = [source if isinstance(source, SourceArguments) else SourceArguments(path=source) for source in train]
    return DataArguments(train=sources, cache_dir=str(tmp_path / "cache"), **options)


def texts(rows: datasets.Dataset | None, tokenizer: PreTrainedTokenizerFast = TOKENIZER) -> list[str]:
    """What is learned in each row."""
    assert rows is not None
    return [supervised_text(tokenizer, row["input_ids"], row["labels"]) for row in rows]


def test_rows_become_tokens_with_their_place(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", chats(("a", "b"), ("cc", "dd")))
    train = prepare(data(tmp_path, path), TOKENIZER).train
    assert train is not None
    assert {name: str(kind) for name, kind in train.features.items()} == {
        "input_ids": "List(Value('int32'))",
        "labels": "List(Value('int32'))",
        "row": "Value('int64')",
        "source": "Value('string')",
    }
    ids = TOKENIZER.apply_chat_template(chat("a", "b"), return_dict=False)
    assert train[0] == {
        "input_ids": ids,
        "labels": [-100] * 20 + [ids[20], 4, -100],
        "row": 1,
        "source": path,
    }
    assert texts(train) == ["b<|im_end|>", "dd<|im_end|>"]
    assert train["row"][:] == [1, 2]


def test_the_report_counts_every_row_once(tmp_path: Path) -> None:
    # 23, 29 and 25 tokens: the second is too long.
    path = written(tmp_path / "a.jsonl", [*chats(("a", "b"), ("aaaa", "bbbb"), ("aa", "bb")), {"messages": []}])
    prepared = prepare(data(tmp_path, path, max_length=28, on_bad_row="drop"), TOKENIZER)
    counts = {
        "rows_read": 4,
        "rows_kept": 2,
        "rows_dropped": {"bad_row": 1, "too_long": 1},
        "rows_truncated": 0,
        "tokens": 23 + 25,
        "supervised_tokens": 2 + 3,
        "longest": 25,
        "warnings": {
            "bad_row": {"count": 1, "rows": [f"{path}, line 4"], "why": ["the conversation has no messages"]},
            "too_long": {"count": 1, "rows": [f"{path}, line 2"]},
        },
    }
    report = prepared.report
    assert len(report.pop("template_fingerprint")) == 64
    assert report.pop("fingerprint") == prepared.fingerprint
    assert report == {
        **counts,
        "rows_held_out": 0,
        "rows_trained": 2,
        "sources": {path: {**counts, "weight": 1.0, "rows_held_out": 0, "rows_trained": 2}},
        "eval": {},
    }
    assert prepared.end_of_turn == ("<|im_end|>", 4)


def test_a_warning_names_three_rows_and_counts_all(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", chats(*((f"q{i}", "") for i in range(5))))
    warnings = prepare(data(tmp_path, path), TOKENIZER).report["warnings"]
    assert warnings == {
        "an answer without text: only its end is learned": {
            "count": 5,
            "rows": [f"{path}, line 1", f"{path}, line 2", f"{path}, line 3"],
        }
    }


def test_rows_that_say_the_same_are_counted(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*numbered(2), *numbered(2)])
    prepared = prepare(data(tmp_path, path), TOKENIZER)
    assert prepared.report["warnings"] == {
        "says the same as an earlier row": {"count": 2, "rows": [f"{path}, line 3", f"{path}, line 4"]}
    }
    assert prepared.report["rows_kept"] == 4


def test_held_out_rows_that_are_trained_on_are_counted(tmp_path: Path) -> None:
    train, held = written(tmp_path / "a.jsonl", numbered(3)), written(tmp_path / "b.jsonl", numbered(2, start=2))
    options = data(tmp_path, train, eval={"eval": [SourceArguments(path=held)]})
    assert prepare(options, TOKENIZER).report["eval"]["eval"]["warnings"] == {
        "held-out rows that are also trained on": {"count": 1, "rows": [f"{held}, line 1"]}
    }


# ---- Formats -----------------------------------------------------------------------------------------------------


def test_the_format_is_found_over_all_rows_and_per_file(tmp_path: Path) -> None:
    written(
        tmp_path / "1.jsonl", [{"instruction": "i", "output": "o"}, {"instruction": "i", "output": "p", "input": "x"}]
    )
    written(tmp_path / "2.jsonl", chats(("a", "b")))
    written(tmp_path / "3.jsonl", [{"prompt": "p", "completion": "c"}])
    prepared = prepare(data(tmp_path, str(tmp_path / "*.jsonl")), TOKENIZER)
    assert texts(prepared.train) == ["o<|im_end|>", "p<|im_end|>", "b<|im_end|>", "c<|im_end|>"]


def test_wrong_columns_name_the_file_and_what_was_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"question": "q", "reply": "r"}])
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path), TOKENIZER)
    assert str(caught.value).startswith(f"{path}: no format fits the columns found: question, reply")


def test_the_format_of_a_source_goes_before_the_one_of_the_section(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"text": "one", "prompt": "p", "completion": "c"}])
    options = data(tmp_path, SourceArguments(path=path, format="text"), format="prompt_completion")
    # The first token of a row has nothing before it to be predicted from.
    assert texts(prepare(options, TOKENIZER).train) == ["ne<|im_end|>"]


@register("format", "question_and_reply")
def question_and_reply(row: dict[str, Any]) -> dict[str, Any]:
    """A layout of the user's own."""
    return {"messages": chat(row["question"], row["reply"])}


def test_a_registered_format_is_used_by_its_name(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"question": "q", "reply": "r"}])
    options = data(tmp_path, path)
    options.format = "question_and_reply"  # type: ignore[assignment]
    assert texts(prepare(options, TOKENIZER).train) == ["r<|im_end|>"]


# ---- Bad, unproven and long rows -------------------------------------------------------------------------------------


def test_a_bad_row_stops_with_file_row_and_reason(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*numbered(2), {"messages": [{"role": "usr", "content": "x"}]}])
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path), TOKENIZER)
    assert str(caught.value).startswith(f"{path}, line 3: message 1: unknown role 'usr'")


def test_a_broken_line_is_dropped_and_counted_when_asked(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "a.jsonl", numbered(2)))
    path.write_text(path.read_text() + '{"messages": [\n')
    prepared = prepare(data(tmp_path, str(path), on_bad_row="drop"), TOKENIZER)
    assert prepared.report["rows_read"] == 3
    assert prepared.report["rows_dropped"] == {"bad_row": 1}
    assert texts(prepared.train) == ["a0<|im_end|>", "a1<|im_end|>"]


BEHEADING = CHATML.replace("{{ m['content'] }}", "{{ m['content'][1:] }}")


def test_a_mask_that_cannot_be_proven_stops_or_is_dropped(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", chats(("ab", "cd"), ("12", "34")))
    beheading = tiny_tokenizer(BEHEADING)
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path), beheading)
    assert str(caught.value).startswith(f"{path}, line 1: ")
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path, on_bad_row="drop"), beheading)
    assert str(caught.value) == (
        "data.train: no row is left to train on, 2 were read. Dropped: "
        f"mask_unproven: 2 (first: {path}, line 1 (the chat template cuts the text of message 1))"
    )


def test_a_long_row_stops_when_asked(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", chats(("a", "b"), ("aaaa", "bbbb")))
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path, max_length=28, too_long="error"), TOKENIZER)
    assert str(caught.value) == (
        f"{path}, line 2: 29 tokens, more than max_length 28; raise it, or choose what happens to long rows by "
        "too_long: drop, truncate_right, ..."
    )


def test_a_row_that_is_cut_before_its_answer_is_dropped_with_its_reason(tmp_path: Path) -> None:
    rows = [{"prompt": "a very long prompt", "completion": "x"}, {"prompt": "hi ", "completion": "you"}]
    path = written(tmp_path / "a.jsonl", rows)
    prepared = prepare(data(tmp_path, path, max_length=12, too_long="truncate_right"), TOKENIZER)
    assert prepared.report["rows_dropped"] == {"no_supervised_token": 1}
    assert texts(prepared.train) == ["you<|im_end|>"]


def test_truncated_rows_are_counted(tmp_path: Path) -> None:
    path = written(
        tmp_path / "a.jsonl", [{"prompt": "abc", "completion": "defghi"}, {"prompt": "a", "completion": "b"}]
    )
    prepared = prepare(data(tmp_path, path, max_length=6, too_long="truncate_right"), TOKENIZER)
    assert prepared.report["rows_truncated"] == 1
    assert texts(prepared.train) == ["def", "b<|im_end|>"]


def test_no_row_left_lists_every_reason_with_its_count(tmp_path: Path) -> None:
    rows = [{"prompt": "a very long prompt", "completion": "x"}] * 2 + [{"prompt": "a", "completion": None}]
    path = written(tmp_path / "a.jsonl", rows)
    options = data(tmp_path, path, max_length=12, too_long="truncate_right", on_bad_row="drop")
    for _ in range(2):  # built, and read from the cache
        with pytest.raises(DataError) as caught:
            prepare(options, TOKENIZER)
        assert str(caught.value) == (
            "data.train: no row is left to train on, 3 were read. Dropped: "
            f"bad_row: 1 (first: {path}, line 3 ('completion' is null, not text)); "
            f"no_supervised_token: 2 (first: {path}, line 1)"
        )


def test_a_held_out_set_without_rows_is_an_error_too(tmp_path: Path) -> None:
    train, held = written(tmp_path / "a.jsonl", numbered(2)), written(tmp_path / "b.jsonl", chats(("a" * 50, "b")))
    options = data(tmp_path, train, eval={"long": [SourceArguments(path=held)]}, max_length=30)
    with pytest.raises(DataError, match=r"^data\.eval\.long: no row is left to evaluate, 1 were read"):
        prepare(options, TOKENIZER)


# ---- Cache -----------------------------------------------------------------------------------------------------------


def built(tmp_path: Path) -> int:
    """Entries in the cache."""
    return len(list((tmp_path / "cache" / "tokens").glob("*/tokens.arrow")))


def test_the_second_start_reads_the_cache(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "a.jsonl", numbered(3))
    first = prepare(data(tmp_path, path), TOKENIZER)
    with caplog.at_level("INFO"):
        second = prepare(data(tmp_path, path, packing=True), tiny_tokenizer())
    assert "read from the cache" in caplog.text
    assert built(tmp_path) == 1
    assert second.train is not None
    assert first.train is not None
    assert second.train[:] == first.train[:]
    assert second.fingerprint == first.fingerprint
    assert second.report.pop("packing") == {"bins": 1, "fill": round(75 / 2048, 4)}
    assert second.report == first.report


def _other_template(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("user", "human").replace("\n{{ m['content'] }}", "\n\n{{ m['content'] }}")


def _shorter(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    options.max_length = 24


def _other_policy(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    options.supervise = "all"


def _same_name_and_time(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    path = Path(options.train[0].path)
    before = path.stat()
    path.write_text(path.read_text().replace("bbb", "xyz"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size


def _other_pad(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = "<|im_end|>"


def _other_columns(options: DataArguments, tokenizer: PreTrainedTokenizerFast) -> None:
    options.train[0].columns = {"messages": "others"}


@pytest.mark.parametrize(
    "change", [_other_template, _shorter, _other_policy, _same_name_and_time, _other_pad, _other_columns]
)
def test_after_a_change_the_tokens_are_those_of_an_empty_cache(
    tmp_path: Path, change: Callable[[DataArguments, PreTrainedTokenizerFast], None]
) -> None:
    rows = [
        {"messages": chat("a", "b"), "others": chat("c", "d")},
        {"messages": chat("a", "bbb"), "others": chat("e", "f")},
    ]
    options, tokenizer = data(tmp_path, written(tmp_path / "a.jsonl", rows)), tiny_tokenizer()
    prepare(options, tokenizer)
    change(options, tokenizer)
    stale = prepare(options, tokenizer)
    options.cache_dir = str(tmp_path / "empty")
    fresh = prepare(options, tokenizer)
    assert built(tmp_path) == 2
    assert stale.train is not None
    assert fresh.train is not None
    assert stale.train[:] == fresh.train[:]
    assert stale.report == fresh.report


def test_a_change_of_one_source_tokenises_only_that_one(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(2)), written(tmp_path / "b.jsonl", numbered(2, start=5))
    prepare(data(tmp_path, first, second), TOKENIZER)
    written(Path(second), numbered(3, start=5))
    assert texts(prepare(data(tmp_path, first, second), TOKENIZER).train) == [
        f"a{i}<|im_end|>" for i in (0, 1, 5, 6, 7)
    ]
    assert built(tmp_path) == 3


def test_a_template_that_reads_the_clock_is_rendered_anew_each_day(tmp_path: Path) -> None:
    dated = tiny_tokenizer("{% set today = strftime_now('%Y-%m-%d') %}" + CHATML)
    path = written(tmp_path / "a.jsonl", numbered(1))
    first, second = prepare(data(tmp_path, path), dated), prepare(data(tmp_path, path), TOKENIZER)
    assert first.fingerprint != second.fingerprint
    assert texts(first.train) == texts(second.train) == ["a0<|im_end|>"]


# ---- Held-out split and mixture ------------------------------------------------------------------------------------


def sides(prepared: Prepared) -> tuple[set[str], set[str]]:
    return set(texts(prepared.train)), set(texts(prepared.evals["eval"]))


def test_a_share_is_held_out_and_appended_rows_move_nobody(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", numbered(200))
    prepared = prepare(data(tmp_path, path, val_split=0.1), TOKENIZER)
    train, held = sides(prepared)
    assert len(train) + len(held) == 200
    assert 10 <= len(held) <= 32
    assert prepared.report["rows_held_out"] == len(held)
    assert prepared.report["rows_trained"] == len(train)
    written(Path(path), numbered(300))
    longer_train, longer_held = sides(prepare(data(tmp_path, path, val_split=0.1), TOKENIZER))
    assert train < longer_train
    assert held < longer_held


def test_a_number_of_rows_is_held_out_of_each_source_by_its_size(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(30)), written(tmp_path / "b.jsonl", numbered(10, start=50))
    prepared = prepare(data(tmp_path, first, second, val_split=8), TOKENIZER)
    assert {name: source["rows_held_out"] for name, source in prepared.report["sources"].items()} == {
        first: 6,
        second: 2,
    }
    train, held = sides(prepared)
    assert len(held) == 8
    assert train & held == set()


def test_equal_rows_of_two_sources_lie_on_the_same_side(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(40)), written(tmp_path / "b.jsonl", numbered(40))
    prepared = prepare(data(tmp_path, first, second, val_split=0.3), TOKENIZER)
    train, held = sides(prepared)
    assert train & held == set()
    assert len(train) + len(held) == 40


def test_a_weight_samples_by_the_seed_and_is_reported(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(10)), written(tmp_path / "b.jsonl", numbered(10, start=50))
    options = data(tmp_path, SourceArguments(path=first, weight=2.0), SourceArguments(path=second, weight=0.5))
    prepared = prepare(options, TOKENIZER, seed=1)
    again, other = prepare(options, TOKENIZER, seed=1), prepare(options, TOKENIZER, seed=2)
    learned = texts(prepared.train)
    assert learned[:20] == [f"a{i}<|im_end|>" for i in range(10) for _ in range(2)]
    assert len(set(learned[20:])) == len(learned[20:]) == 5
    assert texts(again.train) == learned
    assert texts(other.train) != learned
    assert other.fingerprint != prepared.fingerprint == again.fingerprint
    assert prepared.report["rows_kept"] == 20
    assert prepared.report["rows_trained"] == 25
    assert [s["rows_trained"] for s in prepared.report["sources"].values()] == [20, 5]
    assert [s["weight"] for s in prepared.report["sources"].values()] == [2.0, 0.5]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"val_split": 2.5}, "data.val_split: 2.5 is neither a share below 1 nor a whole number of rows"),
        (
            {"val_split": 2, "eval": {"eval": [SourceArguments(path="x.jsonl")]}},
            "held-out rows come from one of the two",
        ),
        ({"eval": {"eval": [SourceArguments(path="x.jsonl", weight=2.0)]}}, "data.eval: a weight has no meaning"),
    ],
)
def test_options_that_would_be_ignored_are_refused(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(data(tmp_path, "never-read.jsonl", **options), TOKENIZER)


def test_no_source_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.train: names no source"):
        prepare(data(tmp_path), TOKENIZER)


def test_holding_out_everything_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(DataError, match="3 rows can't be held out of 3: none would be trained on"):
        prepare(data(tmp_path, path, val_split=3), TOKENIZER)


def test_a_weight_of_zero_leaves_nothing_to_train_on(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", numbered(3))
    with pytest.raises(DataError, match="no row is left to train on after val_split and the sources' weights"):
        prepare(data(tmp_path, SourceArguments(path=path, weight=0.0)), TOKENIZER)


def test_packing_learns_the_same_texts(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", numbered(30))
    prepared = prepare(data(tmp_path, path, max_length=128, packing=True), TOKENIZER)
    assert prepared.train is not None
    bins = best_fit_decreasing(row_lengths(prepared.train), 128)
    packed = PackedDataset(prepared.train, bins)
    documents = [document for i in range(len(packed)) for document in packed[i]["documents"]]
    learned = [supervised_text(TOKENIZER, d["input_ids"], d["labels"]) for d in documents]
    assert sorted(learned) == sorted(f"a{i}<|im_end|>" for i in range(30))
    assert prepared.report["packing"]["bins"] == len(bins)


# ---- Rows in memory --------------------------------------------------------------------------------------------------


class MapStyle(TorchDataset[dict[str, Any]]):
    """Has a length and never raises IndexError, as many data sets in the wild."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"messages": chat("a", "bc"[index % 2])}


@pytest.mark.parametrize(
    "rows",
    [
        chats(("a", "b"), ("a", "c")),
        datasets.Dataset.from_list(chats(("a", "b"), ("a", "c"))),
        datasets.Dataset.from_list(chats(("a", "b"), ("a", "c"))).with_format("torch"),
        MapStyle(),
        iter(chats(("a", "b"), ("a", "c"))),
    ],
    ids=["list", "datasets", "datasets with a format", "map-style", "iterator"],
)
def test_rows_in_memory_become_tokens(rows: Any) -> None:
    tokens, report = tokenize_rows(rows, PreparationArguments(), TOKENIZER)
    assert tokens.column_names == ["input_ids", "labels", "row", "source"]
    assert texts(tokens) == ["b<|im_end|>", "c<|im_end|>"]
    assert tokens["row"][:] == [1, 2]
    assert tokens["source"][:] == ["train_dataset", "train_dataset"]
    assert report["rows_kept"] == report["sources"]["train_dataset"]["rows_kept"] == 2


def test_nulls_that_a_data_set_adds_are_taken_out_again() -> None:
    template = "{% for m in messages %}{{ m | length }}{% endfor %}\n" + CHATML
    named = {"messages": [{"role": "user", "content": "x", "name": "Ann"}, {"role": "assistant", "content": "y"}]}
    tokenizer = tiny_tokenizer(template)
    args = PreparationArguments()
    from_list, _ = tokenize_rows([named], args, tokenizer)
    from_dataset, _ = tokenize_rows(datasets.Dataset.from_list([named]), args, tokenizer)
    assert from_dataset["input_ids"][:] == from_list["input_ids"][:]


def test_a_transform_of_a_data_set_is_kept() -> None:
    plain = datasets.Dataset.from_dict({"q": ["a", "b"]})
    rows = plain.with_transform(lambda batch: {"messages": [chat(q, q + q) for q in batch["q"]]})
    tokens, _ = tokenize_rows(rows, PreparationArguments(), TOKENIZER)
    assert texts(tokens) == ["aa<|im_end|>", "bb<|im_end|>"]


def test_a_bad_row_in_memory_is_named_by_its_position() -> None:
    with pytest.raises(DataError, match=r"^eval_dataset, row 2: is text, expected a mapping of column to value$"):
        tokenize_rows([{"messages": chat("a", "b")}, "text"], PreparationArguments(), TOKENIZER, "eval_dataset")
    with pytest.raises(DataError, match=r"^train_dataset, row 1: "):
        tokenize_rows([{"messages": [{"role": "usr", "content": "x"}]}], PreparationArguments(), TOKENIZER)


def test_no_row_in_memory_is_an_error() -> None:
    with pytest.raises(DataError, match=r"^train_dataset: there are no rows$"):
        tokenize_rows([], PreparationArguments(), TOKENIZER)


def test_many_rows_go_through_in_batches_and_keep_their_order() -> None:
    tokens, report = tokenize_rows(numbered(2500), PreparationArguments(), TOKENIZER)
    assert report["rows_kept"] == 2500
    assert tokens["row"][:] == list(range(1, 2501))
    assert texts(tokens.select([0, 999, 1000, 2499])) == [f"a{i}<|im_end|>" for i in (0, 999, 1000, 2499)]
    assert int(np.sum(row_lengths(tokens))) == report["tokens"]
