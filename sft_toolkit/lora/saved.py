"""A saved adapter folder: is it one, and what does it hold?"""

from __future__ import annotations

from pathlib import Path

from peft import PeftConfig

from sft_toolkit.checkpoints.weights_file import BadWeightsFile, read_header
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing

WEIGHTS = "adapter_model.safetensors"


def adapter_folder(name: str, key: str = "lora.adapter") -> Path:
    """The folder of a saved adapter, or ConfigError that says what is there instead."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"{key}: '{name}': {missing(name)}")
    absent = [file for file in ("adapter_config.json", WEIGHTS) if not (folder / file).is_file()]
    if absent:
        held = sorted(path.name for path in folder.iterdir())
        raise ConfigError(
            f"{key}: '{name}' is no adapter: no {' and no '.join(absent)}; it holds {', '.join(held[:8]) or 'nothing'}"
        )
    return folder


def read_config(folder: Path) -> PeftConfig:
    """The adapter's own configuration."""
    try:
        return PeftConfig.from_pretrained(str(folder))
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"adapter '{folder}': adapter_config.json can't be read: {error}") from error


def tensor_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes by tensor name, from the header of the weights file alone."""
    try:
        return {name: entry.shape for name, entry in read_header(folder / WEIGHTS).items()}
    except BadWeightsFile as error:
        raise ConfigError(f"adapter '{folder}': {WEIGHTS} {error}") from error
