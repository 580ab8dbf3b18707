"""LoRA through peft: configuration, targets, injection, merging. Usable without the trainer; imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_toolkit.lora.config import to_peft as to_peft
    from sft_toolkit.lora.inject import inject as inject_adapter
    from sft_toolkit.lora.inject import trainable_share as trainable_share
    from sft_toolkit.lora.merge import merge as merge_adapter
    from sft_toolkit.lora.merge import merge_live as merge_live
    from sft_toolkit.lora.targets import resolve_targets as resolve_targets

# Functions that are named like their module get a longer name here: the module would shadow them.
_HOME_OF = {
    "to_peft": ("config", "to_peft"),
    "inject_adapter": ("inject", "inject"),
    "trainable_share": ("inject", "trainable_share"),
    "merge_adapter": ("merge", "merge"),
    "merge_live": ("merge", "merge_live"),
    "resolve_targets": ("targets", "resolve_targets"),
}

__all__ = ["inject_adapter", "merge_adapter", "merge_live", "resolve_targets", "to_peft", "trainable_share"]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        module, function = _HOME_OF[name]
        return getattr(import_module(f"sft_toolkit.lora.{module}"), function)
    raise AttributeError(f"module 'sft_toolkit.lora' has no attribute '{name}'")
