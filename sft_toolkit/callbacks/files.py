"""Files that others read while a run writes them: strict JSON, replaced as a whole."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments


def in_output_dir(args: TrainingArguments, name: str) -> Path:
    """The file `name` of this run. `output_dir` is optional in the type only: Trainer's arguments always set one."""
    return Path(args.output_dir or ".") / name


def plain(value: Any) -> Any:
    """`value` as strict JSON holds it.

    JSON has no NaN and no infinity: they become the strings "NaN", "Infinity" and "-Infinity". NumPy and torch
    scalars become numbers, tuples and sets lists, and what JSON has no type for (a path, a dtype) its text.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted((plain(item) for item in value), key=str)
    if hasattr(value, "tolist"):  # NumPy and torch, scalars and arrays alike
        return plain(value.tolist())
    return str(value)


def json_line(value: Mapping[str, Any]) -> bytes:
    """One object on one line, UTF-8, with its newline."""
    return (json.dumps(plain(value), ensure_ascii=False, allow_nan=False) + "\n").encode("utf-8", "backslashreplace")


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Replace `path` by the indented JSON of `value`; a reader sees the old or the new file, never a part.

    Raises:
        OSError: the disk is full or read-only; the old file is still there. The error names `path`.
    """
    text = json.dumps(plain(value), ensure_ascii=False, allow_nan=False, indent=2) + "\n"
    replace_file(path, text.encode("utf-8", "backslashreplace"))


def replace_file(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Write beside `path`, then rename over it.

    Args:
        durable: also survive a power cut. It costs a disk flush, so pictures that are redrawn soon go without.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        # The error of a full disk names no file by itself.
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None where there is no such file or it holds no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None
