"""Versions, and those that clash: every package of the stack against what the others of it require."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata

from sft_toolkit.doctor.finding import Finding

STACK = ("torch", "transformers", "accelerate", "peft", "datasets", "deepspeed", "tokenizers", "safetensors", "numpy")
OURS = "sft-toolkit"


def check_packages() -> Iterator[Finding]:
    """Versions of the stack, and what of it does not go together."""
    found = {name: version for name in STACK if (version := _version(name))}
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.platform()}")
    yield Finding("ok", "packages", ", ".join(f"{name} {version}" for name, version in found.items()))
    if "deepspeed" not in found:
        yield Finding("note", "packages", "DeepSpeed is not installed", "pip install 'sft-toolkit[deepspeed]' for ZeRO")
    for owner in (OURS, *found):
        yield from _clashes(owner)


def _clashes(owner: str) -> Iterator[Finding]:
    from packaging.requirements import Requirement  # accelerate and transformers need it: it is there

    for line in _requires(owner):
        requirement = Requirement(line)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None:
            yield Finding("bad", "packages", f"{owner} needs {requirement.name}", f"pip install '{line}'")
        elif not requirement.specifier.contains(version, prereleases=True):
            wanted = f"{requirement.name}{requirement.specifier}"
            yield Finding("bad", "packages", f"{owner} needs {wanted}, found {version}", f"pip install '{wanted}'")


def _requires(name: str) -> list[str]:
    try:
        return metadata.requires(name) or []
    except metadata.PackageNotFoundError:  # run from a checkout that is not installed
        return []


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
