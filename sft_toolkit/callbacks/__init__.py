"""What a run tells and keeps while it trains; one file each, imported on first use.

Every callback works with a stock `transformers.Trainer`, writes on the world's first process only, and leaves the
training itself untouched: the same weights come out with and without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_toolkit.callbacks.complete import CompleteCallback as CompleteCallback
    from sft_toolkit.callbacks.curve import CurveCallback as CurveCallback
    from sft_toolkit.callbacks.ema import EmaCallback as EmaCallback
    from sft_toolkit.callbacks.health import NonFiniteGuard as NonFiniteGuard
    from sft_toolkit.callbacks.interrupt import InterruptCallback as InterruptCallback
    from sft_toolkit.callbacks.layers import LayersCallback as LayersCallback
    from sft_toolkit.callbacks.live_curve import LiveCurveCallback as LiveCurveCallback
    from sft_toolkit.callbacks.manifest import ManifestCallback as ManifestCallback
    from sft_toolkit.callbacks.memory import MemoryCallback as MemoryCallback
    from sft_toolkit.callbacks.metrics_file import MetricsFileCallback as MetricsFileCallback
    from sft_toolkit.callbacks.progress import ProgressCallback as ProgressCallback
    from sft_toolkit.callbacks.samples import SamplesCallback as SamplesCallback
    from sft_toolkit.callbacks.stall import StallWatch as StallWatch
    from sft_toolkit.callbacks.unfreeze import UnfreezeCallback as UnfreezeCallback

_HOME = {
    "CompleteCallback": "complete",
    "CurveCallback": "curve",
    "EmaCallback": "ema",
    "InterruptCallback": "interrupt",
    "LayersCallback": "layers",
    "LiveCurveCallback": "live_curve",
    "ManifestCallback": "manifest",
    "MemoryCallback": "memory",
    "MetricsFileCallback": "metrics_file",
    "NonFiniteGuard": "health",
    "ProgressCallback": "progress",
    "SamplesCallback": "samples",
    "StallWatch": "stall",
    "UnfreezeCallback": "unfreeze",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
