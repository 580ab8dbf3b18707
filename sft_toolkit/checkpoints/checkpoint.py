"""Is a checkpoint whole, which one to resume from, and does a saved folder hold what it should?

A checkpoint is whole when its weights, optimizer state and `trainer_state.json` can be read, its weights are finite and
all its files are those that its `COMPLETE` marker lists. Imports no torch: `check` and the tests of a cluster job stay
instant.
"""

from __future__ import annotations

import json
import logging
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path

from sft_toolkit.checkpoints.marker import MARKER, differences, files_of, unreadable_marker
from sft_toolkit.checkpoints.weights_file import BadWeightsFile, TensorEntry, count_non_finite, read_header
from sft_toolkit.errors import CheckpointError, ConfigError
from sft_toolkit.hints import missing

STATE = "trainer_state.json"
CHECKPOINT = re.compile(r"checkpoint-(0|[1-9][0-9]*)")  # as Trainer writes it: checkpoint-01 is foreign
logger = logging.getLogger(__name__)


# ---------------------------------------------------------------- whole or not


def why_incomplete(folder: Path, *, contents: bool = True) -> str | None:
    """Why a run can't be resumed from this folder, in one line; None when it can.

    Args:
        contents: read every file once, for its checksum, and the weights once more, for NaN: 2 to 4 GB a second from
            memory, and the files that a resume is about to read anyway. Without it, names, sizes and headers only.
    """
    problems = _broken_parts(folder, contents)
    if folder.is_dir() and (reason := unreadable_marker(folder)):
        problems.append(reason)
    return "; ".join(problems) or None


def _broken_parts(folder: Path, contents: bool) -> list[str]:
    if not folder.is_dir():
        return ["not a folder"]
    problems = [*_bad_weights(folder), *_bad_optimizer(folder), *_bad_state(folder)]
    said = " ".join(problems)
    problems += [line for line in differences(folder, contents=contents) if line.split(":")[0] not in said]
    return problems or (_not_finite(folder) if contents else [])


def _sharded_state(folder: Path) -> list[Path]:
    """Folders in which DeepSpeed (`global_step10`) or FSDP keep weights or optimizer, one file per rank."""
    names = ("global_step*", "pytorch_model_fsdp*", "optimizer_*")
    return [p for name in names for p in folder.glob(name) if p.is_dir() and any(f.stat().st_size for f in files_of(p))]


def _bad_weights(folder: Path) -> list[str]:
    files = sorted(folder.glob("*.safetensors"))
    problems = [f"{path.name}: {reason}" for path in files if (reason := _unreadable(path))]
    problems += [f"{name}: is missing" for name in _missing_shards(folder)]
    if not files and not problems and not any(folder.glob("pytorch_model*.bin")) and not _sharded_state(folder):
        problems.append("no weights (model.safetensors or adapter_model.safetensors)")
    return problems


def _unreadable(path: Path) -> str | None:
    try:
        read_header(path)
    except BadWeightsFile as error:
        return str(error)
    return None


def _missing_shards(folder: Path) -> list[str]:
    missing: list[str] = []
    for index in sorted(folder.glob("*.safetensors.index.json")):
        try:
            shards = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            missing.append(f"a readable {index.name}")
            continue
        missing += sorted(name for name in shards if not (folder / name).is_file())
    return missing


def _bad_optimizer(folder: Path) -> list[str]:
    files = [folder / name for name in ("optimizer.pt", "optimizer.bin", "scheduler.pt") if (folder / name).is_file()]
    # torch.save writes a zip archive, whose directory stands at its end: a cut or zeroed one is no zip.
    problems = [f"{path.name}: is cut or no torch file" for path in files if not zipfile.is_zipfile(path)]
    if not any(path.stem == "optimizer" for path in files) and not _sharded_state(folder):
        problems.append("no optimizer state (optimizer.pt); it was never written, or saved with save_only_model")
    latest = folder / "latest"
    if latest.is_file() and not (folder / latest.read_text(encoding="utf-8", errors="replace").strip()).is_dir():
        problems.append("latest: names a DeepSpeed folder that is missing")
    return problems


def _bad_state(folder: Path) -> list[str]:
    path = folder / STATE
    if not path.is_file():
        return [f"no {STATE}"]
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return [f"{STATE}: is empty or not JSON ({path.stat().st_size} bytes)"]
    if not isinstance(state, dict) or not isinstance(state.get("global_step"), int):
        return [f"{STATE}: holds no global_step"]
    return []


def _not_finite(folder: Path) -> list[str]:
    """Weights that hold NaN or infinity: a run that goes on from them has learned nothing and will learn nothing."""
    return [
        line
        for path in sorted(folder.glob("*.safetensors"))
        for name, entry in read_header(path).items()
        if entry.elements and (line := _bad_tensor(path, name, entry))
    ]


# ---------------------------------------------------------------- which one to resume from


def checkpoints(output_dir: Path) -> list[Path]:
    """Folders `checkpoint-N`, the highest N first; anything else is foreign."""
    if not output_dir.is_dir():
        return []
    found = [p for p in output_dir.iterdir() if CHECKPOINT.fullmatch(p.name) and p.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def step_of(folder: Path) -> int:
    """The N of a folder `checkpoint-N`: how many updates it has behind it."""
    return int(folder.name.rpartition("-")[2])


def newest_good(output_dir: Path) -> tuple[Path | None, list[tuple[Path, str]]]:
    """The newest whole checkpoint, and the newer ones that were passed over, each with its reason."""
    skipped: list[tuple[Path, str]] = []
    for folder in checkpoints(output_dir):
        reason = why_incomplete(folder)
        if reason is None:
            return folder, skipped
        skipped.append((folder, reason))
    return None, skipped


def choose_resume(output_dir: Path, resume: str) -> Path | None:
    """The checkpoint to continue from; None for a fresh start. Ask before anything is written to `output_dir`.

    Args:
        resume: `auto` takes the newest whole checkpoint, or none where there is none at all; `never` wants an empty
            `output_dir`; anything else is a checkpoint folder (or an output folder: its newest whole one).

    Raises:
        CheckpointError: exit code 2; checkpoints exist and none is whole, or `never` meets an earlier run.
        ConfigError: the folder named does not exist.
    """
    if resume == "never":
        _refuse_earlier_run(output_dir)
        return None
    if resume == "auto":
        return _newest_or_refuse(output_dir)
    return _named(Path(resume))


def _refuse_earlier_run(output_dir: Path) -> None:
    held = sorted(p.name for p in output_dir.iterdir() if p.name[0] != ".") if output_dir.is_dir() else []
    if held:
        shown = ", ".join(held[:5]) + (", ..." if len(held) > 5 else "")
        raise CheckpointError(
            f"training.resume: never starts a new run, but training.output_dir '{output_dir}' already holds {shown}; "
            "choose another output_dir, empty this one, or use training.resume=auto",
            exit_code=2,
        )


def _newest_or_refuse(output_dir: Path) -> Path | None:
    good, skipped = newest_good(output_dir)
    if good is None and skipped:
        raise CheckpointError(
            f"training.resume: none of the checkpoints in '{output_dir}' can be resumed from:\n"
            + "\n".join(f"  {folder.name}: {reason}" for folder, reason in skipped)
            + "\nname a checkpoint with training.resume=DIR, or start anew in another training.output_dir",
            exit_code=2,
        )
    for folder, reason in skipped:
        logger.warning("%s is skipped: %s", folder, reason)
    return good


def _named(folder: Path) -> Path:
    if not folder.is_dir():
        raise ConfigError(f"training.resume: '{folder}' (auto, never or a checkpoint folder): {missing(str(folder))}")
    if checkpoints(folder) and not (folder / STATE).exists():
        return _newest_or_refuse(folder) or folder
    problems = _broken_parts(folder, contents=True)
    if problems:
        raise CheckpointError(f"training.resume: '{folder}' can't be resumed from: {'; '.join(problems)}", exit_code=2)
    if not (folder / MARKER).is_file():
        # Whoever names a folder may name one of the stock Trainer, which writes no marker.
        logger.warning("%s has no %s marker; all its parts are readable, so it is used as asked", folder, MARKER)
    return folder


# ---------------------------------------------------------------- after saving


def check_saved(folder: Path, expected: Mapping[str, tuple[int, ...]] | None = None) -> None:
    """Re-open every safetensors file of a saved folder: names, shapes and finite numbers.

    Args:
        expected: full shapes by tensor name; without it, only empty tensors (a ZeRO-3 shard saved in place of the
            whole) count as a wrong shape.

    Raises:
        CheckpointError: names every tensor and file that is not as it should be.
    """
    files = sorted(folder.glob("*.safetensors"))
    problems = [f"{name}: is missing" for name in _missing_shards(folder)]
    if not files:
        problems.append("it holds no .safetensors file")
    tensors: dict[str, TensorEntry] = {}
    for path in files:
        try:
            entries = read_header(path)
            problems += [line for name, entry in entries.items() if (line := _bad_tensor(path, name, entry))]
        except BadWeightsFile as error:
            problems.append(f"{path.name}: {error}")
            continue
        tensors |= entries
    for name, shape in (expected or {}).items():
        if name not in tensors:
            problems.append(f"tensor '{name}' is missing")
        elif tensors[name].shape != tuple(shape):
            problems.append(f"tensor '{name}' has shape {tensors[name].shape} instead of {tuple(shape)}")
    if problems:
        raise CheckpointError(f"the folder just saved, '{folder}', is not sound: " + "; ".join(problems))


def _bad_tensor(path: Path, name: str, entry: TensorEntry) -> str | None:
    if not entry.elements:
        return f"{path.name}: tensor '{name}' is empty, shape {entry.shape}"
    if count := count_non_finite(path, entry):
        return f"{path.name}: tensor '{name}' holds {count} NaN or infinite numbers"
    return None
