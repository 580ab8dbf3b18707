"""Which files a source means, and what is said where they can't be read."""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from sft_toolkit.args import SourceArguments
from sft_toolkit.data.readers import columnar
from sft_toolkit.data.sources import RawRow, expand, fingerprint, read_rows
from sft_toolkit.errors import DataError
from tests.unit.data_files import failure, rows_of, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("folder")
class TestFilesThatCantBeRead:
    def test_a_missing_file_is_reported_at_once_with_near_names(self) -> None:
        write("train.jsonl", "{}")
        with pytest.raises(DataError) as caught:
            read_rows(SourceArguments(path="trian.jsonl"))
        assert str(caught.value) == "trian.jsonl: no such file; did you mean train.jsonl?"

    def test_a_missing_file_with_no_near_name_lists_what_is_there(self) -> None:
        write("train.jsonl", "{}")
        assert failure(SourceArguments(path="./zzz.csv")) == (
            "./zzz.csv: no such file; the folder . holds train.jsonl. A hub data set is written org/name"
        )

    def test_a_missing_folder_is_named(self) -> None:
        assert failure(SourceArguments(path="nowhere/train.jsonl")) == (
            "nowhere/train.jsonl: no such file; the folder nowhere does not exist either"
        )

    def test_a_folder_is_no_file(self) -> None:
        Path("data").mkdir()
        assert failure(SourceArguments(path="data")) == (
            "data: is a folder; name a file in it, or a glob such as data/*.jsonl (it is empty)"
        )
        write("data/b.txt", "")
        write("data/a.csv", "")
        assert failure(SourceArguments(path="data")).endswith("(it holds a.csv, b.txt)")

    def test_an_unknown_suffix_lists_the_known_ones(self) -> None:
        assert failure(write("a.xlsx", "x")) == (
            "a.xlsx: files ending in '.xlsx' can't be read; known: "
            ".jsonl, .jsonl.gz, .ndjson, .json, .json.gz, .csv, .csv.gz, .tsv, .parquet"
        )

    @pytest.mark.parametrize(
        ("name", "content"),
        [("a.jsonl", ""), ("a.jsonl", "\n \n"), ("a.json", ""), ("a.json", "[]"), ("a.csv", ""), ("a.csv", "t,u\n")],
    )
    def test_a_file_without_rows(self, name: str, content: str) -> None:
        assert failure(write(name, content)) == (
            f"{name}: holds no rows; the file is empty, or has nothing but a header"
        )

    def test_a_parquet_file_without_rows(self) -> None:
        pyarrow.parquet.write_table(pyarrow.table({"t": pyarrow.array([], pyarrow.string())}), "a.parquet")
        assert failure(SourceArguments(path="a.parquet")).startswith("a.parquet: holds no rows")

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (
                '{"version": 1, "data": [{"t": "x"}, {"t": "y"}]}',
                "a.json: the top level is one object with the keys 'version', 'data'; expected a list of rows: "
                "[{...}, {...}]. If the rows are the 2 under 'data', save that list alone as the file",
            ),
            (
                '{\n"t": "x"\n}\n',
                "a.json: the top level is one object with the keys 't'; expected a list of rows: [{...}, {...}]. "
                "If the file is one row, put it into brackets",
            ),
            ('"x"', 'a.json: the top level is "x"; expected a list of rows: [{...}, {...}]'),
        ],
    )
    def test_json_that_is_no_list_explains_what_it_is(self, content: str, message: str) -> None:
        assert failure(write("a.json", content)) == message

    def test_utf16_is_named(self) -> None:
        assert failure(write("a.csv", "t\nx\n".encode("utf-16"))) == (
            "a.csv, line 1: the file is UTF-16; save it as UTF-8"
        )

    def test_a_file_that_is_not_parquet(self) -> None:
        assert failure(write("a.parquet", "x" * 100)).startswith("a.parquet: not a readable Parquet file: ")

    def test_a_damaged_gzip_file(self) -> None:
        whole = gzip.compress(b'{"t": "x"}\n' * 1000)
        Path("a.jsonl.gz").write_bytes(whole[:-12])
        assert failure(SourceArguments(path="a.jsonl.gz")).startswith("a.jsonl.gz: damaged gzip file after line ")
        Path("b.jsonl.gz").write_bytes(b'{"t": "x"}\n')
        assert failure(SourceArguments(path="b.jsonl.gz")).startswith("b.jsonl.gz: damaged gzip file after line 0: ")

    def test_a_name_without_organisation_is_no_hub_id(self) -> None:
        assert failure(SourceArguments(path="imdb")) == (
            "imdb: no such file; the folder . is empty. A hub data set is written org/name"
        )


@pytest.mark.usefixtures("folder")
class TestSeveralFiles:
    def test_a_glob_is_read_in_the_order_of_names(self) -> None:
        for name in ("b.csv", "a.jsonl", "c.txt"):
            write(name, {"b.csv": "t\nx\ny\n", "a.jsonl": '{"t": "z"}\n', "c.txt": ""}[name])
        source = SourceArguments(path="[ab].*")
        assert expand(source) == [Path("a.jsonl"), Path("b.csv")]
        assert [(raw.place, raw.row["t"]) for raw in read_rows(source)] == [
            ("a.jsonl, line 1", "z"),
            ("b.csv, row 1", "x"),
            ("b.csv, row 2", "y"),
        ]

    def test_a_glob_may_go_through_folders(self) -> None:
        Path("x/y").mkdir(parents=True)
        write("x/y/a.jsonl", "{}")
        write("x/b.jsonl", "{}")
        assert expand(SourceArguments(path="**/*.jsonl")) == [Path("x/b.jsonl"), Path("x/y/a.jsonl")]

    def test_a_file_whose_name_looks_like_a_glob_is_that_file(self) -> None:
        assert rows_of(write("a[1].jsonl", '{"t": "x"}')) == [{"t": "x"}]

    def test_a_glob_that_matches_nothing(self) -> None:
        assert failure(SourceArguments(path="*.jsonl")) == "*.jsonl: no file matches"

    def test_an_empty_file_among_others_is_named(self) -> None:
        write("a.jsonl", '{"t": "x"}')
        write("b.jsonl", "")
        assert failure(SourceArguments(path="*.jsonl")).startswith("b.jsonl: holds no rows")

    def test_max_rows_counts_over_all_files(self) -> None:
        write("a.jsonl", '{"n": 1}\n{"n": 2}\n')
        write("b.jsonl", '{"n": 3}\n{"n": 4}\n')
        assert rows_of(SourceArguments(path="*.jsonl", max_rows=3)) == [{"n": 1}, {"n": 2}, {"n": 3}]

    def test_a_home_folder_is_expanded(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(folder))
        write("a.jsonl", "{}")
        assert expand(SourceArguments(path="~/a.jsonl")) == [folder / "a.jsonl"]


@pytest.mark.usefixtures("folder")
class TestFingerprint:
    def test_depends_on_contents_only(self) -> None:
        source = write("a.jsonl", '{"t": "x"}')
        expected = hashlib.sha256(hashlib.sha256(b'{"t": "x"}').digest()).hexdigest()
        assert fingerprint(source) == expected
        os.utime("a.jsonl", (0, 0))
        assert fingerprint(source) == expected
        assert fingerprint(write("b.jsonl", '{"t": "x"}')) == expected

    def test_sees_a_change_of_same_length_and_time(self) -> None:
        before = fingerprint(write("a.jsonl", '{"t": "x"}'))
        stat = os.stat("a.jsonl")
        source = write("a.jsonl", '{"t": "y"}')
        os.utime("a.jsonl", ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert fingerprint(source) != before

    def test_sees_where_one_file_ends_and_the_next_begins(self) -> None:
        write("a.jsonl", "xy")
        write("b.jsonl", "z")
        before = fingerprint(SourceArguments(path="*.jsonl"))
        write("a.jsonl", "x")
        write("b.jsonl", "yz")
        assert fingerprint(SourceArguments(path="*.jsonl")) != before


class TestHub:
    SOURCE = SourceArguments(path="org/name", split="test", subset="main", revision="abc123")

    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """Replaces the hub by two rows; holds what was asked of it."""
        import datasets

        asked: list[Any] = []
        rows = [{"tools": [{"a": "1", "b": None}], "text": "x"}, {"tools": None, "text": "2020-01-01"}]

        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            asked.append((args, kwargs))
            return datasets.Dataset.from_list(rows)

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        return asked

    def test_rows_come_from_the_split_and_revision_without_padding(self, asked: list[Any]) -> None:
        assert list(read_rows(self.SOURCE)) == [
            RawRow("org/name", 1, {"tools": [{"a": "1"}], "text": "x"}),
            RawRow("org/name", 2, {"text": "2020-01-01"}),
        ]
        assert asked == [(("org/name",), {"name": "main", "split": "test", "revision": "abc123", "streaming": False})]

    @pytest.mark.usefixtures("asked")
    def test_the_fingerprint_is_of_the_rows(self) -> None:
        rows = '{"text": "x", "tools": [{"a": "1", "b": null}]}{"text": "2020-01-01", "tools": null}'
        assert fingerprint(self.SOURCE) == hashlib.sha256(rows.encode()).hexdigest()

    def test_what_the_hub_says_is_passed_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import datasets

        def load_dataset(*args: Any, **kwargs: Any) -> Any:
            raise ValueError("Unknown split \"test\". Should be one of ['train'].")

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert failure(self.SOURCE) == (
            "org/name: no file of this name exists here, and as a hub data set (split 'test') it can't be loaded: "
            "Unknown split \"test\". Should be one of ['train']."
        )


def test_reading_is_lazy(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"n": 1}\nbroken\n')
    rows: Iterator[RawRow] = read_rows(SourceArguments(path=str(tmp_path / "a.jsonl")))
    assert next(rows).row == {"n": 1}
    with pytest.raises(DataError):
        next(rows)


def test_importing_sources_and_formats_loads_nothing_heavy() -> None:
    code = (
        "import sys, sft_toolkit.data, sft_toolkit.data.sources, sft_toolkit.data.formats;"
        "print([m for m in ('torch', 'transformers', 'datasets', 'pyarrow', 'numpy') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


def test_the_hub_is_only_asked_for_what_looks_like_a_hub_id(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load_hub(source: SourceArguments) -> Any:
        raise AssertionError(f"asked the hub for {source.path}")

    monkeypatch.setattr(columnar, "load_hub", load_hub)
    (folder / "data").mkdir()
    for name in ("data/rows", "org/train.jsonl", "a/b/c", "/org/name", "./name", "name"):
        assert ": no such file; " in failure(SourceArguments(path=name))
