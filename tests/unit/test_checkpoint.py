"""Whole or broken checkpoints, the choice of the one to resume from, and the check after saving."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sft_toolkit.checkpoints.checkpoint import (
    check_saved,
    checkpoints,
    choose_resume,
    newest_good,
    why_incomplete,
)
from sft_toolkit.checkpoints.marker import mark_complete, marked_as_it_is
from sft_toolkit.checkpoints.weights_file import BadWeightsFile, read_header
from sft_toolkit.errors import CheckpointError, ConfigError


def make(output_dir: Path, step: int, marked: bool = True) -> Path:
    folder = output_dir / f"checkpoint-{step}"
    folder.mkdir(parents=True)
    save_file({"w": torch.arange(6.0).view(2, 3)}, folder / "model.safetensors")
    torch.save({"state": {}}, folder / "optimizer.pt")
    torch.save({"last_epoch": step}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    if marked:
        mark_complete(folder)
    return folder


def test_the_marker_lists_size_and_checksum_of_every_file(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    (folder / "global_step4").mkdir()
    (folder / "global_step4" / "part.pt").write_bytes(b"123456789")
    mark_complete(folder)
    listed = json.loads((folder / "COMPLETE").read_text())["files"]
    names = ["global_step4/part.pt", "model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"]
    assert {name: entry["bytes"] for name, entry in listed.items()} == {
        name: (folder / name).stat().st_size for name in names
    }
    assert listed["global_step4/part.pt"] == {"bytes": 9, "crc32": "cbf43926"}  # the check value of CRC-32
    assert why_incomplete(folder) is None


def test_what_is_added_after_the_marker_is_seen_and_marked_again(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    for path in folder.iterdir():
        if path.name != "COMPLETE":
            os.utime(path, ns=(1, 1))
    assert marked_as_it_is(folder)
    (folder / "extra.json").write_text("{}")
    assert not marked_as_it_is(folder)
    mark_complete(folder)
    os.utime(folder / "extra.json", ns=(1, 1))
    assert marked_as_it_is(folder)
    (folder / "extra.json").write_text("[]")
    os.utime(folder / "extra.json", ns=(1 << 62, 1 << 62))
    assert not marked_as_it_is(folder)


Harm = Callable[[Path], object]


def cut(name: str, keep: int) -> Harm:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:keep])


def put(name: str, content: bytes) -> Harm:
    return lambda folder: (folder / name).write_bytes(content)


def flip(name: str, place: int) -> Harm:
    def harm(folder: Path) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 4
        (folder / name).write_bytes(content)

    return harm


def not_a_number(folder: Path) -> None:
    save_file({"w": torch.tensor([[1.0, float("nan"), 2.0], [float("inf"), 0.0, 0.0]])}, folder / "model.safetensors")
    mark_complete(folder)


BROKEN: list[tuple[Harm, str]] = [
    (
        put("model.safetensors", bytes(16)),
        "model.safetensors: is no safetensors file (header of 0 bytes in a file of 16)",
    ),
    (put("model.safetensors", b""), "model.safetensors: has 0 bytes, too few for a safetensors file"),
    (cut("model.safetensors", -4), "model.safetensors: is truncated: 92 of 96 bytes"),
    (
        lambda folder: (folder / "model.safetensors").unlink(),
        "no weights (model.safetensors or adapter_model.safetensors)",
    ),
    (put("trainer_state.json", b""), "trainer_state.json: is empty or not JSON (0 bytes)"),
    (put("trainer_state.json", b"{}" + b" " * 40), "trainer_state.json: holds no global_step"),
    (lambda folder: (folder / "trainer_state.json").unlink(), "no trainer_state.json"),
    (
        lambda folder: (folder / "optimizer.pt").unlink(),
        "no optimizer state (optimizer.pt); it was never written, or saved with save_only_model",
    ),
    (cut("optimizer.pt", 100), "optimizer.pt: is cut or no torch file"),
    (cut("scheduler.pt", 0), "scheduler.pt: is cut or no torch file"),
    (lambda folder: (folder / "COMPLETE").unlink(), "no COMPLETE marker: saving did not come to its end"),
    (put("COMPLETE", b""), "COMPLETE: is empty or damaged"),
    (flip("optimizer.pt", 70), "optimizer.pt: its content is not what was saved (CRC-32 differs)"),
    (flip("model.safetensors", -1), "model.safetensors: its content is not what was saved (CRC-32 differs)"),
    (not_a_number, "model.safetensors: tensor 'w' holds 2 NaN or infinite numbers"),
]


@pytest.mark.parametrize(("harm", "reason"), BROKEN, ids=[reason[:40] for _, reason in BROKEN])
def test_a_broken_checkpoint_is_skipped_with_its_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, harm: Harm, reason: str
) -> None:
    good, broken = make(tmp_path, 4), make(tmp_path, 12)
    harm(broken)
    assert why_incomplete(broken) == reason
    assert newest_good(tmp_path) == (good, [(broken, reason)])
    with caplog.at_level(logging.WARNING, "sft_toolkit.checkpoints.checkpoint"):
        assert choose_resume(tmp_path, "auto") == good
    assert caplog.messages == [f"{broken} is skipped: {reason}"]


def test_a_file_cut_after_the_marker_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path, 4, marked=False)
    (folder / "rng_state.pth").write_bytes(bytes(50))
    mark_complete(folder)
    cut("rng_state.pth", 20)(folder)
    assert why_incomplete(folder) == "rng_state.pth: 20 of 50 bytes"
    put("rng_state.pth", bytes(60))(folder)
    assert why_incomplete(folder) == "rng_state.pth: 60 of 50 bytes"


def test_a_marker_of_the_first_release_lists_sizes_alone(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "COMPLETE"}
    (folder / "COMPLETE").write_text(json.dumps({"files": sizes}))
    assert why_incomplete(folder) is None
    put("scheduler.pt", (folder / "scheduler.pt").read_bytes() + b"x")(folder)
    assert why_incomplete(folder) == f"scheduler.pt: {sizes['scheduler.pt'] + 1} of {sizes['scheduler.pt']} bytes"


def test_a_missing_shard_is_noticed(tmp_path: Path) -> None:
    folder = make(tmp_path, 4)
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"w": "model-00001-of-00002.safetensors", "v": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    mark_complete(folder)
    assert why_incomplete(folder) == "model-00002-of-00002.safetensors: is missing"


def test_deepspeed_keeps_its_state_in_a_folder_of_its_own(tmp_path: Path) -> None:
    folder = make(tmp_path, 4, marked=False)
    (folder / "optimizer.pt").unlink()
    (folder / "global_step4").mkdir()
    (folder / "global_step4" / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"x")
    (folder / "latest").write_text("global_step4")
    mark_complete(folder)
    assert why_incomplete(folder) is None
    (folder / "latest").write_text("global_step8")
    assert why_incomplete(folder) == "latest: names a DeepSpeed folder that is missing"


def test_checkpoints_go_by_number_and_foreign_folders_do_not_count(tmp_path: Path) -> None:
    for step in (9, 100, 20):
        make(tmp_path, step)
    for foreign in ("checkpoint-best", "checkpoint-100-old", "checkpoint-0100", "final"):
        (tmp_path / foreign).mkdir()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-100", "checkpoint-20", "checkpoint-9"]


def test_none_good_is_refused_with_every_reason(tmp_path: Path) -> None:
    make(tmp_path, 4, marked=False)
    put("model.safetensors", bytes(16))(make(tmp_path, 8))
    with pytest.raises(CheckpointError) as caught:
        choose_resume(tmp_path, "auto")
    assert caught.value.exit_code == 2
    lines = str(caught.value).splitlines()
    assert lines[0] == f"training.resume: none of the checkpoints in '{tmp_path}' can be resumed from:"
    assert lines[1].startswith("  checkpoint-8: model.safetensors: is no safetensors file")
    assert lines[2] == "  checkpoint-4: no COMPLETE marker: saving did not come to its end"


def test_auto_starts_fresh_where_there_is_no_checkpoint(tmp_path: Path) -> None:
    assert choose_resume(tmp_path / "new", "auto") is None
    (tmp_path / "config.resolved.yaml").write_text("x")
    assert choose_resume(tmp_path, "auto") is None


def test_never_refuses_an_earlier_run(tmp_path: Path) -> None:
    assert choose_resume(tmp_path / "new", "never") is None
    (tmp_path / ".gitkeep").touch()
    assert choose_resume(tmp_path, "never") is None
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(CheckpointError, match=r"already holds metrics\.jsonl; choose another output_dir") as caught:
        choose_resume(tmp_path, "never")
    assert caught.value.exit_code == 2


def test_a_named_folder_is_taken_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    older, newer = make(tmp_path, 4), make(tmp_path, 8)
    assert choose_resume(tmp_path / "elsewhere", str(older)) == older
    assert choose_resume(tmp_path / "elsewhere", str(tmp_path)) == newer
    (older / "COMPLETE").unlink()
    assert choose_resume(tmp_path, str(older)) == older
    assert caplog.messages == [f"{older} has no COMPLETE marker; all its parts are readable, so it is used as asked"]
    (older / "optimizer.pt").unlink()
    with pytest.raises(CheckpointError, match="no optimizer state") as caught:
        choose_resume(tmp_path, str(older))
    assert caught.value.exit_code == 2


def test_a_named_folder_that_is_missing_names_its_neighbour(tmp_path: Path) -> None:
    make(tmp_path, 400)
    with pytest.raises(ConfigError) as caught:
        choose_resume(tmp_path, f"{tmp_path}/checkpoint_400")
    assert f"did you mean '{tmp_path}/checkpoint-400'?" in str(caught.value)


# ---------------------------------------------------------------- after saving


def test_a_sound_folder_passes(tmp_path: Path) -> None:
    tensors = {
        "a": torch.ones(2, 3, dtype=torch.bfloat16),
        "b": torch.tensor([65504.0], dtype=torch.float16),
        "c": torch.tensor([-1, 2]),
        "d": torch.tensor(3.0, dtype=torch.float64),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    check_saved(tmp_path, expected={"a": (2, 3), "d": ()})
    assert {name: entry.shape for name, entry in read_header(tmp_path / "model.safetensors").items()} == {
        "a": (2, 3),
        "b": (1,),
        "c": (2,),
        "d": (),
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_numbers_that_are_not_finite_are_counted(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    save_file({"w": torch.tensor([1.0, float(value), 2.0, float(value)], dtype=dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="tensor 'w' holds 2 NaN or infinite numbers"):
        check_saved(tmp_path)


def test_wrong_missing_and_empty_tensors_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        check_saved(tmp_path, expected={"a": (3,), "c": (1,)})
    assert str(caught.value) == (
        f"the folder just saved, '{tmp_path}', is not sound: model.safetensors: tensor 'b' is empty, shape (0,); "
        "tensor 'a' has shape (2,) instead of (3,); tensor 'c' is missing"
    )


def test_a_folder_without_weights_is_not_sound(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"it holds no \.safetensors file"):
        check_saved(tmp_path)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ((5).to_bytes(8, "little") + b"12345", "is no safetensors file (its header is not a mapping)"),
        ((5).to_bytes(8, "little") + b"{{{{{", "is no safetensors file (its header is not JSON)"),
        ((9).to_bytes(8, "little") + b'{"w": {}}', "describes tensor 'w' in a way that can't be read"),
        (
            (62).to_bytes(8, "little") + b'{"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}  ',
            "tensor 'w' takes 4 bytes where its shape needs 8",
        ),
    ],
)
def test_headers_that_lie(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(BadWeightsFile) as caught:
        read_header(tmp_path / "x.safetensors")
    assert str(caught.value) == reason


def test_import_needs_no_torch() -> None:
    heavy = "{'torch', 'transformers', 'numpy'}"
    code = f"import sys, sft_toolkit.checkpoints.checkpoint; print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
