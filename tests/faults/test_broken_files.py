"""Every file of a checkpoint harmed in turn: it is noticed, and the older checkpoint is taken, without a traceback."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from sft_toolkit.checkpoints.checkpoint import choose_resume, newest_good
from tests.resume.test_saving import trainer

Harm = Callable[[Path], object]


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def halve(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path) -> None:
    """One bit, at a place that is random by the file's name."""
    content = bytearray(path.read_bytes())
    place = random.Random(path.name).randrange(8 * len(content))
    content[place // 8] ^= 1 << place % 8
    path.write_bytes(content)


HARMS: list[Harm] = [truncate, halve, empty, zero, grow, flip, Path.unlink]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    trainer(folder, max_steps=2).train()
    return folder


@pytest.fixture
def run(two: Path, tmp_path: Path) -> Path:
    shutil.copytree(two, tmp_path / "out")
    return tmp_path / "out"


@pytest.mark.parametrize("harm", HARMS, ids=lambda harm: harm.__name__)
def test_whatever_happens_to_a_file_the_older_checkpoint_is_taken(run: Path, harm: Harm) -> None:
    newest, older = run / "checkpoint-2", run / "checkpoint-1"
    assert newest_good(run) == (newest, [])
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert {"COMPLETE", "model.safetensors", "optimizer.pt", "rng_state.pth"} < {path.name for path in files}
    for path in files:
        content = path.read_bytes()
        harm(path)
        good, skipped = newest_good(run)
        assert good == older, f"{harm.__name__} of {path.name} went unnoticed"
        assert [folder for folder, _ in skipped] == [newest]
        path.write_bytes(content)
    assert choose_resume(run, "auto") == newest


def test_each_flipped_bit_of_the_marker_is_noticed_or_means_nothing(run: Path) -> None:
    marker = run / "checkpoint-2" / "COMPLETE"
    content = marker.read_bytes()
    for place in range(8 * min(len(content), 60)):
        harmed = bytearray(content)
        harmed[place // 8] ^= 1 << place % 8
        marker.write_bytes(harmed)
        assert newest_good(run)[0] == run / "checkpoint-1" or json.loads(harmed) == json.loads(content)


def test_a_resume_from_what_is_left_ends_with_the_same_weights(run: Path, two: Path) -> None:
    flip(run / "checkpoint-2" / "optimizer.pt")
    trainer(run, max_steps=2).train(resume_from_checkpoint=True)
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        assert (run / "checkpoint-2" / name).read_bytes() == (two / "checkpoint-2" / name).read_bytes()
