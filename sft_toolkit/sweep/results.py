"""The results of a search: a table on the terminal and in `trials.csv`, a picture in `trials.png`."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sft_toolkit.callbacks.files import replace_file
from sft_toolkit.config_file.search_space import Range
from sft_toolkit.sweep.study import NOTE, Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from optuna.trial import FrozenTrial

TABLE, PICTURE = "trials.csv", "trials.png"


def rows(study: Study) -> list[list[str]]:
    """A header and a row per trial that has ended."""
    head = ["trial", "state", study.sweep.metric, *study.spaces, "note"]
    return [head, *(_row(study, trial) for trial in study.ended())]


def in_words(study: Study) -> str:
    """The table with aligned columns."""
    table = rows(study)
    widths = [max(len(cells[column]) for cells in table) for column in range(len(table[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip() for cells in table
    )


def write(study: Study, folder: Path) -> None:
    """Both files, replaced whole."""
    table = io.StringIO()
    csv.writer(table, lineterminator="\n").writerows(rows(study))
    replace_file(folder / TABLE, table.getvalue().encode(), durable=False)
    if any(trial.value is not None for trial in study.ended()):
        picture = io.BytesIO()
        draw(study).savefig(picture, format="png")
        replace_file(folder / PICTURE, picture.getvalue(), durable=False)


def draw(study: Study) -> Figure:
    """The value over the trials with the best so far, and over each key that was searched; pruned trials are hollow."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    trials = [trial for trial in study.ended() if trial.value is not None]
    figure = Figure(figsize=(4 * (1 + len(study.spaces)), 4), dpi=120, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 1 + len(study.spaces), sharey=True, squeeze=False)[0]
    order = [int(study.folder_of(trial).rpartition("-")[2]) for trial in trials]
    _points(panels[0], order, trials)
    better = min if study.minimizes else max
    values = [trial.value for trial in trials if trial.value is not None]
    panels[0].step(order, [better(values[: n + 1]) for n in range(len(values))], where="post", color="#D55E00")
    panels[0].set(xlabel="trial", ylabel=study.sweep.metric)
    for axes, (key, space) in zip(panels[1:], study.spaces.items(), strict=True):
        axes.set_xlabel(key)
        if isinstance(space, Range):
            _points(axes, [trial.params[key] for trial in trials], trials)
            axes.set_xscale("log" if space.log else "linear")
        else:
            _points(axes, [space.values.index(trial.params[key]) for trial in trials], trials)
            axes.set_xticks(range(len(space.values)), space.values)
            axes.set_xlim(-0.5, len(space.values) - 0.5)
    return figure


def _points(axes: Any, places: list[Any], trials: list[FrozenTrial]) -> None:
    for place, trial in zip(places, trials, strict=True):
        filled = "#0072B2" if trial.state.name == "COMPLETE" else "none"
        axes.plot([place], [trial.value], "o", markerfacecolor=filled, markeredgecolor="#0072B2")


def _row(study: Study, trial: FrozenTrial) -> list[str]:
    value = "" if trial.value is None else f"{trial.value:.6g}"
    tried = [f"{tried:.6g}" if isinstance(tried, float) else str(tried) for tried in trial.params.values()]
    return [study.folder_of(trial), trial.state.name.lower(), value, *tried, str(trial.user_attrs.get(NOTE, ""))]
