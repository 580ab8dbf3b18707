"""What is measured, as plain data that travels between the parent and its subprocesses. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TICKETS = "data/tickets/train.jsonl"
SMOLLM2 = ".cache/models/SmolLM2-135M-Instruct"
BYTES = "bytes"
"""Value of `Setting.tokenizer` that stands for the byte tokenizer of tests/tiny.py."""


@dataclass(frozen=True)
class Setting:
    """One training, the same for every system: rows in file order, fp32 on the CPU, AdamW at a constant rate.

    `batch` rows make an update where rows are padded; where they are packed, one bin of at most `max_length` tokens
    does. The first `warmup` of `steps` updates are not measured.
    """

    data: str
    tokenizer: str
    rows: int | None
    layers: int
    hidden: int
    batch: int
    max_length: int
    steps: int
    warmup: int
    learning_rate: float
    lora: bool
    seed: int = 0

    @classmethod
    def from_json(cls, text: str) -> Setting:
        """The setting that `json.dumps(asdict(setting))` wrote."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class Contestant:
    """A system in one layout of its batches."""

    system: str
    packed: bool

    def __str__(self) -> str:
        return f"{self.system} {'packed' if self.packed else 'padded'}"


@dataclass(frozen=True)
class Outcome:
    """What one subprocess measured.

    `prepare_cpu_s` and `train_cpu_s` are CPU-seconds over all threads, `train_s` is wall time; tokens are those of the
    measured updates, without padding; memory is in MiB. `losses` holds every update, warm-up included.
    """

    prepare_cpu_s: float
    train_s: float
    train_cpu_s: float
    tokens: int
    supervised: int
    slots: int
    peak_mib: float
    training_mib: float
    losses: list[float]

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Outcome:
        """The outcome that `to_json` wrote."""
        return cls(**json.loads(text))


def read_rows(setting: Setting) -> list[dict[str, Any]]:
    """Rows of a JSONL file, or of a JSON file that holds a list."""
    text = (ROOT / setting.data).read_text(encoding="utf-8")
    rows = json.loads(text) if text.lstrip().startswith("[") else [json.loads(s) for s in text.split("\n") if s.strip()]
    return list(rows[: setting.rows])
