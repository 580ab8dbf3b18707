"""`loss.png`: the loss so far, redrawn while training goes on."""

from __future__ import annotations

import io
import logging
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from time import monotonic
from typing import TYPE_CHECKING, Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.files import in_output_dir, replace_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

logger = logging.getLogger(__name__)

FILE_NAME = "loss.png"
# Okabe and Ito's palette, told apart with every kind of colour vision. The first colour is the training loss.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
SMOOTH_FROM = 30  # points; below, the raw line is readable by itself
DRAWING_SHARE = 0.02  # of the run's time, at most


@dataclass
class Line:
    """One curve: finite losses (nats per token) over steps, and the steps where the loss was no finite number."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    broken: list[int] = field(default_factory=list)


class CurveCallback(TrainerCallback):
    """Draws training and evaluation loss from `state.log_history`, which checkpoints carry over a resume.

    Args:
        every_seconds: shortest time between two drawings; longer where drawing would take over 2 % of the time.
    """

    def __init__(self, every_seconds: float = 5.0) -> None:
        self.every_seconds = every_seconds
        self._next = 0.0
        self._drawn = 0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._next, self._drawn = 0.0, 0

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero and monotonic() >= self._next:
            self._draw(args, state)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.is_world_process_zero and len(state.log_history) > self._drawn:
            self._draw(args, state)

    def _draw(self, args: TrainingArguments, state: TrainerState) -> None:
        began = monotonic()
        curves = curves_of(state.log_history)
        if curves:
            picture = io.BytesIO()
            draw(curves, state.max_steps).savefig(picture, format="png")
            try:
                replace_file(in_output_dir(args, FILE_NAME), picture.getvalue(), durable=False)
            except OSError as error:
                # A picture is no reason to lose a training; what has to be written fails by itself.
                logger.warning("The loss curve could not be written: %s", error)
        self._drawn = len(state.log_history)
        now = monotonic()
        self._next = now + max(self.every_seconds, (now - began) / DRAWING_SHARE)


def curves_of(log_history: Iterable[Mapping[str, Any]]) -> dict[str, Line]:
    """Curves by name: "train", "eval", and for several evaluation sets "eval NAME"."""
    curves: dict[str, Line] = {}
    for entry in log_history:
        for key, value in entry.items():
            name = _curve_name(key)
            if name is None:
                continue
            line = curves.setdefault(name, Line())
            if math.isfinite(value):
                line.steps.append(int(entry["step"]))
                line.losses.append(float(value))
            else:
                line.broken.append(int(entry["step"]))
    return curves


def _curve_name(key: str) -> str | None:
    if key == "loss":
        return "train"
    found = re.fullmatch(r"eval_(?:(.+)_)?loss", key)
    return None if found is None else f"eval {found[1]}" if found[1] else "eval"


def smoothed(losses: Sequence[float], half_life: float) -> list[float]:
    """Exponential moving average that forgets half in `half_life` points, without a bias to its first value."""
    keep = 0.5 ** (1.0 / half_life)
    total, weight, averages = 0.0, 0.0, []
    for loss in losses:
        total, weight = keep * total + loss, keep * weight + 1.0
        averages.append(total / weight)
    return averages


def draw(curves: Mapping[str, Line], max_steps: int = 0) -> Figure:
    """A figure of its own: pyplot would keep it in a global list and choose a backend for the whole process."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for colour, (name, line) in zip(_colours(curves), curves.items(), strict=True):
        label = f"{name}  {line.losses[-1]:.3f}" if line.losses else name
        if name == "train" and len(line.steps) >= SMOOTH_FROM:
            axes.plot(line.steps, line.losses, color=colour, linewidth=0.8, alpha=0.3)
            axes.plot(line.steps, smoothed(line.losses, len(line.losses) / 50), color=colour, linewidth=2, label=label)
        else:
            axes.plot(line.steps, line.losses, color=colour, linewidth=2, marker="o", markersize=4, label=label)
        for number, step in enumerate(line.broken):
            axes.axvline(step, color="#B00020", linewidth=1, linestyle=":", label="" if number else "not finite")
    axes.set_xlabel(f"step of {max_steps}" if max_steps > 0 else "step")
    axes.set_ylabel("loss (nats per token)")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(color="#DDDDDD", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return figure


def _colours(curves: Mapping[str, Line]) -> list[str]:
    """Training keeps its colour whatever is logged first; many evaluation sets go round."""
    evals = iter(range(len(curves)))
    return [COLOURS[0] if name == "train" else COLOURS[1 + next(evals) % (len(COLOURS) - 1)] for name in curves]
