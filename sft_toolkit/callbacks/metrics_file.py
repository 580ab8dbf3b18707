"""`metrics.jsonl`: one JSON object per step that logged something, its `step` strictly rising over resumes."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.files import in_output_dir, json_line, plain, replace_file

FILE_NAME = "metrics.jsonl"


class MetricsFileCallback(TrainerCallback):
    """Writes every log event at once, and merges the events of one step into one line.

    A training step and its evaluation log at the same step, so the second event rewrites the line that the first one
    has just written: nothing is held back while a long evaluation runs, and `step` still rises strictly.

    When a run resumes from step N, the lines after N are removed, since these steps are trained again. A run that
    starts anew starts an empty file. What is logged before training (an evaluation) becomes the line of step 0;
    evaluating without ever training leaves the folder alone.
    """

    def __init__(self) -> None:
        self._path: Path | None = None  # None until training begins
        self._last: dict[str, Any] | None = None  # the last line of the file
        self._start = 0  # its first byte
        self._end = 0  # the byte after it

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        evaluated_before = self._last if self._path is None else None
        self._path = in_output_dir(args, FILE_NAME)
        kept = _lines_up_to(self._path, state.global_step) if state.global_step > 0 else []
        content = b"".join(kept)
        if not self._path.exists() or self._path.read_bytes() != content:
            replace_file(self._path, content)
        self._last = json.loads(kept[-1]) if kept else None
        self._start, self._end = len(content) - len(kept[-1]) if kept else 0, len(content)
        if evaluated_before is not None and state.global_step == 0:
            self._write(evaluated_before)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs:
            return
        self._write({"step": state.global_step, **{k: _number(v) for k, v in logs.items() if k != "step"}})

    def _write(self, line: dict[str, Any]) -> None:
        if self._last is not None and self._last["step"] == line["step"]:
            line = {**self._last, **line}
        else:
            self._start = self._end
        self._last = line
        if self._path is not None:
            self._start, self._end = _write_at(self._path, self._start, json_line(line))


def _write_at(path: Path, start: int, content: bytes) -> tuple[int, int]:
    """Make `content` the end of the file, from byte `start` on; returns where it really starts and ends."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "r+b") as file:
            # Someone may have emptied the file meanwhile; writing past its end would leave a hole of zero bytes.
            start = min(start, os.fstat(descriptor).st_size)
            file.seek(start)
            file.write(content)
            file.truncate()
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    return start, start + len(content)


def _lines_up_to(path: Path, step: int) -> list[bytes]:
    """The whole lines whose steps rise and are at most `step`; a line torn by a crash is left out."""
    kept: list[bytes] = []
    previous = -1
    for raw in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            found = json.loads(raw)["step"]
        except (ValueError, KeyError, TypeError):
            continue
        if raw.endswith(b"\n") and isinstance(found, int) and previous < found <= step:
            kept.append(raw)
            previous = found
    return kept


def _number(value: Any) -> Any:
    """Trainer logs some numbers as text ("6.248"): turn them back."""
    if isinstance(value, str):
        try:
            return plain(float(value))
        except ValueError:
            return value
    return plain(value)
