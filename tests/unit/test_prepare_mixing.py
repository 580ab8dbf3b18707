"""Refused rows, interleaved sources, grouped splits, parts of held-out sets, carried columns, the plan."""

from __future__ import annotations

import gc
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit.args import PreparationArguments, SourceArguments
from sft_toolkit.data.prepare import prepare, tokenize_rows
from sft_toolkit.errors import ConfigError, DataError
from tests.tiny import chat
from tests.unit.test_prepare import TOKENIZER, chats, data, numbered, sides, texts, written

NO_ROLE = {"messages": [{"role": "usr", "content": "x"}]}


# ---- Refused rows ----------------------------------------------------------------------------------------------------


def test_more_refused_rows_than_allowed_stop_the_run_with_counts_and_examples(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "a.jsonl", [*numbered(8), NO_ROLE]))
    path.write_text(path.read_text() + "{broken\n")
    for _ in range(2):  # built, and read from the cache
        with pytest.raises(DataError) as caught:
            prepare(data(tmp_path, str(path), on_bad_row="drop", max_refused=0.15), TOKENIZER)
        message = str(caught.value)
        assert message.startswith(
            f"{path}: 2 of 10 rows are refused (20 %), more than data.max_refused: 0.15\n"
            f"  bad_row: 2, first {path}, line 9 (message 1: unknown role 'usr'; accepted: system, "
        )
        assert f"{path}, line 10 (not valid JSON: " in message
    prepared = prepare(data(tmp_path, str(path), on_bad_row="drop", max_refused=0.2), TOKENIZER)
    assert prepared.report["rows_dropped"] == {"bad_row": 2}


def test_by_default_half_of_many_rows_may_be_refused(tmp_path: Path) -> None:
    few = written(tmp_path / "few.jsonl", [NO_ROLE] * 3 + numbered(1))
    assert prepare(data(tmp_path, few, on_bad_row="drop"), TOKENIZER).report["rows_kept"] == 1
    half = written(tmp_path / "half.jsonl", [NO_ROLE] * 10 + numbered(10))
    assert prepare(data(tmp_path, half, on_bad_row="drop"), TOKENIZER).report["rows_kept"] == 10
    most = written(tmp_path / "most.jsonl", [NO_ROLE] * 11 + numbered(10))
    with pytest.raises(DataError, match=r"11 of 21 rows are refused \(52 %\), more than data.max_refused \(half"):
        prepare(data(tmp_path, most, on_bad_row="drop"), TOKENIZER)


def test_each_source_is_judged_by_itself_and_long_rows_are_not_refused_ones(tmp_path: Path) -> None:
    good, bad = written(tmp_path / "good.jsonl", numbered(50)), written(tmp_path / "bad.jsonl", [NO_ROLE, *numbered(3)])
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, good, bad, on_bad_row="drop", max_refused=0.1), TOKENIZER)
    assert str(caught.value).startswith(f"{bad}: 1 of 4 rows are refused (25 %)")
    long = written(tmp_path / "long.jsonl", chats(("a" * 90, "b"), ("a", "b")))
    assert prepare(data(tmp_path, long, max_length=40, max_refused=0.0), TOKENIZER).report["rows_kept"] == 1


def test_rows_in_memory_have_the_same_limit() -> None:
    rows = [NO_ROLE, *numbered(3)]
    with pytest.raises(DataError, match=r"^train_dataset: 1 of 4 rows are refused"):
        tokenize_rows(rows, PreparationArguments(on_bad_row="drop", max_refused=0.1), TOKENIZER)


# ---- Interleaving ----------------------------------------------------------------------------------------------------


def test_sources_are_interleaved_by_their_weights(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(60)), written(tmp_path / "b.jsonl", numbered(60, start=100))
    sources = SourceArguments(path=first, weight=3.0), SourceArguments(path=second)
    prepared = prepare(data(tmp_path, *sources, mixing="interleave"), TOKENIZER, seed=1)
    again, other = (prepare(data(tmp_path, *sources, mixing="interleave"), TOKENIZER, seed=s) for s in (1, 2))
    learned = texts(prepared.train)
    assert learned == texts(again.train) != texts(other.train)
    assert prepared.fingerprint == again.fingerprint != other.fingerprint
    assert len(set(learned)) == len(learned)
    assert prepared.train is not None
    places = Counter(prepared.train["source"][:])
    assert places[first] == 60
    assert 10 <= places[second] <= 32
    assert len(set(prepared.train["source"][:15])) == 2
    assert [s["rows_trained"] for s in prepared.report["sources"].values()] == [places[first], places[second]]
    assert prepared.report["rows_trained"] == len(learned)


def test_interleaving_until_all_are_used_up_repeats_the_shorter_one(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(5)), written(tmp_path / "b.jsonl", numbered(40, start=100))
    options = data(tmp_path, first, second, mixing="interleave", stopping_strategy="all_exhausted")
    counts = Counter(texts(prepare(options, TOKENIZER).train))
    assert all(counts[f"a{i}<|im_end|>"] == 1 for i in range(100, 140))
    assert min(counts[f"a{i}<|im_end|>"] for i in range(5)) > 2


def test_held_out_rows_are_not_interleaved(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(40)), written(tmp_path / "b.jsonl", numbered(40, start=100))
    train, held = sides(prepare(data(tmp_path, first, second, mixing="interleave", val_split=0.2), TOKENIZER))
    assert train & held == set()


# ---- Grouped split ---------------------------------------------------------------------------------------------------


def of_groups(pairs: Sequence[tuple[str | None, str]]) -> list[dict[str, Any]]:
    """Rows of (group, what both say)."""
    rows = []
    for group, said in pairs:
        row: dict[str, Any] = {"messages": chat(said, said)}
        rows.append(row if group is None else {**row, "customer": group})
    return rows


def test_rows_of_a_group_lie_on_one_side_and_appended_groups_move_nobody(tmp_path: Path) -> None:
    pairs = [(f"c{i % 50}", f"t{i}") for i in range(200)]
    path = written(tmp_path / "a.jsonl", of_groups(pairs))
    options = data(tmp_path, path, val_split=0.2, group_by="customer")
    train, held = sides(prepare(options, TOKENIZER))
    group_of = {f"{said}<|im_end|>": group for group, said in pairs}
    assert {group_of[t] for t in train} & {group_of[t] for t in held} == set()
    assert len(train) + len(held) == 200
    assert 12 <= len(held) <= 80
    written(Path(path), of_groups([*pairs, *((f"d{i % 20}", f"u{i}") for i in range(100))]))
    longer_train, longer_held = sides(prepare(options, TOKENIZER))
    assert train < longer_train
    assert held < longer_held


def test_equal_rows_of_two_groups_join_them(tmp_path: Path) -> None:
    pairs = [(f"c{i}", f"t{i}") for i in range(60)] + [(f"c{i}", f"t{i + 1}") for i in range(0, 60, 2)]
    path = written(tmp_path / "a.jsonl", of_groups(pairs))
    prepared = prepare(data(tmp_path, path, val_split=0.3, group_by="customer"), TOKENIZER)
    train, held = sides(prepared)
    assert train & held == set()
    side = dict.fromkeys(held, "held") | dict.fromkeys(train, "train")
    assert all(side[f"t{i}<|im_end|>"] == side[f"t{i + 1}<|im_end|>"] for i in range(0, 60, 2))
    assert 0 < len(held) < 60
    assert prepared.train is not None
    assert prepared.train.column_names == ["input_ids", "labels", "row", "source"]


def test_rows_without_the_key_are_told_and_a_column_that_no_row_has_is_an_error(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = written(tmp_path / "a.jsonl", of_groups([("c1", "a"), ("c1", "b"), (None, "c"), (None, "d")]))
    prepare(data(tmp_path, path, val_split=1, group_by="customer"), TOKENIZER)
    assert "data.group_by: 2 rows have no value in 'customer'; each is a group of its own" in caplog.text
    with pytest.raises(DataError, match=r"^data\.group_by: no row of data\.train has a value in a column 'client'$"):
        prepare(data(tmp_path, path, val_split=1, group_by="client"), TOKENIZER)
    with pytest.raises(ConfigError, match=r"^data\.group_by: has a meaning for val_split only"):
        prepare(data(tmp_path, path, group_by="customer"), TOKENIZER)


# ---- Parts of held-out sets ------------------------------------------------------------------------------------------


def test_a_held_out_set_of_several_sources_knows_their_rows(tmp_path: Path) -> None:
    train = written(tmp_path / "train.jsonl", numbered(3))
    (tmp_path / "x").mkdir()
    first, second, third = (
        written(tmp_path / name, numbered(n, start=s))
        for name, n, s in (("a-b.jsonl", 2, 10), ("c.jsonl", 3, 20), ("x/c.jsonl", 1, 30))
    )
    held = {
        "dev": [SourceArguments(path=first), SourceArguments(path=second), SourceArguments(path=third)],
        "test": [SourceArguments(path=first)],
    }
    prepared = prepare(data(tmp_path, train, eval=held), TOKENIZER)
    assert prepared.eval_parts == {"dev": [("a_b", 2), ("c", 3), ("c_2", 1)]}
    assert texts(prepared.evals["dev"])[2:5] == [f"a{i}<|im_end|>" for i in (20, 21, 22)]
    report = prepared.report["eval"]["dev"]
    assert {name: counts["rows_kept"] for name, counts in report["sources"].items()} == {"a_b": 2, "c": 3, "c_2": 1}


def test_a_split_of_several_sources_knows_their_rows(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a.jsonl", numbered(30)), written(tmp_path / "b.jsonl", numbered(10, start=50))
    prepared = prepare(data(tmp_path, first, second, val_split=8), TOKENIZER)
    assert prepared.eval_parts == {"eval": [("a", 6), ("b", 2)]}
    assert prepare(data(tmp_path, first, val_split=8), TOKENIZER).eval_parts == {}


# ---- Columns for samplers, and the plan ------------------------------------------------------------------------------


def test_the_column_that_a_sampler_reads_is_kept_and_only_in_the_training_data(tmp_path: Path) -> None:
    rows = [{**row, "difficulty": 10 - i} for i, row in enumerate(numbered(4))]
    path, held = written(tmp_path / "a.jsonl", rows), written(tmp_path / "b.jsonl", numbered(2, start=20))
    options = data(
        tmp_path, path, eval={"eval": [SourceArguments(path=held)]}, sampler={"curriculum": {"by": "difficulty"}}
    )
    prepared = prepare(options, TOKENIZER)
    assert prepared.train is not None
    assert prepared.train["difficulty"][:] == [10.0, 9.0, 8.0, 7.0]
    assert prepared.evals["eval"].column_names == ["input_ids", "labels", "row", "source"]
    options.sampler = "shuffle"
    plain = prepare(options, TOKENIZER).train
    assert plain is not None
    assert plain.column_names == ["input_ids", "labels", "row", "source"]


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({}, "'difficulty', which data.sampler orders by, is missing"),
        ({"difficulty": "hard"}, "'difficulty', which data.sampler orders by, is 'hard', not a number"),
        ({"difficulty": True}, "'difficulty', which data.sampler orders by, is true, not a finite number"),
        ({"difficulty": None}, "'difficulty', which data.sampler orders by, is null, not a finite number"),
    ],
)
def test_a_row_without_that_number_is_a_bad_row(tmp_path: Path, extra: dict[str, Any], reason: str) -> None:
    path = written(tmp_path / "a.jsonl", [{**numbered(1)[0], "difficulty": 1}, {**numbered(1)[0], **extra}])
    with pytest.raises(DataError) as caught:
        prepare(data(tmp_path, path, sampler={"curriculum": {"by": "difficulty"}}), TOKENIZER)
    assert str(caught.value) == f"{path}, line 2: {reason}"


def test_numbers_of_a_csv_file_are_read_as_such(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("prompt,completion,level\na,b,2\nc,d,1.5\n")
    train = prepare(data(tmp_path, str(path), sampler={"curriculum": {"by": "level"}}), TOKENIZER).train
    assert train is not None
    assert train["level"][:] == [2.0, 1.5]


def test_a_column_of_ours_can_not_be_asked_for(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", numbered(1))
    with pytest.raises(
        ConfigError, match=r"^data\.sampler: a column can't be called 'row' here; rename it in the file$"
    ):
        prepare(data(tmp_path, path, sampler={"curriculum": {"by": "row"}}), TOKENIZER)


def test_wrong_samplers_and_transforms_are_found_before_a_file_is_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        prepare(data(tmp_path, "never-read.jsonl", sampler="curiculum", transform="nowhere"), TOKENIZER)
    with pytest.raises(ConfigError, match=r"^data\.sampler: by_length saves padding"):
        prepare(data(tmp_path, "never-read.jsonl", sampler="by_length", packing=True), TOKENIZER)
    first, second = caught.value.problems
    assert first.startswith("data.sampler: unknown sampler 'curiculum'; did you mean 'curriculum'? (known: ")
    assert second.startswith("data.transform: unknown transform 'nowhere' (known: none; or a dotted path ")


def test_the_plan_is_written_and_is_the_same_for_any_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.jsonl", numbered(30))
    options = data(tmp_path, path, max_length=128, packing=True)
    plans = []
    for ranks in ("1", "2", "8"):
        monkeypatch.setenv("WORLD_SIZE", ranks)
        prepare(options, TOKENIZER).write_plan(tmp_path)
        plans.append((tmp_path / "packing_plan.json").read_text())
    assert plans[0] == plans[1] == plans[2]
    plan = json.loads(plans[0])
    assert sorted(row for packed in plan["bins"] for _, row in packed["rows"]) == list(range(1, 31))
    assert plan["sources"] == [path]
    assert all(packed["tokens"] <= 128 for packed in plan["bins"])
    options.packing = False
    prepare(options, TOKENIZER).write_plan(tmp_path)
    assert not (tmp_path / "packing_plan.json").exists()


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_left_as_it_was(was_on: bool) -> None:
    (gc.enable if was_on else gc.disable)()
    try:
        tokenize_rows(numbered(3), PreparationArguments(), TOKENIZER)
        assert gc.isenabled() is was_on
        with pytest.raises(DataError):
            tokenize_rows(chats(("a" * 99, "b")), PreparationArguments(max_length=9, too_long="error"), TOKENIZER)
        assert gc.isenabled() is was_on
    finally:
        gc.enable()
