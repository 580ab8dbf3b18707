"""`SFTArguments`: TrainingArguments of transformers with our fields. From a configuration: `run_args.py`.

Where a default differs from that of transformers, the field or the method that sets it says why.
"""

from __future__ import annotations

import copy
import logging
import os
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from sft_toolkit.args import TRAINING_LIMITS, PreparationArguments, TrainingExtras
from sft_toolkit.engines.deepspeed_config import settings_of
from sft_toolkit.engines.distributed import join_after_restart, start_process_group
from sft_toolkit.engines.environment import environment_kept, without_variable
from sft_toolkit.errors import ConfigError
from sft_toolkit.keywords import KnownKeywords
from sft_toolkit.knobs import knob
from sft_toolkit.limits import beyond, problems_in
from sft_toolkit.precision import Choice, choose, current_device

logger = logging.getLogger(__name__)

# The variables by which accelerate learns of its launcher's world size.
_WORLD_SIZE = ("WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE")
_TRUE = ("1", "true", "yes", "on", "y", "t")


# repr=False keeps TrainingArguments' own, which hides tokens.
@dataclass(repr=False)
class SFTArguments(TrainingExtras, PreparationArguments, TrainingArguments, KnownKeywords):
    """`transformers.TrainingArguments` (positional order and all) with the fields of this toolkit.

    Defaults that differ: activation checkpointing is on (non-reentrant), the precision is chosen for the device, the
    CPU is used where there is nothing else, losses are logged every 10 steps and never filtered.

    Raises:
        ConfigError: a value outside its limits, or arguments that contradict each other.
        ValueError: what TrainingArguments itself refuses.
    """

    # None is "not given": an explicit false asks for fp32, and must not be overruled by precision: auto.
    bf16: bool = field(default=None, metadata={"help": "Mixed precision in bf16; see precision."})  # type: ignore[assignment]
    fp16: bool = field(default=None, metadata={"help": "Mixed precision in fp16; see precision."})  # type: ignore[assignment]
    # 500 steps are longer than many fine-tunes.
    logging_steps: float = field(default=10, metadata={"help": "Updates between two log events."})
    # The filter replaces a NaN by the running mean: divergence looks like a flat curve. It also costs a
    # synchronisation each micro-batch.
    logging_nan_inf_filter: bool = field(default=False, metadata={"help": "Hide NaN and infinite losses."})
    zero_stage: int | None = knob(None, "Builds a DeepSpeed configuration of this ZeRO stage (1, 2, 3).")
    offload_optimizer: bool | str = knob(False, "Where ZeRO keeps the optimizer state: true is 'cpu', or 'nvme'.")
    offload_param: bool | str = knob(False, "Where ZeRO-3 keeps the parameters: true is 'cpu', or 'nvme'.")
    nvme_path: str | None = knob(None, "Folder on a local NVMe disk, for offload to nvme.")

    def __post_init__(self) -> None:
        self._settle()
        join_after_restart(self.use_cpu, self.ddp_backend, self.ddp_timeout, os.environ)
        # transformers and accelerate leave variables that would turn the next run of this process into one of ours;
        # accelerate refuses the fields of its own file beside settings, and those fields are in `deepspeed` by now.
        with environment_kept(), without_variable("ACCELERATE_CONFIG_DS_FIELDS"):
            super().__post_init__()  # type: ignore[no-untyped-call]
        self._check_world()
        if self.deepspeed and "RANK" in os.environ:
            # The user's own from_pretrained may come next, and under ZeRO-3 it takes the model apart.
            start_process_group(self)

    def __getstate__(self) -> dict[str, Any]:
        # Trainer pickles its arguments into every checkpoint (training_args.bin): no secret may lie there.
        return {**self.__dict__, "hub_token": None}

    def __copy__(self) -> SFTArguments:
        return self._twin(dict(self.__dict__))

    def __deepcopy__(self, memo: dict[int, Any]) -> SFTArguments:
        return self._twin(copy.deepcopy(self.__dict__, memo))

    def _twin(self, values: dict[str, Any]) -> SFTArguments:
        twin = type(self).__new__(type(self))
        twin.__dict__.update(values)
        return twin

    def _settle(self) -> None:
        """What this class decides, before TrainingArguments starts devices and the process group."""
        self._check_values()
        self._use_what_is_there()
        self._checkpoint_activations()
        self._choose_engine()
        self._compute_accumulation()

    def _check_values(self) -> None:
        problems = problems_in(self, TrainingExtras, PreparationArguments)
        for name, limits in TRAINING_LIMITS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, Real):
                problems.append(f"{name}: expected a number, not {value!r}")
            elif reason := beyond(value, limits):
                problems.append(f"{name}: {reason}")
        if self.max_steps == 0:
            problems.append("max_steps: 0 trains nothing; leave it out to go by num_train_epochs")
        if problems:
            raise ConfigError(problems)

    def _use_what_is_there(self) -> None:
        # Without use_cpu on a machine that has only a CPU, each of several ranks believes that it is alone.
        device = current_device(self.use_cpu or os.environ.get("ACCELERATE_USE_CPU", "").lower() in _TRUE)
        self.use_cpu = device.kind == "cpu"
        if self.use_cpu and processes_started() == 1:
            # Accelerate takes a named backend on the CPU for a group, and fails where none was started.
            self.ddp_backend = None
        launcher = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        choice = choose(self.precision, self.bf16, self.fp16, launcher, device)
        self.precision, self.bf16, self.fp16 = choice.name, choice.name == "bf16", choice.name == "fp16"
        self._say_precision(choice)

    def _say_precision(self, choice: Choice) -> None:
        if os.environ.get("RANK", "0") == "0":
            level = logging.WARNING if choice.is_notice else logging.INFO
            logger.log(level, "precision: %s (%s)", choice.name, choice.reason)

    def _checkpoint_activations(self) -> None:
        # On by default: one more forward a step, and only one layer's activations are kept, so that long rows fit
        # wherever the model does. Non-reentrant: correct with frozen inputs (LoRA) and under DDP.
        given = (
            self.activation_checkpointing if self.activation_checkpointing is not None else self.gradient_checkpointing
        )
        if given is None:
            self.activation_checkpointing = given = True
        options = self.activation_checkpointing_kwargs or self.gradient_checkpointing_kwargs or {}
        if given and isinstance(options, dict):
            self.activation_checkpointing_kwargs = {"use_reentrant": False, **options}

    def _choose_engine(self) -> None:
        self.deepspeed = settings_of(self, os.environ)
        if self.deepspeed is None:
            # Arguments of an earlier ZeRO-3 run that are still alive would take the next model apart as well.
            unset_hf_deepspeed_config()  # type: ignore[no-untyped-call]

    def _compute_accumulation(self) -> None:
        if self.global_batch_size is None:
            return
        if self.auto_find_batch_size:
            raise ConfigError(
                "global_batch_size contradicts auto_find_batch_size, which changes the batch of an update"
            )
        steps = accumulation_steps(self.global_batch_size, self.per_device_train_batch_size, self._expected_replicas())
        if self.gradient_accumulation_steps not in (1, steps):
            raise ConfigError(
                f"gradient_accumulation_steps: {self.gradient_accumulation_steps} contradicts global_batch_size: "
                f"{self.global_batch_size}, which takes {steps}; keep one of them"
            )
        self.gradient_accumulation_steps = steps

    def _expected_replicas(self) -> int:
        """Copies of the model that see different rows; asked before the process group starts, since DeepSpeed's
        settings hold the product."""
        started = processes_started()
        if started == 1 and not self.use_cpu and not self.deepspeed:
            # One process that sees several GPUs feeds them all (DataParallel).
            started = max(1, torch.cuda.device_count())
        return started // self._model_parallel_size()

    def _model_parallel_size(self) -> int:
        return 1 if self.parallelism_config is None else int(self.parallelism_config.non_data_parallel_size)

    def _check_world(self) -> None:
        if self.global_batch_size is None:
            return
        replicas = self.world_size * max(1, self.n_gpu) // self._model_parallel_size()
        rows = self.per_device_train_batch_size * self.gradient_accumulation_steps * replicas
        if rows != self.global_batch_size:
            raise ConfigError(
                f"global_batch_size: {self.global_batch_size} was planned for another number of processes than the "
                f"{self.world_size} that run; set gradient_accumulation_steps instead"
            )


def processes_started() -> int:
    """The world size by the group that exists, else by what the launcher says."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    name = next((name for name in _WORLD_SIZE if os.environ.get(name)), None)
    if name is not None and not os.environ[name].isdigit():
        raise ConfigError(f"{name}={os.environ[name]} in the environment is no whole number")
    return 1 if name is None else int(os.environ[name])


def accumulation_steps(global_batch_size: int, per_device: int, replicas: int) -> int:
    """Micro-batches of one update: `global_batch_size / (per_device * replicas)`.

    Raises:
        ConfigError: the division leaves a rest; names the nearest sizes that don't.
    """
    at_once = per_device * replicas
    steps, rest = divmod(global_batch_size, at_once)
    if rest == 0:
        return steps
    nearest = [size for size in (steps * at_once, (steps + 1) * at_once) if size > 0]
    processes = "process" if replicas == 1 else "processes"
    raise ConfigError(
        f"global_batch_size: {global_batch_size} is no multiple of {at_once} "
        f"(per_device_train_batch_size {per_device} x {replicas} {processes}); "
        f"nearest: {' or '.join(str(size) for size in nearest)}"
    )
