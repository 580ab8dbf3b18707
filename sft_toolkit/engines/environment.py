"""What a training writes into `os.environ` and torch's switches is undone when it is over.

transformers, accelerate and DeepSpeed speak to one another through variables and leave them behind: after a ZeRO run,
`ACCELERATE_USE_DEEPSPEED` makes DeepSpeed of every later run of the process; `full_determinism` slows down whatever
runs afterwards. A trainer keeps its own variables in a `Footprint`, and they stand only while it works.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

_PREFIXES = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_")
_NAMES = {
    # transformers.trainer_utils.enable_full_determinism
    "CUDA_LAUNCH_BLOCKING",
    "CUBLAS_WORKSPACE_CONFIG",
    "ASCEND_LAUNCH_BLOCKING",
    "HCCL_DETERMINISTIC",
    "FLASH_ATTENTION_DETERMINISTIC",
    # accelerate.state, accelerate.accelerator; `import deepspeed`
    "PYTORCH_ENABLE_MPS_FALLBACK",
    "XLA_USE_BF16",
    "XLA_DOWNCAST_BF16",
    "DEEPSPEED_USE_HPU",
    "PYTORCH_NVML_BASED_CUDA_CHECK",
    # torch._dynamo when it is imported, which `import peft` and the first optimizer do; its compiled code
    "TORCHINDUCTOR_CACHE_DIR",
    "_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR",
}
# Not among them: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_PORT. They describe the process group, which lives on.


@contextmanager
def environment_kept() -> Iterator[None]:
    """What the stack writes into `os.environ` meanwhile is undone at the end; other variables are left alone."""
    before = _variables()
    try:
        yield
    finally:
        _set(before)


@contextmanager
def without_variable(name: str) -> Iterator[None]:
    """`name` is absent from `os.environ` meanwhile."""
    value = os.environ.pop(name, None)
    try:
        yield
    finally:
        if value is not None:
            os.environ[name] = value


@dataclass
class Footprint:
    """The variables and switches that one trainer needs around it while it works.

    Record them where they are made, then wrap whatever works with them; calls may nest.

        with footprint.recorded(): ...   # Trainer.__init__
        with footprint.in_place(): ...   # train, evaluate, save
    """

    _written: dict[str, str | None] = field(default_factory=dict)
    _switches: Mapping[str, bool] = field(default_factory=dict)
    _depth: int = 0

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Remember what is written meanwhile, and undo it."""
        variables, switches = _variables(), _determinism()
        try:
            yield
            now = _variables()
            self._written = {n: now.get(n) for n in {*variables, *now} if now.get(n) != variables.get(n)}
            self._switches = _determinism() if _determinism() != switches else {}
        finally:
            _set(variables)
            _set_determinism(switches)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Put it back meanwhile; what the work adds is undone as well."""
        variables, switches = _variables(), _determinism()
        if not self._depth:
            _set({**variables, **self._written})
            if self._switches:
                _set_determinism(self._switches)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                _set(variables)
                _set_determinism(switches)


def _variables() -> dict[str, str | None]:
    return {n: v for n, v in os.environ.items() if n.startswith(_PREFIXES) or n in _NAMES}


def _set(variables: Mapping[str, str | None]) -> None:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif os.environ.get(name) != value:
            os.environ[name] = value


def _determinism() -> dict[str, bool]:
    import torch  # not at the top: commands keep the environment around their first import of it

    return {
        "algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "cudnn": torch.backends.cudnn.deterministic,
        "benchmark": torch.backends.cudnn.benchmark,
    }


def _set_determinism(switches: Mapping[str, bool]) -> None:
    if switches == _determinism():
        return
    import torch

    torch.use_deterministic_algorithms(switches["algorithms"], warn_only=switches["warn_only"])
    torch.backends.cudnn.deterministic = switches["cudnn"]
    torch.backends.cudnn.benchmark = switches["benchmark"]
