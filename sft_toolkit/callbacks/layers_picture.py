"""`layers.png`: three panels, a row per layer, a column per sampled step, the logarithm of each number as a colour."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

PANELS = {
    "activations": "activations (root mean square)",
    "gradients": "gradients (norm)",
    "updates": "updates (norm of the change / norm)",
}
MOST_ROWS = 60


def draw(samples: Sequence[Mapping[str, Any]]) -> bytes:
    """The picture as PNG; layers without a number at a step, and zeros, stay white."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    tallest = max(len(_names(samples, panel)) for panel in PANELS)
    figure = Figure(figsize=(16, min(2.5 + 0.18 * tallest, 14)), dpi=100, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    steps = [sample["step"] for sample in samples]
    for number, (panel, title) in enumerate(PANELS.items()):
        axes = figure.add_subplot(1, len(PANELS), number + 1)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("step")
        names = _names(samples, panel)
        if not names:
            continue
        table = [[_log10(sample[panel].get(name)) for sample in samples] for name in names]
        image = axes.imshow(table, aspect="auto", interpolation="nearest", cmap="viridis")
        axes.set_yticks(range(len(names)), names, fontsize=6)
        shown = range(0, len(steps), max(1, len(steps) // 8))
        axes.set_xticks(shown, [str(steps[i]) for i in shown], fontsize=8)
        figure.colorbar(image, ax=axes, label="log10")
    picture = io.BytesIO()
    figure.savefig(picture, format="png")
    return picture.getvalue()


def _names(samples: Sequence[Mapping[str, Any]], panel: str) -> list[str]:
    names = list(dict.fromkeys(name for sample in samples for name in sample[panel]))
    return names[:: math.ceil(len(names) / MOST_ROWS)] if len(names) > MOST_ROWS else names


def _log10(value: float | None) -> float:
    return math.log10(value) if value is not None and 0 < value < math.inf else math.nan
