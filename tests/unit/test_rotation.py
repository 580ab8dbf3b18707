"""Which checkpoints stay: by number, the best and the latest always, foreign folders untouched."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_toolkit.checkpoints.rotation import rotate
from tests.unit.test_checkpoint import make


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def break_it(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


@pytest.mark.parametrize(
    ("limit", "best", "left"),
    [
        (None, None, [2, 4, 6, 10]),
        (0, None, [2, 4, 6, 10]),
        (3, None, [4, 6, 10]),
        (2, None, [6, 10]),
        (1, None, [10]),
        (1, 2, [2, 10]),  # Trainer keeps the best alone: nothing would be left to go on from
        (2, 2, [2, 10]),
        (3, 2, [2, 6, 10]),
        (1, 10, [10]),
        (2, 99, [6, 10]),  # a best one that is gone takes no place
    ],
)
def test_the_newest_by_number_stay_and_the_best(
    tmp_path: Path, limit: int | None, best: int | None, left: list[int]
) -> None:
    for step in (10, 4, 6, 2):  # written in another order than their numbers
        make(tmp_path, step)
    rotate(tmp_path / "checkpoint-10", limit, None if best is None else Path("elsewhere") / f"checkpoint-{best}")
    assert names(tmp_path) == sorted(f"checkpoint-{step}" for step in left)


def test_foreign_folders_are_neither_counted_nor_touched(tmp_path: Path) -> None:
    foreign = ("checkpoint-best", "checkpoint-3x", "checkpoint-", "checkpoint-2-old", "my-checkpoint-1", "final")
    for name in foreign:
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-1").write_text("a file")
    for step in (2, 4, 6):
        make(tmp_path, step)
    rotate(tmp_path / "checkpoint-6", 2, None)
    assert names(tmp_path) == sorted([*foreign, "checkpoint-1", "checkpoint-4", "checkpoint-6"])


def test_a_whole_one_is_never_deleted_in_favour_of_a_broken_one(tmp_path: Path) -> None:
    for step in (2, 4, 6, 8):
        make(tmp_path, step)
    break_it(tmp_path / "checkpoint-6")
    rotate(tmp_path / "checkpoint-8", 2, None)
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-8"]


def test_a_run_that_went_back_keeps_what_is_newer_and_whole(tmp_path: Path) -> None:
    for step in (2, 4, 20, 30):
        make(tmp_path, step)
    break_it(tmp_path / "checkpoint-30")
    rotate(tmp_path / "checkpoint-4", 2, None)
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-30", "checkpoint-4"]
    make(tmp_path, 40)
    rotate(tmp_path / "checkpoint-4", 1, None)
    assert names(tmp_path) == ["checkpoint-20", "checkpoint-30", "checkpoint-4", "checkpoint-40"]


def test_one_that_can_not_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        make(tmp_path, step)

    def refuse(folder: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("sft_toolkit.checkpoints.rotation.remove", refuse)
    rotate(tmp_path / "checkpoint-4", 1, None)
    assert caplog.messages == [f"{tmp_path / 'checkpoint-2'} can't be deleted: Permission denied"]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
