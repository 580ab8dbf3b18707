"""The files of a run that are not checkpoints: resolved configuration, data report, manifest facts."""

from __future__ import annotations

import json
import platform
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

from sft_toolkit._version import __version__
from sft_toolkit.config import RunConfig, resolved_yaml
from sft_toolkit.errors import EXPECTED, ConfigError, DataError, OutOfMemoryError
from sft_toolkit.phases import leave_traceback, traceback_file
from sft_toolkit.running.out_of_memory import before_training, is_out_of_memory

RESOLVED, REPORT = "config.resolved.yaml", "data_report.json"
PACKAGES = ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "tokenizers", "numpy")


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


@contextmanager
def opened_output_dir(folder: Path) -> Iterator[None]:
    """`open_output_dir`; a folder that was made for a run whose configuration or data is wrong is taken away again."""
    is_new = not folder.exists()
    open_output_dir(folder)
    traceback_file(folder).unlink(missing_ok=True)  # of an earlier run
    try:
        yield
    except (ConfigError, DataError):
        if is_new:
            with suppress(OSError):  # not empty: something was written that may be worth keeping
                folder.rmdir()
        raise
    except Exception as error:
        if is_out_of_memory(error) and not isinstance(error, OutOfMemoryError):
            leave_traceback(error, folder)
            raise before_training(error) from error
        if not isinstance(error, EXPECTED):
            leave_traceback(error, folder)
        raise


def as_comment(settings: Mapping[str, Any]) -> str:
    """JSON behind `# `, so that what `check` prints stays one YAML document."""
    return "".join(f"# {line}\n" for line in json.dumps(settings, indent=2).splitlines())


def write_configuration(output_dir: Path, config: RunConfig, training: Mapping[str, Any]) -> None:
    """`config.resolved.yaml`: running it again is the same run."""
    (output_dir / RESOLVED).write_text(resolved_yaml(config, training), encoding="utf-8")


def write_report(output_dir: Path, report: Mapping[str, Any]) -> Path:
    """`data_report.json`; returns its path."""
    path = output_dir / REPORT
    path.write_text(json.dumps(report, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


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
