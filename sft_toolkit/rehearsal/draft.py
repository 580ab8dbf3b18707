"""Arguments without their side effects: what `SFTArguments` would be, on no device and in no process group."""

from __future__ import annotations

from typing import Any

import torch
from transformers import TrainingArguments

from sft_toolkit.engines.environment import environment_kept, without_variable
from sft_toolkit.precision import Choice
from sft_toolkit.training_args import SFTArguments, processes_started

# What TrainingArguments starts when it is built: engines, the compiler's switches, the TF32 mode of the whole process.
_ENGINES: dict[str, Any] = {"deepspeed": None, "fsdp": None, "torch_compile": False, "tf32": None}
_COMPILER: dict[str, Any] = {"torch_compile_backend": None, "torch_compile_mode": None}


class Draft(SFTArguments):
    """Checked, resolved and complete, but for what only the real start can know; never given to a Trainer."""

    precision_choice: Any = None  # said by the real arguments, and by `check`
    distributed_state: Any = None

    def __post_init__(self) -> None:
        self._settle()
        held = {name: getattr(self, name) for name in (*_ENGINES, *_COMPILER)}
        vars(self).update({**_ENGINES, **_COMPILER})
        with environment_kept(), without_variable("ACCELERATE_USE_DEEPSPEED"):
            TrainingArguments.__post_init__(self)  # type: ignore[no-untyped-call]
        vars(self).update(held)
        self.torch_compile = bool(self.torch_compile or self.torch_compile_backend or self.torch_compile_mode)
        if self.torch_compile and self.torch_compile_backend is None:
            self.torch_compile_backend = "inductor"

    def _say_precision(self, choice: Choice) -> None:
        self.precision_choice = choice

    @property
    def device(self) -> torch.device:
        """The CPU, which is always there."""
        return torch.device("cpu")

    @property
    def n_gpu(self) -> int:
        """One: several in one process are the business of the real start."""
        return 1

    @property
    def world_size(self) -> int:
        """What the launcher says."""
        return processes_started()

    @property
    def process_index(self) -> int:
        """The first."""
        return 0
