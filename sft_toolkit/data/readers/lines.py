"""A file as numbered lines of bytes; BOM and gzip are taken off, nothing else is touched."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

from sft_toolkit.errors import DataError


def open_binary(path: Path) -> IO[bytes]:
    """The file's bytes, uncompressed if the name ends in `.gz`."""
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yields (1-based line, bytes with their line end). Memory: one line.

    Raises:
        DataError: the file can't be opened, is no gzip file despite its name, or is UTF-16.
    """
    number = 0
    try:
        with open_binary(path) as file:
            for number, line in enumerate(file, 1):
                yield number, _without_bom(path, line) if number == 1 else line
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: damaged gzip file after line {number}: {error}") from None
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None


def hash_file(path: Path, digest: hashlib._Hash) -> None:
    """Feeds the file's bytes, as they are on disk, to the digest. Memory: 1 MiB."""
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError as error:
        raise DataError(f"{path}: can't be read: {error.strerror or error}") from None


def invalid_utf8(error: UnicodeDecodeError) -> str:
    """The reason for a line that is not UTF-8; the position counts bytes from 1."""
    return (
        f"invalid UTF-8: byte 0x{error.object[error.start]:02X} at position {error.start + 1}; save the file as UTF-8"
    )


def _without_bom(path: Path, line: bytes) -> bytes:
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}, line 1: the file is UTF-16; save it as UTF-8")
    return line.removeprefix(codecs.BOM_UTF8)
