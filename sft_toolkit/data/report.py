"""What happened to the rows: the counts behind `data_report.json` and the console summary."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

EXAMPLES = 3
"""Rows named per warning."""

REFUSALS = ("bad_row", "mask_unproven")
"""Reasons for which a row is refused, rather than dropped by a policy on lengths."""

FEWEST = 20
"""Rows from which on the default limit on refused rows holds: half of very few rows says nothing about a file."""


@dataclass
class Tally:
    """Counts of one source, or of several added up. `rows_read` = `rows_kept` + all of `rows_dropped`.

    Attributes:
        rows_read: rows found in the files, broken ones included.
        rows_kept: rows that became tokens.
        rows_dropped: {reason: rows}.
        rows_truncated: rows among the kept ones that were cut to `max_length`.
        tokens, supervised_tokens: of the kept rows. A label at the first token is learned by no loss and not counted.
        longest: tokens of the longest kept row.
        warnings: {kind: {"count": rows, "rows": the first three, as "file, row N"}}; every reason of `rows_dropped`
            has its entry too, and where the reason differs from row to row, it is told for these three ("why").
    """

    rows_read: int = 0
    rows_kept: int = 0
    rows_dropped: dict[str, int] = field(default_factory=dict)
    rows_truncated: int = 0
    tokens: int = 0
    supervised_tokens: int = 0
    longest: int = 0
    warnings: dict[str, dict[str, Any]] = field(default_factory=dict)

    def keep(self, length: int, supervised: int) -> None:
        """Count a row that became `length` tokens, `supervised` of them learned."""
        self.rows_kept += 1
        self.tokens += length
        self.supervised_tokens += supervised
        self.longest = max(self.longest, length)

    def drop(self, reason: str, where: str, why: str | None = None) -> None:
        """Count a row that is not trained on; `where` is "file, row N", `why` what is wrong with this very row."""
        self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + 1
        self.warn(reason, [where], why=() if why is None else [why])

    def warn(self, kind: str, where: Iterable[str], count: int | None = None, why: Iterable[str] = ()) -> None:
        """Count something worth knowing about rows; `count` only where more rows are meant than are named."""
        rows, reasons = list(where), list(why)
        entry = self.warnings.setdefault(kind, {"count": 0, "rows": []})
        entry["count"] += len(rows) if count is None else count
        entry["rows"] = (entry["rows"] + rows)[:EXAMPLES]
        if reasons:
            entry["why"] = (entry.get("why", []) + reasons)[:EXAMPLES]

    def refused(self) -> int:
        """Rows that can't be read, or whose mask has no proof."""
        return sum(self.rows_dropped.get(reason, 0) for reason in REFUSALS)

    def add(self, other: Tally) -> None:
        """Add the counts of another source to these."""
        for name in ("rows_read", "rows_kept", "rows_truncated", "tokens", "supervised_tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.longest = max(self.longest, other.longest)
        for reason, count in other.rows_dropped.items():
            self.rows_dropped[reason] = self.rows_dropped.get(reason, 0) + count
        for kind, entry in other.warnings.items():
            self.warn(kind, entry["rows"], entry["count"], entry.get("why", ()))

    def as_dict(self) -> dict[str, Any]:
        """Plain data, for JSON; `Tally(**dict)` is the way back."""
        return asdict(self)


def total(tallies: Iterable[Tally]) -> Tally:
    """The sum of several sources."""
    result = Tally()
    for tally in tallies:
        result.add(tally)
    return result


def describe(name: str, tally: Tally) -> str:
    """The summary of a source in words: one line of counts, then one per warning."""
    head = (
        f"{name}: {tally.rows_kept:,} of {tally.rows_read:,} rows kept, {tally.tokens:,} tokens, "
        f"{tally.supervised_tokens:,} of them supervised ({_percent(tally.supervised_tokens, tally.tokens)}), "
        f"longest {tally.longest:,}, {tally.rows_truncated:,} cut to max_length"
    )
    lines = [head]
    for kind, entry in tally.warnings.items():
        verb = "dropped, " if kind in tally.rows_dropped else ""
        lines.append(f"  {verb}{kind}: {entry['count']:,} rows, first {'; '.join(_examples(entry))}")
    return "\n".join(lines)


def nothing_left(name: str, tally: Tally) -> str:
    """Why there is no row to train on, with the count and an example of every reason."""
    if not tally.rows_read:
        return f"{name}: there are no rows"
    reasons = "; ".join(
        f"{reason}: {count:,} (first: {', '.join(_examples(tally.warnings[reason])[:1])})"
        for reason, count in tally.rows_dropped.items()
    )
    purpose = "evaluate" if "eval" in name else "train on"
    return f"{name}: no row is left to {purpose}, {tally.rows_read:,} were read. Dropped: {reasons}"


def too_many_refused(name: str, tally: Tally, limit: float | None) -> str | None:
    """Why a source with so many refused rows is not trained on, with counts and examples; None where it may be.

    Args:
        limit: largest share of refused rows; None is half, of `FEWEST` rows or more.
    """
    refused, read = tally.refused(), tally.rows_read
    if (limit is None and read < FEWEST) or refused <= (0.5 if limit is None else limit) * read:
        return None
    asked = "data.max_refused (half, by default)" if limit is None else f"data.max_refused: {limit:g}"
    lines = [f"{name}: {refused:,} of {read:,} rows are refused ({_percent(refused, read)}), more than {asked}"]
    lines += [
        f"  {reason}: {tally.rows_dropped[reason]:,}, first {'; '.join(_examples(tally.warnings[reason]))}"
        for reason in REFUSALS
        if reason in tally.rows_dropped
    ]
    return "\n".join(lines)


def _examples(entry: dict[str, Any]) -> list[str]:
    """The rows of a warning, each with its own reason where there is one."""
    whys = entry.get("why", [])
    return [f"{row} ({whys[i]})" if i < len(whys) else row for i, row in enumerate(entry["rows"])]


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else "0 %"
