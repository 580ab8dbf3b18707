"""What every callback has to stand: a run of the stock Trainer, another rank, and no trace outside of its files."""

from __future__ import annotations

import io
import logging
import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import TrainerCallback

import sft_toolkit.callbacks as ours
from sft_toolkit.args import EvaluationArguments
from sft_toolkit.evaluation.score import ScoredAnswers, score
from sft_toolkit.registry import BUILT_IN, lookup
from tests.tiny import tiny_tokenizer
from tests.unit.callback_runs import OtherRank, stock_trainer, token_rows

QUESTIONS = EvaluationArguments(generate=2, max_new_tokens=3)


def _samples() -> TrainerCallback:
    def answer(model: nn.Module) -> ScoredAnswers:
        return score(model, tiny_tokenizer(), token_rows(), QUESTIONS)

    return ours.SamplesCallback(answer, stream=io.StringIO())


MAKERS: dict[str, Callable[[], TrainerCallback]] = {
    "CompleteCallback": ours.CompleteCallback,
    "CurveCallback": ours.CurveCallback,
    "EmaCallback": lambda: ours.EmaCallback(decay=0.0),
    "InterruptCallback": ours.InterruptCallback,
    "LayersCallback": lambda: ours.LayersCallback(every=2),
    "LiveCurveCallback": ours.LiveCurveCallback,
    "ManifestCallback": ours.ManifestCallback,
    "MemoryCallback": ours.MemoryCallback,
    "MetricsFileCallback": ours.MetricsFileCallback,
    "NonFiniteGuard": ours.NonFiniteGuard,
    "StallWatch": ours.StallWatch,
    "ProgressCallback": lambda: ours.ProgressCallback(io.StringIO(), bar=True),
    "SamplesCallback": _samples,
    "UnfreezeCallback": lambda: ours.UnfreezeCallback({0: ["*"]}),
}
MARKS = {"checkpoint-2/COMPLETE", "checkpoint-3/COMPLETE"}
WRITES = {
    "CompleteCallback": MARKS,
    "CurveCallback": {"loss.png"},
    "EmaCallback": {"checkpoint-2/ema.safetensors", "checkpoint-3/ema.safetensors"},
    "LayersCallback": {"layers.jsonl", "layers.png"},
    "ManifestCallback": {"run.json"},
    "MetricsFileCallback": {"metrics.jsonl"},
    "SamplesCallback": {"samples.json", "samples.html"},
}
RUN: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
every_callback = pytest.mark.parametrize("name", sorted(MAKERS))


def train(folder: Path, *callbacks: TrainerCallback) -> dict[str, torch.Tensor]:
    """The weights after three steps that log, evaluate and save."""
    trainer = stock_trainer(folder, list(callbacks), **RUN)
    trainer.train()
    assert isinstance(trainer.model, nn.Module)
    return trainer.model.state_dict()


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def process_state() -> dict[str, Any]:
    """What a callback could change for the rest of the process."""
    root = logging.getLogger()
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)],
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "logging": (root.level, list(root.handlers), transformers.logging.get_verbosity()),
        "warnings": list(warnings.filters),
        "trainer": dict(vars(transformers.Trainer)),
        "callback": dict(vars(TrainerCallback)),
        "directory": os.getcwd(),
    }


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, torch.Tensor], set[str]]:
    folder = tmp_path_factory.mktemp("plain")
    return train(folder), files(folder)


def test_the_battery_knows_every_callback() -> None:
    assert sorted(MAKERS) == ours.__all__ == dir(ours)
    assert sorted(lookup("callback", name).__name__ for name in BUILT_IN["callback"]) == sorted(MAKERS)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = ours.Nothing


@every_callback
def test_the_weights_are_the_same_with_and_without_it(
    name: str, tmp_path: Path, plain_run: tuple[dict[str, torch.Tensor], set[str]]
) -> None:
    weights = train(tmp_path, MAKERS[name]())
    assert all(torch.equal(weights[key], expected) for key, expected in plain_run[0].items())
    assert files(tmp_path) == plain_run[1] | WRITES.get(name, set())


@every_callback
def test_on_another_rank_it_writes_nothing(
    name: str,
    tmp_path: Path,
    plain_run: tuple[dict[str, torch.Tensor], set[str]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    callback = MAKERS[name]()
    train(tmp_path, OtherRank(), callback)
    assert files(tmp_path) == plain_run[1]
    assert capfd.readouterr().out == ""
    stream = getattr(callback, "_stream", None)
    assert stream is None or stream.getvalue() == ""


@every_callback
def test_it_leaves_the_process_as_it_was(name: str, tmp_path: Path) -> None:
    train(tmp_path / "warm", MAKERS[name]())  # what is imported on first use is imported now
    before = process_state()
    train(tmp_path / "out", MAKERS[name]())
    assert process_state() == before


@every_callback
def test_one_instance_serves_two_runs_in_a_row(name: str, tmp_path: Path) -> None:
    callback = MAKERS[name]()
    first = train(tmp_path, callback)
    kept = files(tmp_path)
    second = train(tmp_path, callback)
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert files(tmp_path) == kept


def test_all_of_them_together(tmp_path: Path, plain_run: tuple[dict[str, torch.Tensor], set[str]]) -> None:
    weights = train(tmp_path, *(make() for make in MAKERS.values()))
    assert all(torch.equal(weights[key], expected) for key, expected in plain_run[0].items())
    assert files(tmp_path) == plain_run[1].union(*WRITES.values())
