"""Outcomes of several rounds -> a table of medians and ratios."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.setting import Contestant, Outcome

Column = tuple[str, Callable[[Outcome], float], str]

COLUMNS: tuple[Column, ...] = (
    ("prepare CPU-s", lambda o: o.prepare_cpu_s, ".2f"),
    ("tokens/s", lambda o: o.tokens / o.train_s, ",.0f"),
    ("supervised/s", lambda o: o.supervised / o.train_s, ",.0f"),
    ("tokens/CPU-s", lambda o: o.tokens / o.train_cpu_s, ",.0f"),
    ("padding", lambda o: 1 - o.tokens / o.slots, ".0%"),
    ("peak MiB", lambda o: o.peak_mib, ",.0f"),
    ("training MiB", lambda o: o.training_mib, ",.0f"),
    ("first loss", lambda o: o.losses[0], ".4f"),
    ("last loss", lambda o: o.losses[-1], ".4f"),
)
RATIOS = (0, 1, 3, 5, 6)
"""The columns that are also given relative to the first contestant."""


def markdown(outcomes: dict[Contestant, list[Outcome]]) -> str:
    """Two tables: medians over the rounds, and ratios to the first contestant, round by round, then their median.

    A ratio compares runs of the same round, so that a load that comes and goes on the machine weighs less. The last
    column is the largest difference of the loss of an update to the first contestant's, where the layout is the same.
    """
    medians = [["system", *(name for name, _, _ in COLUMNS), "difference"]]
    ratios = [["system", *(COLUMNS[i][0] for i in RATIOS)]]
    first, limit = next(iter(outcomes.items()))
    for contestant, rounds in outcomes.items():
        apart = _difference(rounds[0], limit[0]) if contestant.packed == first.packed else "-"
        medians.append([str(contestant), *(format(median(map(of, rounds)), spec) for _, of, spec in COLUMNS), apart])
        ratios.append([str(contestant), *(_ratio(COLUMNS[i][1], rounds, limit) for i in RATIOS)])
    return f"{_table(medians)}\n\nRelative to '{first}':\n\n{_table(ratios)}"


def _ratio(of: Callable[[Outcome], float], rounds: Sequence[Outcome], limit: Sequence[Outcome]) -> str:
    pairs = [(of(own), of(other)) for own, other in zip(rounds, limit, strict=True)]
    return "-" if any(other == 0 for _, other in pairs) else f"{median(own / other for own, other in pairs):.2f}"


def _difference(own: Outcome, other: Outcome) -> str:
    return f"{max(abs(a - b) for a, b in zip(own.losses, other.losses, strict=True)):.0e}"


def _table(lines: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |" for line in lines
    ]
    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([text[0], rule, *text[1:]])
