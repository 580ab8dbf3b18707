"""`plan`: a configuration and a machine -> the memory of every strategy there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sft_toolkit.planning.memory import Setup
from sft_toolkit.planning.plan import Candidate, Machine, candidates, parse_size, recommended
from sft_toolkit.planning.setup import setup_of
from sft_toolkit.planning.shape import ModelShape, shape_from
from sft_toolkit.planning.words import as_json, table

if TYPE_CHECKING:
    from sft_toolkit.config import RunConfig
    from sft_toolkit.training_args import SFTArguments


@dataclass(frozen=True)
class Asked:
    """The machine as the command line names it; None is what this machine has."""

    device_memory: str | None = None
    devices: int | None = None
    host_memory: str | None = None
    devices_per_node: int = 8


@dataclass(frozen=True)
class Plan:
    """What `plan` found."""

    shape: ModelShape
    setup: Setup
    machine: Machine
    candidates: list[Candidate]

    @property
    def fits(self) -> bool:
        """Whether any strategy does."""
        return recommended(self.candidates) is not None

    def in_words(self) -> str:
        """A table and the recommended YAML."""
        return table(self.shape, self.setup, self.machine, self.candidates)

    def in_json(self) -> str:
        """One object; sizes in bytes."""
        return as_json(self.shape, self.machine, self.candidates)


def plan_run(config: RunConfig, args: SFTArguments, asked: Asked) -> Plan:
    """Read the model's configuration, never its weights, and add up.

    Args:
        args: the arguments of `config`, checked.

    Raises:
        ConfigError: a size that is none, or no such model.
    """
    machine = machine_of(asked, config.distributed.num_processes)
    shape = shape_from(config.model, config.lora)
    precision, quantize = _precision(config.training, args, machine), config.model.quantize
    setup = setup_of(args, shape, on_cpu=machine.on_cpu, precision=precision, quantize=quantize)
    return Plan(shape, setup, machine, candidates(shape, setup, machine))


def machine_of(asked: Asked, num_processes: int | None = None) -> Machine:
    """The machine that was named, its gaps filled with what is here."""
    here = None if asked.device_memory else _accelerator()
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    on_cpu = not asked.device_memory and here is None
    memory = parse_size(asked.device_memory, "--device-memory") if asked.device_memory else here[0] if here else host
    known_host = 0 if asked.device_memory else host
    return Machine(
        device_memory=memory,
        devices=asked.devices or num_processes or (here[1] if here else 1),
        host_memory=parse_size(asked.host_memory, "--host-memory") if asked.host_memory else known_host,
        devices_per_node=asked.devices_per_node,
        on_cpu=on_cpu,
    )


def _accelerator() -> tuple[int, int] | None:
    """Bytes of a device, and how many there are."""
    import torch

    if not torch.cuda.is_available():
        return None
    return torch.cuda.get_device_properties(0).total_memory, torch.cuda.device_count()


def _precision(training: dict[str, Any], args: SFTArguments, machine: Machine) -> str:
    """What was asked for; what was left open is chosen for the machine that is planned for, not for this one."""
    asked = training.get("precision", "auto") != "auto" or any(name in training for name in ("bf16", "fp16"))
    return str(args.precision) if asked or machine.on_cpu else "bf16"
