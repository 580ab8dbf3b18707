"""Each file type: the text is what the file says, and a broken row names its line."""

from __future__ import annotations

import codecs
import csv
import json
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from sft_toolkit.args import SourceArguments
from sft_toolkit.data.sources import RawRow, drop_nulls, read_rows
from sft_toolkit.errors import DataError
from tests.unit.data_files import failure, rows_of, write


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, so that paths in messages are short."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


KEPT = ["2020-01-01", "NA", "null", "None", "007", "1e5", "  spaces\t", "a\u2028b\x85c", "é🙂", "true", "\r\n", ""]


@pytest.mark.usefixtures("folder")
class TestBytesAreKept:
    @pytest.mark.parametrize("ascii_only", [True, False])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.jsonl.gz"])
    def test_jsonl(self, name: str, ascii_only: bool) -> None:
        lines = (json.dumps({"text": text}, ensure_ascii=ascii_only) + "\n" for text in KEPT)
        assert rows_of(write(name, "".join(lines))) == [{"text": text} for text in KEPT]

    @pytest.mark.parametrize("ascii_only", [True, False])
    @pytest.mark.parametrize("indent", [None, 2])
    @pytest.mark.parametrize("name", ["a.json", "a.json.gz"])
    def test_json(self, name: str, indent: int | None, ascii_only: bool) -> None:
        expected = [{"text": text} for text in KEPT]
        assert rows_of(write(name, json.dumps(expected, indent=indent, ensure_ascii=ascii_only))) == expected

    @pytest.mark.parametrize(("name", "delimiter"), [("a.csv", ","), ("a.csv.gz", ","), ("a.tsv", "\t")])
    def test_csv(self, name: str, delimiter: str) -> None:
        lines = "".join(f'"{text}"{delimiter}{index}\n' for index, text in enumerate(KEPT))
        expected = [{"text": text, "n": str(index)} for index, text in enumerate(KEPT)]
        assert rows_of(write(name, f"text{delimiter}n\n{lines}")) == expected

    def test_parquet(self) -> None:
        pyarrow.parquet.write_table(pyarrow.table({"text": KEPT}), "a.parquet")
        assert rows_of(SourceArguments(path="a.parquet")) == [{"text": text} for text in KEPT]

    def test_values_keep_their_types_and_absent_keys_stay_absent(self) -> None:
        source = write("a.jsonl", '{"a": null, "b": 1, "c": 1.5}\n{"d": [{}, {"e": null}]}\n')
        assert rows_of(source) == [{"a": None, "b": 1, "c": 1.5}, {"d": [{}, {"e": None}]}]

    def test_csv_cells_may_hold_quotes_delimiters_and_line_ends(self) -> None:
        source = write("a.csv", b'text,n\r\n"say ""x"", then\r\ny\nz",1\r\n')
        assert rows_of(source) == [{"text": 'say "x", then\r\ny\nz', "n": "1"}]

    def test_a_csv_cell_may_be_longer_than_the_csv_module_allows(self) -> None:
        before = csv.field_size_limit()
        assert rows_of(write("a.csv", f"text\n{'x' * 200_000}\n")) == [{"text": "x" * 200_000}]
        assert csv.field_size_limit() == before


@pytest.mark.usefixtures("folder")
class TestHarmlessVariants:
    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.csv.gz"])
    def test_bom_crlf_and_blank_lines(self, name: str) -> None:
        content = {
            "jsonl": b'\r\n{"t": "x"}\r\n\r\n  \r\n{"t": "y"}',
            "json": b'\r\n[ {"t": "x"} ,\r\n\r\n{"t": "y"}\r\n]\r\n',
            "csv": b"t\r\nx\r\n\r\ny\r\n",
        }[name.split(".")[1]]
        assert rows_of(write(name, codecs.BOM_UTF8 + content)) == [{"t": "x"}, {"t": "y"}]

    def test_jsonl_is_numbered_by_line_and_the_rest_by_row(self) -> None:
        jsonl = list(read_rows(write("a.jsonl", '\n{"t": "x"}\n\n{"t": "y"}\n')))
        assert jsonl == [
            RawRow("a.jsonl", 2, {"t": "x"}, unit="line"),
            RawRow("a.jsonl", 4, {"t": "y"}, unit="line"),
        ]
        assert jsonl[1].place == "a.jsonl, line 4"
        table = list(read_rows(write("a.csv", "t\n\nx\ny\n")))
        assert table == [RawRow("a.csv", 1, {"t": "x"}), RawRow("a.csv", 2, {"t": "y"})]
        assert table[1].place == "a.csv, row 2"
        assert list(read_rows(write("a.json", '[{"t": "x"}]'))) == [RawRow("a.json", 1, {"t": "x"})]

    def test_a_json_file_that_holds_jsonl_is_read_as_such(self) -> None:
        assert list(read_rows(write("a.json", '{"t": "x"}\n{"t": "y"}\n'))) == [
            RawRow("a.json", 1, {"t": "x"}, unit="line"),
            RawRow("a.json", 2, {"t": "y"}, unit="line"),
        ]


BROKEN_LINES = [
    (b'{"t": "x"', "not valid JSON: Expecting ',' delimiter (column 10)"),
    (b'{"t": "x"} {"t": "y"}', "not valid JSON: Extra data (column 12)"),
    (b'{"t": "caf\xe9"}', "invalid UTF-8: byte 0xE9 at position 11; save the file as UTF-8"),
    (b'{"t": "\xed\xa0\xbd"}', "invalid UTF-8: byte 0xED at position 8; save the file as UTF-8"),
    (rb'{"t": "\ud83d"}', "the text holds a lone surrogate (\\ud83d), which is no character"),
    (rb'{"t": ["x", {"\udc00": 1}]}', "the text holds a lone surrogate (\\udc00), which is no character"),
    (b'{"t": "x", "t": "y"}', "the key 't' appears twice in one object"),
    (b"[1]", "the row is a list, not an object"),
    (b'"x"', "the row is a string, not an object"),
    (b"null", "the row is null, not an object"),
    (b"[" * 100_000, "not valid JSON: nested too deeply (column 1)"),
]


@pytest.mark.usefixtures("folder")
class TestBrokenRows:
    @pytest.mark.parametrize(("line", "reason"), BROKEN_LINES, ids=[reason for _, reason in BROKEN_LINES])
    def test_a_broken_jsonl_line_names_file_and_line(self, line: bytes, reason: str) -> None:
        source = write("a.jsonl", b'{"t": "x"}\n\n' + line + b'\n{"t": "y"}\n')
        assert failure(source) == f"a.jsonl, line 3: {reason}"
        assert list(read_rows(source, on_bad_row="drop")) == [
            RawRow("a.jsonl", 1, {"t": "x"}, unit="line"),
            RawRow("a.jsonl", 3, {}, reason, unit="line"),
            RawRow("a.jsonl", 4, {"t": "y"}, unit="line"),
        ]

    def test_an_escaped_backslash_before_u_is_no_surrogate(self) -> None:
        assert rows_of(write("a.jsonl", r'{"t": "\\ud83d \ud83d\ude42"}')) == [{"t": "\\ud83d 🙂"}]

    def test_a_json_list_under_the_name_jsonl_is_explained(self) -> None:
        hint = "this looks like one JSON list: name the file .json"
        assert failure(write("a.jsonl", '[\n{"t": "x"}\n]\n')) == (
            f"a.jsonl, line 1: not valid JSON: Expecting value (column 2); {hint}"
        )
        assert failure(write("b.jsonl", '[{"t": "x"}]')) == f"b.jsonl, line 1: the row is a list, not an object; {hint}"

    @pytest.mark.parametrize(
        ("item", "reason"),
        [
            (rb'{"t": "\ud83d"}', "the text holds a lone surrogate (\\ud83d), which is no character"),
            (b'{"t": "\xe9"}', "invalid UTF-8; save the file as UTF-8"),
            (b'{"t": 1, "t": 2}', "the key 't' appears twice in one object"),
            (b"7", "the row is the value 7, not an object"),
        ],
    )
    def test_a_broken_row_of_a_json_list_names_row_and_line(self, item: bytes, reason: str) -> None:
        source = write("a.json", b'[{"t": "x"},\n\n' + item + b',\n{"t": "y"}]')
        assert failure(source) == f"a.json, row 2: line 3: {reason}"
        assert list(read_rows(source, on_bad_row="drop")) == [
            RawRow("a.json", 1, {"t": "x"}),
            RawRow("a.json", 2, {}, f"line 3: {reason}"),
            RawRow("a.json", 3, {"t": "y"}),
        ]

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ('[{"t": 1},\n{"t" 2}]', "a.json, line 2: not valid JSON in row 2: Expecting ':' delimiter (column 6)"),
            ('[{"t": 1}\n{"t": 2}]', "a.json, line 2: not valid JSON in row 1: Expecting ',' or ']' behind the row"),
            ('[{"t": 1},\n]', "a.json, line 2: not valid JSON in row 2: Expecting value (column 1)"),
            ('[{"t": 1}', "a.json, line 1: not valid JSON in row 1: Expecting ',' or ']' behind the row (column 10)"),
            ('[{"t": 1}]\n[]', "a.json, line 2: not valid JSON behind the list: Extra data (column 1)"),
            ('{"t": 1,\n "u" 2}', "a.json, line 2: not valid JSON: Expecting ':' delimiter (column 6)"),
        ],
    )
    def test_json_that_ends_the_reading_names_its_line_even_when_rows_may_be_dropped(
        self, content: str, message: str
    ) -> None:
        source = write("a.json", content)
        assert failure(source).startswith(message)
        with pytest.raises(DataError):
            list(read_rows(source, on_bad_row="drop"))

    @pytest.mark.parametrize(
        ("record", "reason"),
        [
            (b"x\n", "1 cells, but the header has 2 (t, u)"),
            (b"x,y,z\n", "3 cells, but the header has 2 (t, u)"),
            (b"caf\xe9,y\n", "invalid UTF-8; save the file as UTF-8"),
            (b'"x"y,z\n', "',' expected after '\"'"),
        ],
    )
    def test_a_broken_csv_record_names_row_and_line(self, record: bytes, reason: str) -> None:
        source = write("a.csv", b't,u\n"a\nb",c\n' + record + b"d,e\n")
        assert failure(source) == f"a.csv, row 2: line 4: {reason}"
        assert list(read_rows(source, on_bad_row="drop")) == [
            RawRow("a.csv", 1, {"t": "a\nb", "u": "c"}),
            RawRow("a.csv", 2, {}, f"line 4: {reason}"),
            RawRow("a.csv", 3, {"t": "d", "u": "e"}),
        ]

    def test_an_endless_csv_quote_names_the_line_where_its_record_starts(self) -> None:
        source = write("a.csv", 't\nx\n"y\nz\n')
        assert failure(source) == "a.csv, line 3: the record that starts here has a quote without end"

    def test_a_repeated_csv_column_is_refused(self) -> None:
        assert failure(write("a.csv", "t,u,t\n1,2,3\n")) == "a.csv, header: the header names 't' more than once"

    def test_bytes_that_are_no_text_in_parquet_name_the_row(self) -> None:
        raw = pyarrow.array([b"x", b"\xe9", b"y"]).view(pyarrow.string())
        pyarrow.parquet.write_table(pyarrow.table({"t": raw}), "a.parquet")
        source = SourceArguments(path="a.parquet")
        assert failure(source) == "a.parquet, row 2: invalid UTF-8: byte 0xE9"
        assert [raw.row for raw in read_rows(source, on_bad_row="drop")] == [{"t": "x"}, {}, {"t": "y"}]


def test_nulls_of_objects_are_dropped_at_any_depth_and_those_of_lists_kept() -> None:
    assert drop_nulls({"a": None, "b": [None, {"c": None, "d": {"e": None}}]}) == {"b": [None, {"d": {}}]}


def test_parquet_objects_lose_the_keys_of_their_neighbours(tmp_path: Path) -> None:
    rows = [{"m": [{"role": "user", "content": "x"}]}, {"m": [{"role": "assistant", "name": "n"}]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert rows_of(SourceArguments(path=str(tmp_path / "a.parquet"))) == rows


@pytest.mark.parametrize("suffix", ["jsonl", "csv", "parquet"])
def test_memory_does_not_grow_with_the_number_of_rows(tmp_path: Path, suffix: str) -> None:
    def peak(rows: int) -> int:
        path = tmp_path / f"{rows}.{suffix}"
        if suffix == "parquet":
            table = pyarrow.table({"text": ["x" * 100] * rows})
            pyarrow.parquet.write_table(table, path, row_group_size=1000)
        else:
            line = {"jsonl": f'{{"text": "{"x" * 100}"}}\n', "csv": f"{'x' * 100}\n"}[suffix]
            path.write_text(("text\n" if suffix == "csv" else "") + line * rows)
        tracemalloc.start()
        try:
            assert sum(1 for _ in read_rows(SourceArguments(path=str(path)))) == rows
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    peak(1000)
    assert peak(20_000) < peak(2000) + 200_000
