"""The files of a run that are not checkpoints: resolved configuration, data report, manifest facts; what changed."""

from __future__ import annotations

import json
import logging
import platform
import subprocess
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml

from sft_toolkit._version import __version__
from sft_toolkit.checkpoint import finished
from sft_toolkit.config import RunConfig, load_config, resolved_yaml
from sft_toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

RESOLVED, REPORT = "config.resolved.yaml", "data_report.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "tokenizers", "numpy")

# Keys that a resumed run may change: they steer how long it goes on and what it tells, not the updates already made.
MAY_CHANGE = (
    "training.resume",
    "training.output_dir",
    "training.max_steps",
    "training.num_train_epochs",
    "training.logging_",
    "training.eval_",
    "training.save_",
    "training.load_best_model_at_end",
    "training.metric_for_best_model",
    "training.greater_is_better",
    "training.per_device_eval_batch_size",
    "training.dataloader_num_workers",
    "training.stop_after_nonfinite",
    "training.disable_tqdm",
    "training.report_to",
    "training.run_name",
    "training.push_to_hub",
    "training.hub_",
    "data.eval",
    "data.cache_dir",
    "lora.save_merged",
    "callbacks",
    "evaluation",
)


def open_output_dir(folder: Path) -> None:
    """Create the folder and prove that it can be written.

    Raises:
        ConfigError: it is a file.
        OSError: it can't be created or written (a full or read-only disk).
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"training.output_dir: '{folder}' is a file; name a folder")
    folder.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=folder, prefix=".writable-") as probe:  # a name of its own on every rank
        probe.write(b"x")
        probe.flush()


def already_finished(output_dir: Path, config: RunConfig) -> bool:
    """Whether this very run has ended well before: then there is nothing to do, and nothing is rewritten."""
    stored = output_dir / RESOLVED
    if config.training.get("resume", "auto") != "auto" or not finished(output_dir) or not stored.is_file():
        return False
    before = load_config(stored)
    asked = {key: value for key, value in config.training.items() if key != "resume"}
    same_training = all(before.training.get(key) == value for key, value in asked.items())
    sections = ("model", "data", "lora", "distributed", "callbacks", "evaluation")
    if not (same_training and all(getattr(before, s) == getattr(config, s) for s in sections)):
        return False
    logger.info(
        "%s: this run is finished; nothing to do (training.resume=never in a new folder starts anew)", output_dir
    )
    return True


def write_configuration(output_dir: Path, config: RunConfig, training: Mapping[str, Any]) -> None:
    """`config.resolved.yaml`: running it again is the same run."""
    (output_dir / RESOLVED).write_text(resolved_yaml(config, training), encoding="utf-8")


def write_report(output_dir: Path, report: Mapping[str, Any]) -> Path:
    """`data_report.json`; returns its path."""
    path = output_dir / REPORT
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def refuse_silent_changes(output_dir: Path, config: RunConfig, training: Mapping[str, Any]) -> None:
    """Compare with the configuration that the checkpoint was made under; log what is applied, refuse the rest.

    A checkpoint brings its optimizer and its schedule: a new learning rate beside them would be ignored.

    Raises:
        ConfigError: every changed key that a resumed run can't apply, with both values.
    """
    stored = output_dir / RESOLVED
    if not stored.is_file():
        return
    before = dict(_flat(yaml.safe_load(stored.read_text(encoding="utf-8"))))
    now = dict(_flat(yaml.safe_load(resolved_yaml(config, training))))
    changed = {
        key: (before.get(key), now.get(key)) for key in sorted({*before, *now}) if before.get(key) != now.get(key)
    }
    refused = {key: values for key, values in changed.items() if not key.startswith(MAY_CHANGE)}
    if refused:
        raise ConfigError(
            [
                f"{key}: was {old!r} when the checkpoint was made, is {new!r} now; a resumed run keeps the old value: "
                "set it back, or start anew in another training.output_dir"
                for key, (old, new) in refused.items()
            ]
        )
    for key, (old, new) in changed.items():
        logger.info("resuming with %s: %r instead of %r", key, new, old)


def facts() -> dict[str, Any]:
    """What `run.json` says about the environment: versions, platform, git commit of the working directory."""
    return {
        "sft_toolkit": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "versions": {name: found for name in PACKAGES if (found := _version_of(name))},
        "git_commit": _git_commit(),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
