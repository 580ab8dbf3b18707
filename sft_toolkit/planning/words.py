"""A plan for people: a table, the recommended section of the YAML; and for programs: JSON in bytes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from sft_toolkit.planning.memory import PARTS, Setup
from sft_toolkit.planning.plan import GIB, RESERVE, Candidate, Machine, recommended
from sft_toolkit.planning.shape import ModelShape


def table(shape: ModelShape, setup: Setup, machine: Machine, found: Sequence[Candidate]) -> str:
    """The whole answer of `plan`, for a terminal."""
    share = 100 * shape.trainable / max(1, shape.total)
    host = f", {in_gib(machine.host_memory)} on each host" if machine.host_memory else ""
    others = "" if machine.on_cpu else " and 1 GiB to the driver"
    checkpointed = "on" if setup.checkpointing else "off"
    return "\n".join(
        [
            f"parameters  {shape.total:,}, {shape.trainable:,} trained ({share:.2f} %)",
            f"machine     {machine.devices} x {in_gib(machine.device_memory)}{host}",
            f"batch       {setup.micro_batch} x {setup.max_length} tokens on a device, in {16 if setup.narrow else 32} "
            f"bits, {setup.optim}",
            "",
            f"{'GiB on each device':31}{''.join(f'{part:>13}' for part in PARTS)}{'peak':>9}{'host':>9}",
            *(_row(candidate) for candidate in found),
            "",
            f"Activation checkpointing is {checkpointed}; without it activations take "
            f"{in_gib(found[0].all_activations)} under {found[0].setup.strategy}.",
            f"The peak is less than the sum: gradients come while activations go. {RESERVE:.0%} of it are left to the "
            f"allocator{others}.",
            "",
            advice(found),
        ]
    )


def _row(candidate: Candidate) -> str:
    memory = candidate.memory
    cells = "".join(f"{_gib(memory.device[part]):>13}" for part in PARTS)
    verdict = "fits" if candidate.fits else f"too much for the {candidate.short_of}"
    return f"{candidate.name:31}{cells}{_gib(memory.per_device):>9}{_gib(memory.per_host):>9}  {verdict}"


def advice(found: Sequence[Candidate]) -> str:
    """The recommended section `distributed`, or what would make it fit."""
    best = recommended(found)
    if best is None:
        return _nothing_fits(found)
    setup = best.setup
    offload = (("offload_optimizer", setup.offload_optimizer), ("offload_param", setup.offload_param))
    keys = [f"strategy: {setup.strategy}", *(f"{key}: cpu" for key, on in offload if on)]
    keys += [f"num_processes: {setup.devices}"] if setup.devices > 1 else []
    return f"Recommended, the fastest that fits:\n\ndistributed: {{{', '.join(keys)}}}"


def _nothing_fits(found: Sequence[Candidate]) -> str:
    for_host = [candidate for candidate in found if candidate.short_of == "host"]
    if for_host:
        least = min(for_host, key=lambda candidate: candidate.memory.per_host)
        return (
            f"Nothing fits: {least.name} fits the devices and needs {in_gib(least.memory.per_host)} on each host. Ways "
            "out: more devices, an adapter (section lora), distributed.offload_optimizer: nvme"
        )
    least = min(found, key=lambda candidate: candidate.memory.per_device)
    largest = max(least.memory.device, key=lambda part: least.memory.device[part])
    ways = {
        "activations": "lower data.max_length or training.per_device_train_batch_size",
        "logits": "lower training.loss_chunk",
    }.get(largest, "more devices, or an adapter (section lora)")
    return (
        f"Nothing fits: the smallest is {least.name} with {in_gib(least.memory.per_device)} on each device, most of it "
        f"{largest}. Ways out: {ways}"
    )


def as_json(shape: ModelShape, machine: Machine, found: Sequence[Candidate]) -> str:
    """The same in bytes."""
    best = recommended(found)
    entries = [
        {
            "strategy": candidate.setup.strategy,
            "offload_optimizer": candidate.setup.offload_optimizer,
            "offload_param": candidate.setup.offload_param,
            "device": candidate.memory.device,
            "device_peak": candidate.memory.per_device,
            "activations_without_checkpointing": candidate.all_activations,
            "host": candidate.memory.host,
            "host_peak": candidate.memory.per_host,
            "fits": candidate.fits,
            "short_of": candidate.short_of,
            "recommended": candidate is best,
        }
        for candidate in found
    ]
    return json.dumps({"model": asdict(shape), "machine": asdict(machine), "strategies": entries}, indent=2)


def in_gib(size: int) -> str:
    """`23.9 GiB`; below 0.1 GiB in MiB."""
    return f"{size / GIB:.1f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f}"
