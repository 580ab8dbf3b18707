"""From raw rows to batches. The building blocks are imported on first use and work without the trainer.

The modules `render`, `prepare`, `packing`, `collate` stay reachable as `from sft_toolkit.data import prepare`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_toolkit.data.collate import PackedCollator as PackedCollator
    from sft_toolkit.data.collate import PaddedCollator as PaddedCollator
    from sft_toolkit.data.conversation import Conversation as Conversation
    from sft_toolkit.data.conversation import Message as Message
    from sft_toolkit.data.conversation import PlainText as PlainText
    from sft_toolkit.data.conversation import RowError as RowError
    from sft_toolkit.data.conversation import TokenRow as TokenRow
    from sft_toolkit.data.formats import detect_format as detect_format
    from sft_toolkit.data.formats import to_example as to_example
    from sft_toolkit.data.packing import best_fit_decreasing as best_fit_decreasing
    from sft_toolkit.data.prepare import tokenize_rows as tokenize_rows
    from sft_toolkit.data.render import Renderer as Renderer
    from sft_toolkit.data.sampler import EpochSampler as EpochSampler
    from sft_toolkit.data.sources import RawRow as RawRow
    from sft_toolkit.data.sources import read_rows as read_rows

_HOME_OF = {
    "PackedCollator": "collate",
    "PaddedCollator": "collate",
    "Conversation": "conversation",
    "Message": "conversation",
    "PlainText": "conversation",
    "RowError": "conversation",
    "TokenRow": "conversation",
    "detect_format": "formats",
    "to_example": "formats",
    "best_fit_decreasing": "packing",
    "tokenize_rows": "prepare",
    "Renderer": "render",
    "EpochSampler": "sampler",
    "RawRow": "sources",
    "read_rows": "sources",
}

__all__ = list(_HOME_OF)


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'sft_toolkit.data' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
