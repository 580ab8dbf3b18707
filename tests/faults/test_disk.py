"""A disk that takes no more, at every place of a save: older checkpoints stay, no part of the new one does."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any, cast

import pytest

from sft_toolkit import CheckpointError, SFTTrainer
from sft_toolkit.checkpoints.checkpoint import newest_good
from sft_toolkit.checkpoints.disk import in_words, trouble
from sft_toolkit.training.saving_space import Room, room_for
from tests.e2e.workshop import Workshop
from tests.resume.test_saving import names, trainer

NO_SPACE = os.strerror(errno.ENOSPC)
STEP = 4096 if os.environ.get("SFT_TORTURE") else 65_536  # bytes between two places at which the disk ends


@pytest.fixture
def workshop(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Workshop:
    return Workshop(tmp_path, capsys)


class Limited(SFTTrainer):
    """From its second save on, the kernel refuses files beyond `size` bytes, to Python, C++ and Rust alike."""

    size = 0

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        if self.state.global_step == 2:
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.size, hard))
        try:
            super()._save_checkpoint(model, trial)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_wherever_a_file_can_not_be_written_the_older_checkpoint_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.resume.test_saving.SFTTrainer", Limited)
    limited = cast(Limited, trainer(tmp_path, max_steps=1))
    limited.train()
    limited.state.global_step = 2
    sizes = sorted(path.stat().st_size for path in (tmp_path / "checkpoint-1").iterdir())
    for limited.size in sorted({*range(0, sizes[-1], STEP), *(size - 1 for size in sizes)}):
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()), pytest.raises(CheckpointError) as caught:
            limited._save_checkpoint(limited.model, None)
        assert str(caught.value).startswith(f"'{tmp_path / 'checkpoint-2'}' could not be written: ")
        assert "Older checkpoints (checkpoint-1) are untouched" in str(caught.value)
        assert names(tmp_path) == ["checkpoint-1"]
        assert newest_good(tmp_path) == (tmp_path / "checkpoint-1", [])
    limited.size = 1 << 30
    limited._save_checkpoint(limited.model, None)
    assert newest_good(tmp_path) == (tmp_path / "checkpoint-2", [])


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="mounting needs root")
def test_a_full_disk_is_told_with_the_space_it_needs(workshop: Workshop) -> None:
    with disk_of(700, workshop):
        del workshop.config["lora"]
        outcome = workshop.run("train")
        assert outcome.code == 1
        assert (
            "free, and the run takes up to 988 kB: a checkpoint takes about 424 kB, what is written at the end about "
            "141 kB, and all 2 of them are kept (training.save_total_limit keeps fewer)"
        ) in outcome.err
        assert f"'{workshop.out / 'checkpoint-4'}' could not be written: {NO_SPACE}. It needs about 424 kB, and " in (
            outcome.err
        )
        assert "kB are free there without it" in outcome.err
        assert "Traceback" not in outcome.err
        assert [name for name in names(workshop.out) if name.startswith(("checkpoint", "_"))] == ["checkpoint-2"]
        assert workshop.json("run.json")["exit_state"] == "failed"
        assert "could not be written" in workshop.json("run.json")["error"]


def test_a_disk_that_can_not_hold_the_run_is_refused_before_the_first_step(workshop: Workshop) -> None:
    with disk_of(300, workshop):
        del workshop.config["lora"]
        outcome = workshop.run("train")
        assert outcome.code == 2
        assert (
            "a checkpoint takes about 424 kB, what is written at the end about 141 kB: the run could not be saved; "
            "make room there, or choose an output_dir on another disk"
        ) in outcome.err
        assert not (workshop.out / "metrics.jsonl").read_bytes()


@contextmanager
def disk_of(size: int, workshop: Workshop) -> Iterator[None]:
    """A small disk of so many kB, with the output folder on it."""
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting needs root")
    disk = workshop.out
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}k", "tmpfs", disk], check=False)
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    workshop.out = disk / "run"
    workshop.config["training"]["output_dir"] = str(workshop.out)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("room", "more", "whole", "least"),
    [
        (Room(10, 3, held=0, to_come=4, limit=None), 4, 43, 13),
        (Room(10, 3, held=0, to_come=4, limit=2), 3, 30, 13),  # a third one before the first goes
        (Room(10, 15, held=0, to_come=4, limit=2), 3, 35, 25),
        (Room(10, 3, held=2, to_come=4, limit=2), 1, 10, 10),  # they are there already: the new one takes their place
        (Room(10, 3, held=1, to_come=1, limit=2), 1, 13, 13),
        (Room(10, 3, held=5, to_come=0, limit=2), 0, 3, 3),
    ],
)
def test_room_for_a_run(room: Room, more: int, whole: int, least: int) -> None:
    assert (room.more, room.whole, room.least) == (more, whole, least)


def test_the_size_of_a_checkpoint_is_told_before_there_is_one(tmp_path: Path) -> None:
    for optim, moments in (("adamw_torch", 2), ("sgd", 0)):
        built = trainer(tmp_path / optim, optim=optim, max_steps=5, save_steps=2)
        built.train()
        built.optimizer.state.clear()
        built.state.global_step = 1
        weights = 4 * 35_296
        assert room_for(built, 7) == Room((1 + moments) * weights, 7, held=3, to_come=3, limit=None)


def test_before_each_save_the_disk_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([500_000, 400_000])  # at the start, and before the save
    monkeypatch.setattr("sft_toolkit.training.saving_space.free_bytes", lambda _: next(free))
    with pytest.raises(CheckpointError, match=f"checkpoint-1' could not be written: {NO_SPACE}"):
        trainer(tmp_path, max_steps=1).train()
    assert names(tmp_path) == []
    monkeypatch.setattr("sft_toolkit.training.saving_space.free_bytes", lambda _: None)  # nobody knows
    trainer(tmp_path, max_steps=1).train()


def test_what_is_written_at_the_end_is_whole_or_not_there(workshop: Workshop, monkeypatch: pytest.MonkeyPatch) -> None:
    assert workshop.run("train").code == 0
    before = {path: path.read_bytes() for path in (workshop.out / "final").iterdir()}
    workshop.config["training"] |= {"max_steps": 5, "lr_scheduler_type": "constant"}

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, NO_SPACE)

    monkeypatch.setattr(
        "sft_toolkit.training.saving_writer.check_saved", lambda folder: full() if folder.name == "final" else None
    )
    outcome = workshop.run("train", "training.output_dir=" + str(workshop.folder / "other"))
    assert outcome.code == 1
    assert f"'{workshop.folder / 'other' / 'final'}' could not be written: {NO_SPACE}" in outcome.err
    assert "final" not in names(workshop.folder / "other")
    assert "_unfinished" not in names(workshop.folder / "other")
    assert {path: path.read_bytes() for path in (workshop.out / "final").iterdir()} == before


def test_troubles_of_the_disk_and_others(tmp_path: Path) -> None:
    assert trouble(OSError(errno.EROFS, "x"), tmp_path, 0) == "Read-only file system"
    assert trouble(OSError(errno.EDQUOT, "x"), tmp_path, 0) == os.strerror(errno.EDQUOT)
    assert trouble(RuntimeError("PytorchStreamWriter failed writing file"), tmp_path, 1 << 62) == NO_SPACE
    writer = RuntimeError("[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0\nmore")
    assert trouble(writer, tmp_path, 0) == "[enforce fail at inline_container.cc:626] . unexpected pos 64 vs 0"
    assert trouble(RuntimeError("size mismatch"), tmp_path, 0) is None
    assert trouble(KeyboardInterrupt(), tmp_path, 0) is None


def test_sizes_in_words() -> None:
    sizes = (0, 812, 1499, 812_000, 1_500_000, 424_000_000, 2_345_000_000, 7_000_000_000_000)
    assert [in_words(size) for size in sizes] == [
        "0 bytes",
        "812 bytes",
        "1 kB",
        "812 kB",
        "1.5 MB",
        "424 MB",
        "2.3 GB",
        "7.0 TB",
    ]
    assert in_words(None) == "an unknown amount"
