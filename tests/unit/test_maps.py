"""What a source's options name and no row has is said, never passed over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_toolkit.args import DataArguments, SourceArguments
from sft_toolkit.data.prepare import check_options, prepare
from sft_toolkit.errors import ConfigError, DataError
from tests.tiny import chat, tiny_tokenizer
from tests.unit.test_prepare import written

ALPACA = [{"instruction": "a", "output": "b", "persona": "s"}, {"instruction": "c", "output": "d"}]


def options(folder: Path, path: str, **changes: Any) -> DataArguments:
    return DataArguments(train=[SourceArguments(path=path, **changes)], cache_dir=str(folder / "cache"))


@pytest.mark.parametrize("format", ["auto", "alpaca"])
def test_a_mapped_column_that_no_row_has_is_refused_with_the_nearest_one(tmp_path: Path, format: Any) -> None:
    path = written(tmp_path / "a.jsonl", ALPACA)
    with pytest.raises(DataError) as caught:
        prepare(options(tmp_path, path, columns={"system": "persna"}, format=format), tiny_tokenizer())
    assert str(caught.value) == (
        f"{path}: columns: 'persna', mapped to 'system', is in no row; did you mean 'persona'?; "
        "found: instruction, output, persona"
    )


def test_a_mapped_column_that_some_rows_have_is_fine(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ALPACA)
    report = prepare(options(tmp_path, path, columns={"system": "persona"}), tiny_tokenizer()).report
    assert (report["rows_kept"], report["warnings"]) == (2, {})


def test_a_role_that_no_message_has_is_counted_as_a_warning(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"messages": [{"role": "me", "content": "a"}, *chat("b", "c")[1:]]}])
    report = prepare(options(tmp_path, path, roles={"me": "user", "bot": "assistant"}), tiny_tokenizer()).report
    assert report["warnings"] == {"roles: 'bot' is the role of no message": {"count": 1, "rows": [path]}}


@pytest.mark.parametrize("name", ["a.jsonl", "*.jsonl"])
def test_options_of_hub_data_sets_are_refused_for_files(tmp_path: Path, name: str) -> None:
    written(tmp_path / "a.jsonl", ALPACA)
    path = str(tmp_path / name)
    with pytest.raises(ConfigError) as caught:
        check_options(options(tmp_path, path, split="test", subset="main"))
    assert caught.value.problems == [
        f"data.train: {path} is a file, and split, subset a matter of hub data sets; take it out"
    ]
    held = {"dev": [SourceArguments(path=path, revision="v1")]}
    with pytest.raises(ConfigError, match=r"data.eval.dev: .* is a file, and revision a matter of hub data sets"):
        check_options(DataArguments(train=[SourceArguments(path=path)], eval=held))


@pytest.mark.parametrize("row", [{"prompt": "a", "completion": ""}, {"prompt": chat("a", "b")[:1], "completion": []}])
def test_an_empty_completion_is_counted_or_refused(tmp_path: Path, row: dict[str, Any]) -> None:
    path = written(tmp_path / "a.jsonl", [row])
    if row["completion"] == []:
        with pytest.raises(DataError, match="line 1: the completion has no messages"):
            prepare(options(tmp_path, path), tiny_tokenizer())
    else:
        warnings = prepare(options(tmp_path, path), tiny_tokenizer()).report["warnings"]
        rows = {"count": 1, "rows": [f"{path}, line 1"]}
        assert warnings == {"an answer without text: only its end is learned": rows}


def test_what_is_left_of_held_out_rows_is_not_called_training(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", ALPACA)
    held = written(tmp_path / "held.jsonl", [{"instruction": "long" * 9, "output": "b"}])
    data = options(tmp_path, path)
    data.eval, data.max_length = {"dev": [SourceArguments(path=held)]}, 40
    with pytest.raises(DataError, match=r"data\.eval\.dev: no row is left to evaluate, 1 were read"):
        prepare(data, tiny_tokenizer())
