"""GGUF files as a source of weights: dequantised on load, and without a trace of the GGUF afterwards."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def only_gguf(folder: Path) -> str | None:
    """Name of the GGUF in a folder that holds no other model and exactly one of them."""
    found = [path.name for path in folder.glob("*.gguf")] if folder.is_dir() else []
    return found[0] if len(found) == 1 and not (folder / "config.json").exists() else None


def unpacked() -> dict[str, Any]:
    """Keyword arguments for `from_pretrained` that ask for plain tensors.

    Newer transformers keep the blocks packed where they have a kernel; packed weights take no adapter and no merge.
    Older ones always unpack, and have no such option.
    """
    try:
        from transformers.utils.quantization_config import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def forget_gguf(model: Any, name: str) -> None:
    """Make a model loaded from a GGUF a plain one, which `save_pretrained` writes as a plain folder.

    Args:
        name: folder or hub id of the GGUF. It replaces the title found in the file, which an adapter would otherwise
            record as its base.
    """
    for owner, attributes in (
        (model, ("hf_quantizer", "quantization_method")),
        (model.config, ("quantization_config", "_model_name_or_path")),
    ):
        for attribute in attributes:
            if attribute in vars(owner):
                delattr(owner, attribute)
    model.is_quantized = False
    model.config._name_or_path = model.name_or_path = name
