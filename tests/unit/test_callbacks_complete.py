from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from torch import distributed
from torch.multiprocessing.spawn import spawn
from transformers import TrainerControl

from sft_toolkit.callbacks.complete import CompleteCallback
from sft_toolkit.checkpoints.checkpoint import newest_good, why_incomplete
from tests.unit.callback_runs import arguments, state, stock_trainer


def test_each_checkpoint_of_a_run_is_marked_and_lists_its_files(tmp_path: Path) -> None:
    stock_trainer(tmp_path, [CompleteCallback()], save_strategy="steps", save_steps=2).train()
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert folders == ["checkpoint-2", "checkpoint-3"]
    for folder in folders:
        files = [path for path in (tmp_path / folder).iterdir() if path.name != "COMPLETE"]
        marked = json.loads((tmp_path / folder / "COMPLETE").read_text())["files"]
        assert {name: entry["bytes"] for name, entry in marked.items()} == {p.name: p.stat().st_size for p in files}
        assert why_incomplete(tmp_path / folder) is None
    assert newest_good(tmp_path) == (tmp_path / "checkpoint-3", [])


def test_other_ranks_mark_nothing_unless_each_machine_has_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    args = arguments(tmp_path)
    CompleteCallback().on_save(args, state(4, is_world_process_zero=False), TrainerControl())
    assert list(folder.iterdir()) == []
    args.save_on_each_node = True
    far = state(4, is_world_process_zero=False, is_local_process_zero=False)
    CompleteCallback().on_save(args, far, TrainerControl())
    assert list(folder.iterdir()) == []
    CompleteCallback().on_save(args, state(4, is_world_process_zero=False), TrainerControl())
    assert [path.name for path in folder.iterdir()] == ["COMPLETE"]


def test_a_folder_that_does_not_exist_is_not_made(tmp_path: Path) -> None:
    CompleteCallback().on_save(arguments(tmp_path), state(4), TrainerControl())
    assert list(tmp_path.iterdir()) == []


def _rank(rank: int, folder: str) -> None:
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    if rank == 1:
        time.sleep(1.0)
        Path(folder, "checkpoint-4", "rng_state_1.pth").write_text("late")
    seen = state(4, is_world_process_zero=rank == 0, is_local_process_zero=rank == 0)
    CompleteCallback().on_save(arguments(Path(folder)), seen, TrainerControl())
    distributed.barrier()
    distributed.destroy_process_group()


@pytest.mark.slow
def test_the_mark_waits_for_the_files_of_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-4").mkdir()
    spawn(_rank, args=(str(tmp_path),), nprocs=2)
    assert json.loads((tmp_path / "checkpoint-4" / "COMPLETE").read_text())["files"] == {
        "rng_state_1.pth": {"bytes": 4, "crc32": "6f2a1f95"}
    }
