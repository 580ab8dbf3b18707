"""All checks, in the order of their cost."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from sft_toolkit.doctor.building import check_building
from sft_toolkit.doctor.finding import Finding
from sft_toolkit.doctor.machine import check_devices, check_disks, check_limits
from sft_toolkit.doctor.network import check_collective, check_network
from sft_toolkit.doctor.packages import check_packages


def examine(
    env: Mapping[str, str], config: str | None = None, overrides: Sequence[str] = (), ranks: int = 2
) -> Iterator[Finding]:
    """What `doctor` says, finding by finding, so that a terminal shows them as they come.

    Args:
        config: a run's configuration; its output_dir and the size of its checkpoints are looked at.
        ranks: processes of the all-reduce; 0 leaves it out.

    Raises:
        ConfigError: the configuration is wrong.
    """
    output_dir, checkpoint = _of_run(config, overrides)
    yield from check_packages()
    yield from check_devices()
    yield from check_building(env)
    yield from check_limits(env)
    yield from check_disks(output_dir, checkpoint)
    yield from check_network(env)
    if ranks:
        yield from check_collective(ranks, env)


def _of_run(config: str | None, overrides: Sequence[str]) -> tuple[Path, int]:
    """Where a run writes, and the bytes of one of its checkpoints: weights, and two moments of what is trained."""
    if config is None:
        return Path("."), 0
    from sft_toolkit.config import load_config
    from sft_toolkit.planning.shape import shape_from

    checked = load_config(config, overrides)
    shape = shape_from(checked.model, checked.lora)
    weights = shape.trainable if checked.lora else shape.total
    return Path(checked.training["output_dir"]), 4 * weights + 8 * shape.trainable


def as_json(findings: Sequence[Finding]) -> str:
    """A list of objects `{"level", "topic", "text", "remedy"}`."""
    return json.dumps([asdict(finding) for finding in findings], indent=2)
