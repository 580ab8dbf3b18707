"""Every strategy's memory beside the memory that is there: which fit, and the one to take."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from sft_toolkit.errors import ConfigError
from sft_toolkit.planning.memory import Memory, Setup, memory_of
from sft_toolkit.planning.shape import ModelShape

GIB = 2**30
# What the driver's context and the allocator's gaps take beside the tensors. A CPU process has its libraries instead.
RESERVE = 0.06
CONTEXT = GIB


@dataclass(frozen=True)
class Machine:
    """Bytes of one device and of one host, devices of all hosts together."""

    device_memory: int
    devices: int = 1
    host_memory: int = 0
    devices_per_node: int = 8
    on_cpu: bool = False


@dataclass(frozen=True)
class Candidate:
    """One strategy with its offload, on a machine."""

    setup: Setup
    memory: Memory
    all_activations: int  # bytes, without activation checkpointing
    fits: bool
    short_of: str  # "" where it fits, else "device" or "host"

    @property
    def name(self) -> str:
        """Such as `zero3 + optimizer and param on cpu`."""
        offload = (("optimizer", self.setup.offload_optimizer), ("param", self.setup.offload_param))
        parts = [part for part, on in offload if on]
        return f"{self.setup.strategy} + {' and '.join(parts)} on cpu" if parts else self.setup.strategy


def parse_size(text: str, option: str) -> int:
    """Bytes of `24GiB`, `24G`, `80 GB` (decimal) or a plain number of bytes.

    Raises:
        ConfigError: it is no size; names the option.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?)(B?))?", text.strip(), re.IGNORECASE)
    if found is None or float(found[1]) <= 0:
        raise ConfigError(f"{option}: '{text}' is no size; write 24GiB, 80GB or a number of bytes")
    power = " KMGT".index((found[2] or " ").upper())
    decimal = bool(found[4]) and not found[3]  # GB; a bare G is meant as GiB
    return int(float(found[1]) * (1000 if decimal else 1024) ** power)


def candidates(shape: ModelShape, setup: Setup, machine: Machine) -> list[Candidate]:
    """Every strategy that could run there, the fastest first."""
    return [_candidate(shape, choice, machine) for choice in _choices(setup, machine)]


def _choices(setup: Setup, machine: Machine) -> Iterator[Setup]:
    """From the least communication to the most; what moves over the host's bus comes last."""
    setup = replace(
        setup,
        devices=machine.devices,
        devices_per_node=min(machine.devices, machine.devices_per_node),
        on_cpu=machine.on_cpu,
        offload_optimizer=False,
        offload_param=False,
    )
    yield replace(setup, strategy="none" if machine.devices == 1 else "ddp")
    if machine.devices > 1:
        yield from (replace(setup, strategy=name) for name in ("zero1", "zero2"))
    if setup.quantize is not None:
        return  # packed weights are not shared out, and the little that is trained is not worth an offload
    if machine.devices > 1:
        yield replace(setup, strategy="zero3")
        if not machine.on_cpu:
            yield replace(setup, strategy="fsdp")
    if not machine.on_cpu:
        yield replace(setup, strategy="zero2", offload_optimizer=True)
        yield replace(setup, strategy="zero3", offload_optimizer=True)
        yield replace(setup, strategy="zero3", offload_optimizer=True, offload_param=True)


def _candidate(shape: ModelShape, setup: Setup, machine: Machine) -> Candidate:
    memory = memory_of(shape, setup)
    plain = memory_of(shape, replace(setup, checkpointing=False)).device["activations"]
    ranks = setup.devices_per_node if machine.on_cpu else 0  # ranks on a CPU share the memory of the host
    device = memory.per_device * (1 + RESERVE) + (0 if machine.on_cpu else CONTEXT)
    host = memory.per_host + ranks * memory.per_device
    lacks = "device" if device > machine.device_memory else "host" if 0 < machine.host_memory < host else ""
    return Candidate(setup, memory, plain, not lacks, lacks)


def recommended(found: Sequence[Candidate]) -> Candidate | None:
    """The first that fits: candidates come in the order of their speed."""
    return next((candidate for candidate in found if candidate.fits), None)
