"""sft_toolkit: supervised fine-tuning on `transformers.Trainer`, with nothing silent.

Public names are imported on first use: `import sft_toolkit` takes milliseconds and loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from sft_toolkit._version import __version__

if TYPE_CHECKING:
    from sft_toolkit.args import LoraArguments as LoraArguments
    from sft_toolkit.assemble import run as run
    from sft_toolkit.config import load_config as load_config
    from sft_toolkit.errors import CheckpointError as CheckpointError
    from sft_toolkit.errors import ConfigError as ConfigError
    from sft_toolkit.errors import DataError as DataError
    from sft_toolkit.errors import TrainingDivergedError as TrainingDivergedError
    from sft_toolkit.registry import register as register
    from sft_toolkit.trainer import SFTTrainer as SFTTrainer
    from sft_toolkit.training_args import SFTArguments as SFTArguments

_HOME_OF = {
    "SFTTrainer": "sft_toolkit.trainer",
    "SFTArguments": "sft_toolkit.training_args",
    "LoraArguments": "sft_toolkit.args",
    "load_config": "sft_toolkit.config",
    "run": "sft_toolkit.assemble",
    "register": "sft_toolkit.registry",
    "ConfigError": "sft_toolkit.errors",
    "DataError": "sft_toolkit.errors",
    "CheckpointError": "sft_toolkit.errors",
    "TrainingDivergedError": "sft_toolkit.errors",
}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(_HOME_OF[name]), name)
    raise AttributeError(f"module 'sft_toolkit' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
