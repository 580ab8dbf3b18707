"""A folder with a tiny model, data files and a configuration; runs the command line in this process."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from sft_toolkit.cli import main
from tests.tiny import chat, tiny_model, tiny_tokenizer


@dataclass
class Outcome:
    """Exit code and what was written to the two streams."""

    code: int
    out: str
    err: str


class Workshop:
    """`run("train")` uses `config`, which a test may change before."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.capsys = folder, capsys
        self.out = folder / "out"
        tiny_model().save_pretrained(folder / "model")
        tiny_tokenizer().save_pretrained(folder / "model")
        self.write_rows("train.jsonl", [{"messages": chat(f"say {i}", "xyz"[: 1 + i % 3])} for i in range(8)])
        self.write_rows("eval.jsonl", [{"messages": chat(f"tell {i}", "xyz"[: 1 + i % 3])} for i in range(3)])
        self.config: dict[str, Any] = {
            "model": {"name_or_path": str(folder / "model")},
            "data": {
                "train": str(folder / "train.jsonl"),
                "eval": str(folder / "eval.jsonl"),
                "max_length": 64,
                "cache_dir": str(folder / "cache"),
            },
            "lora": {"r": 4},
            "training": {
                "output_dir": str(self.out),
                "max_steps": 4,
                "per_device_train_batch_size": 2,
                "learning_rate": 0.005,
                "logging_steps": 1,
                "save_steps": 2,
                "eval_strategy": "steps",
                "eval_steps": 2,
            },
        }

    def write_rows(self, name: str, rows: Sequence[dict[str, Any]]) -> Path:
        path = self.folder / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    def write_config(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.config, sort_keys=False), encoding="utf-8")
        return path

    def run(self, command: str, *arguments: str) -> Outcome:
        """One command with the configuration; log lines count as standard error, as on a terminal."""
        self.capsys.readouterr()  # what making the folder printed
        root = logging.getLogger()
        handlers, level = root.handlers[:], root.level
        root.handlers = []  # so that basicConfig of the command line takes effect under pytest too
        try:
            code = main([command, "--config", str(self.write_config()), *arguments])
        finally:
            root.handlers, root.level = handlers, level
        streams = self.capsys.readouterr()
        return Outcome(code, streams.out, streams.err)

    def json(self, name: str) -> Any:
        return json.loads((self.out / name).read_text(encoding="utf-8"))

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
