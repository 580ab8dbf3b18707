"""The packing plan for the eye: which rows share a bin and how full it is, in the terminal and as part of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

from datasets import Dataset

from sft_toolkit.data.plan import PackingPlan, described_bins

STYLE = """
h1.bins { margin-top: 2.5rem; }
.bin { display: flex; height: 1.6rem; background: var(--pill); border: 1px solid var(--line); border-radius: 6px;
       overflow: hidden; }
.bin span { background: var(--learn); border-right: 2px solid var(--page); color: var(--learn-text);
            font: .7rem/1.6rem ui-monospace, monospace; overflow: hidden; text-align: center; white-space: nowrap; }
figure { margin: 0 0 1rem; }
figcaption { color: var(--soft); font-size: .85rem; overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class BinsShown:
    """The first bins of a plan.

    Attributes:
        summary: the whole plan in a sentence.
        capacity: tokens that a bin holds.
        bins: `{"tokens": T, "rows": [[source, row number, tokens], ...]}` each.
    """

    summary: str
    capacity: int
    bins: Sequence[dict[str, Any]]


def shown_bins(plan: PackingPlan, tokens: Dataset, limit: int) -> BinsShown:
    """The plan of `tokens` in a sentence, and its first `limit` bins."""
    emptiest = min((plan.tokens_of(number) for number in range(len(plan.bins))), default=0)
    summary = (
        f"Packing: {len(plan.lengths):,} rows in {len(plan.bins):,} bins of {plan.capacity:,} tokens, "
        f"{100 * plan.fill:.1f} % full; the emptiest holds {emptiest:,}."
    )
    return BinsShown(summary, plan.capacity, list(described_bins(plan, tokens, limit)))


def in_words(shown: BinsShown) -> str:
    """For the terminal: the summary, then `bin 1: 2,048 tokens (100.0 %): a.jsonl rows 3 (1,500), 8 (548)` a line."""
    lines = [shown.summary]
    for number, packed in enumerate(shown.bins, 1):
        by_source = [
            f"{source} rows {', '.join(f'{row} ({tokens:,})' for _, row, tokens in rows)}"
            for source, rows in groupby(packed["rows"], key=lambda row: row[0])
        ]
        lines.append(f"bin {number}: {_fill(packed, shown.capacity)}: {'; '.join(by_source)}")
    return "\n".join(lines)


def section(shown: BinsShown) -> str:
    """For the page: a bar a bin, one segment a row."""
    bars = "\n".join(_figure(packed, number, shown.capacity) for number, packed in enumerate(shown.bins, 1))
    return f'<h1 class="bins">Bins</h1>\n<p>{escape(shown.summary)}</p>\n{bars}\n'


def _figure(packed: dict[str, Any], number: int, capacity: int) -> str:
    segments = "".join(
        f'<span style="width:{100 * tokens / capacity:.2f}%" title="row {row} of {escape(source)}: {tokens:,} tokens">'
        f"{row}</span>"
        for source, row, tokens in packed["rows"]
    )
    return (
        f'<figure><div class="bin">{segments}</div>'
        f"<figcaption>bin {number}: {_fill(packed, capacity)}, {len(packed['rows'])} rows</figcaption></figure>"
    )


def _fill(packed: dict[str, Any], capacity: int) -> str:
    return f"{packed['tokens']:,} tokens ({100 * packed['tokens'] / capacity:.1f} %)"
