"""What an output folder already holds, and what a configuration asks for beside it: nothing, more, or another run.

A checkpoint brings its optimizer, its schedule and its place in the data. What is changed since is applied where it can
be, and refused by name where a resumed run would ignore it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from glob import glob
from pathlib import Path
from typing import Any

import yaml

from sft_toolkit.checkpoints.checkpoint import STATE, checkpoints
from sft_toolkit.config import RunConfig, resolved_yaml
from sft_toolkit.errors import CheckpointError, ConfigError
from sft_toolkit.running.files import RESOLVED

logger = logging.getLogger(__name__)

MANIFEST = "run.json"
# How long the run goes on, and what is written at its end: a finished run is taken up again for these.
TAKES_UP = (
    "training.max_steps",
    "training.num_train_epochs",
    "training.load_best_model_at_end",
    "lora.save_merged",
    "evaluation",
)
# What a run tells, keeps and measures on the way: applied from the checkpoint on, and of no effect behind the end.
ON_THE_WAY = (
    "training.logging_",
    "training.eval_",
    "training.save_",
    "training.async_save",
    "training.metric_for_best_model",
    "training.greater_is_better",
    "training.per_device_eval_batch_size",
    "training.prediction_loss_only",
    "training.batch_eval_metrics",
    "training.dataloader_num_workers",
    "training.dataloader_prefetch_factor",
    "training.dataloader_persistent_workers",
    "training.dataloader_pin_memory",
    "training.stop_after_nonfinite",
    "training.on_nonfinite",
    "training.disable_tqdm",
    "training.log_",
    "training.report_to",
    "training.run_name",
    "training.project",
    "training.trackio_",
    "training.push_to_hub",
    "training.hub_",
    "data.eval",
    "callbacks",
)
# Where things lie and how to go on: says nothing about the run itself.
NO_PART_OF_IT = ("training.resume", "training.output_dir", "data.cache_dir", "training.do_")

Changes = dict[str, tuple[Any, Any]]


def finished(output_dir: Path) -> bool:
    """Whether `run.json` says that the run came to its end, and what it made is still there."""
    return _manifest(output_dir).get("exit_state") == "finished" and (output_dir / "final").is_dir()


def as_asked(config: RunConfig) -> str:
    """Fingerprint of a configuration as the user wrote it, defaults left out: told apart without importing anything."""
    asked = _comparable(resolved_yaml(config))
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


def is_repeated(output_dir: Path, config: RunConfig) -> bool:
    """Whether this very configuration has been run to its end here."""
    if config.training.get("resume", "auto") != "auto" or not finished(output_dir):
        return False
    if _manifest(output_dir).get("asked_fingerprint") != as_asked(config):
        return False
    return _nothing_to_do(output_dir, config)


def leaves_nothing_to_do(output_dir: Path, config: RunConfig, training: Mapping[str, Any]) -> bool:
    """As `is_repeated`, by what both configurations come to: defaults filled in, paths resolved, values as numbers.

    Args:
        training: section `training` in full.

    Raises:
        ConfigError: another run was finished here; each changed key that going on can't apply.
        CheckpointError: more is asked of it, and it kept no checkpoint to go on from.
    """
    if config.training.get("resume", "auto") != "auto" or not finished(output_dir):
        return False
    changes = changes_since(output_dir, config, training)
    if changes is None:
        return False
    refuse(changes)
    taken_up = [key for key in changes if key.startswith(TAKES_UP)]
    if taken_up and not checkpoints(output_dir):
        raise CheckpointError(
            f"training.output_dir '{output_dir}' holds a finished run, which kept no checkpoint to go on from; "
            f"{', '.join(taken_up)} can't be changed any more: start anew in another training.output_dir",
            exit_code=2,
        )
    if taken_up:
        return False
    for key, (old, new) in changes.items():
        logger.info("%s: %r instead of %r changes nothing about a finished run", key, new, old)
    return _nothing_to_do(output_dir, config)


def _nothing_to_do(output_dir: Path, config: RunConfig) -> bool:
    logger.info(
        "%s: this run is finished; nothing to do (training.resume=never in a new folder starts anew)", output_dir
    )
    for file in _written_since(output_dir, config):
        logger.warning(
            "data.train: %s was written after this run had begun, which knows the file as it was before; to train on "
            "what it says now, start anew in another training.output_dir",
            file,
        )
    return True


def _written_since(output_dir: Path, config: RunConfig) -> list[Path]:
    """Training files that are younger than the start of a run, told without reading them."""
    try:
        started = datetime.fromisoformat(_manifest(output_dir)["started_at"]).timestamp() + 1  # it has whole seconds
    except (KeyError, TypeError, ValueError):
        return []
    named = [source.path for source in config.data.train]
    files = [Path(path) for name in named for path in (sorted(glob(name, recursive=True)) or [name])]
    return [file for file in files if file.is_file() and file.stat().st_mtime > started]


# ---- Going on from a checkpoint --------------------------------------------------------------------------------------


def refuse_silent_changes(output_dir: Path, config: RunConfig, training: Mapping[str, Any], checkpoint: Path) -> None:
    """Compare with the configuration that the checkpoint was made under; log what is applied, refuse the rest.

    Raises:
        ConfigError: every changed key that a resumed run can't apply, with both values; an end that lies behind.
    """
    source = checkpoint.parent if (checkpoint.parent / RESOLVED).is_file() else output_dir
    changes = changes_since(source, config, training) or {}
    refuse(changes)
    _refuse_an_end_that_is_past(checkpoint, training)
    for key, (old, new) in changes.items():
        logger.info("resuming with %s: %r instead of %r", key, new, old)


def refuse_other_rows(output_dir: Path, checkpoint: Path, digest: Callable[[], str]) -> None:
    """Compare with the rows that the checkpoint was trained on, where its run wrote them down.

    Raises:
        ConfigError: the same configuration, but other rows: a file was changed.
    """
    before = (_manifest(checkpoint.parent) or _manifest(output_dir)).get("train_rows")
    if before is not None and before != digest():
        raise ConfigError(
            f"data.train: its rows are not those that '{checkpoint}' was trained on (a file was changed since); going "
            "on would repeat some and never see others: put the old ones back, or start anew in another "
            "training.output_dir"
        )


def changes_since(output_dir: Path, config: RunConfig, training: Mapping[str, Any]) -> Changes | None:
    """{key: (value then, value now)} against `config.resolved.yaml`; None where there is none that can be read."""
    try:
        before = _comparable((output_dir / RESOLVED).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError):
        return None
    now = _comparable(resolved_yaml(config, training))
    return {key: (before.get(key), now.get(key)) for key in sorted({*before, *now}) if before.get(key) != now.get(key)}


def refuse(changes: Changes) -> None:
    """Raise ConfigError for the changes that can't be applied to a run that has begun."""
    refused = {key: values for key, values in changes.items() if not key.startswith((*TAKES_UP, *ON_THE_WAY))}
    if refused:
        raise ConfigError(
            [
                f"{key}: was {old!r} when the checkpoint was made, is {new!r} now; a resumed run keeps the old value: "
                "set it back, or start anew in another training.output_dir"
                for key, (old, new) in refused.items()
            ]
        )


@dataclass(frozen=True)
class _Progress:
    step: int
    epoch: float


def _refuse_an_end_that_is_past(checkpoint: Path, training: Mapping[str, Any]) -> None:
    reached = _progress(checkpoint)
    max_steps, epochs = int(training.get("max_steps", -1)), float(training.get("num_train_epochs", 3.0))
    if reached is None:
        return
    if 0 < max_steps < reached.step:
        raise ConfigError(
            f"training.max_steps: {max_steps} ends before '{checkpoint}', which is at step {reached.step}; name an "
            "earlier checkpoint with training.resume, or start anew in another training.output_dir"
        )
    if max_steps < 1 and epochs < reached.epoch - 1e-6:
        raise ConfigError(
            f"training.num_train_epochs: {epochs} ends before '{checkpoint}', which is at epoch {reached.epoch:.2f}; "
            "name an earlier checkpoint with training.resume, or start anew in another training.output_dir"
        )


def _progress(checkpoint: Path) -> _Progress | None:
    try:
        state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
        return _Progress(int(state["global_step"]), float(state.get("epoch") or 0.0))
    except (OSError, ValueError, KeyError, TypeError):
        return None


# ---- Two configurations, made comparable -----------------------------------------------------------------------------


def _manifest(output_dir: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((output_dir / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _comparable(text: str) -> dict[str, Any]:
    return {
        key: _plain(value)
        for key, value in _flat(yaml.safe_load(text))
        if not key.startswith(NO_PART_OF_IT) and _says_something(value)
    }


def _says_something(value: Any) -> bool:
    return value is not None and value != {} and value != []


def _plain(value: Any) -> Any:
    """Paths resolved, so that `./data` and `~/project/data` are one; numbers by value (1 is 1.0, true is not)."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, str) and value and "\0" not in value:
        expanded = os.path.expanduser(value)
        return os.path.realpath(expanded) if os.path.exists(expanded) else value
    return value


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
