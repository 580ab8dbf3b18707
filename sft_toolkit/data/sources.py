"""Files, globs and hub ids -> rows, each with the place it came from. Text stays as the file says, to the byte."""

from __future__ import annotations

import glob
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path

from sft_toolkit.args import OnBadRow, SourceArguments
from sft_toolkit.data.readers.columnar import drop_nulls, hub_digest, read_hub, read_parquet
from sft_toolkit.data.readers.json_list import read_json
from sft_toolkit.data.readers.jsonl import read_jsonl
from sft_toolkit.data.readers.lines import hash_file
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.readers.table import read_csv, read_tsv
from sft_toolkit.errors import DataError
from sft_toolkit.hints import near

__all__ = ["READERS", "RawRow", "drop_nulls", "expand", "fingerprint", "is_local", "read_rows"]

READERS: dict[str, Callable[[Path], Iterator[RawRow]]] = {
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".ndjson": read_jsonl,
    ".json": read_json,
    ".json.gz": read_json,
    ".csv": read_csv,
    ".csv.gz": read_csv,
    ".tsv": read_tsv,
    ".parquet": read_parquet,
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_MANY = 6  # names listed in a message before it says "..."


def read_rows(source: SourceArguments, on_bad_row: OnBadRow = "error", streaming: bool = False) -> Iterator[RawRow]:
    """The rows of one source in file order, lazily; memory does not grow with their number (but see `read_json`).

    Args:
        source: which files, and at most how many rows (`max_rows`, over all of them).
        on_bad_row: "error" stops at the first row that can't be read; "drop" yields it with its `error` set and
            an empty `row`, so that the caller can count it.
        streaming: read a hub data set over the network instead of downloading it.

    Raises:
        DataError: at once, if a file is missing or of an unknown type; while reading, if a file holds no rows or
            a row can't be read. Each names the file, and the line or row.
    """
    paths = expand(source)
    rows = _rows_of_files(paths) if paths else _some_rows(source.path, read_hub(source, streaming))
    return _checked(islice(rows, source.max_rows), on_bad_row)


def expand(source: SourceArguments) -> list[Path]:
    """The files of a source, those of a glob sorted by name; no files for a hub id.

    Raises:
        DataError: nothing is there (with near names), it is a folder, or its suffix names no known type.
    """
    path = Path(source.path).expanduser()
    if path.is_dir():
        raise DataError(
            f"{source.path}: is a folder; name a file in it, or a glob such as {path}/*.jsonl (it {_contents(path)})"
        )
    if path.is_file():
        return [_of_known_type(path)]
    if glob.has_magic(source.path):
        found = sorted(file for file in map(Path, glob.glob(str(path), recursive=True)) if file.is_file())
        if not found:
            raise DataError(f"{source.path}: no file matches")
        return [_of_known_type(file) for file in found]
    if _is_hub_id(source.path):
        return []
    raise DataError(f"{source.path}: no such file{_near(path)}")


def is_local(source: SourceArguments) -> bool:
    """True for a source that is a file or a glob which matches files."""
    path = Path(source.path).expanduser()
    return path.is_file() or (glob.has_magic(source.path) and any(glob.iglob(str(path), recursive=True)))


def fingerprint(source: SourceArguments) -> str:
    """sha256 over the contents of the source's files, in hexadecimal. Names and times of files don't count.

    Raises:
        DataError: as `expand`, or a file can't be read.
    """
    paths = expand(source)
    if not paths:
        return hub_digest(source)
    total = hashlib.sha256()
    for path in paths:
        digest = hashlib.sha256()
        hash_file(path, digest)
        total.update(digest.digest())
    return total.hexdigest()


def _rows_of_files(paths: list[Path]) -> Iterator[RawRow]:
    for path in paths:
        yield from _some_rows(str(path), READERS[_suffix(path)](path))


def _some_rows(name: str, rows: Iterator[RawRow]) -> Iterator[RawRow]:
    first = next(rows, None)
    if first is None:
        raise DataError(f"{name}: holds no rows; the file is empty, or has nothing but a header")
    yield first
    yield from rows


def _checked(rows: Iterable[RawRow], on_bad_row: OnBadRow) -> Iterator[RawRow]:
    for raw in rows:
        if raw.error is not None and on_bad_row == "error":
            raise DataError(f"{raw.place}: {raw.error}")
        yield raw


def _suffix(path: Path) -> str:
    suffixes = [s.lower() for s in path.suffixes]
    return "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])


def _of_known_type(path: Path) -> Path:
    if _suffix(path) not in READERS:
        raise DataError(f"{path}: files ending in '{_suffix(path)}' can't be read; known: {', '.join(READERS)}")
    return path


def _is_hub_id(name: str) -> bool:
    # `data/rows` beside an existing folder `data`, or anything with a data file's suffix, is a misspelt file.
    known_suffix = _suffix(Path(name)) in READERS
    return bool(_HUB_ID.fullmatch(name)) and not known_suffix and not Path(name).parent.is_dir()


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist either"
    if close := near(path.name, (entry.name for entry in folder.iterdir())):
        return f"; did you mean {folder / close}?"
    return f"; the folder {folder} {_contents(folder)}. A hub data set is written org/name"


def _contents(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir() if not entry.name.startswith("."))
    if not names:
        return "is empty"
    return f"holds {', '.join(names[:_MANY])}{', ...' if len(names) > _MANY else ''}"
