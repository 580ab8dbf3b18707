"""Configurations in pieces."""

from __future__ import annotations

from collections.abc import Callable

from sft_toolkit.config import RunConfig

MODEL = "model: {name_or_path: org/name}\n"
DATA = "data: {train: train.jsonl}\n"
TRAINING = "training: {output_dir: out}\n"
MINIMAL = MODEL + DATA + TRAINING
Load = Callable[..., RunConfig]
Problems = Callable[..., list[str]]


def training(line: str) -> str:
    """A configuration whose fifth line is a key of section training."""
    return f"{MODEL}{DATA}training:\n  output_dir: out\n  {line}\n"
