"""What the user most likely meant: near names for keys, options, files. Imports nothing of ours."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path


def near(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The candidate closest to `name`, or None; hyphens and underscores, capitals and small letters are alike.

    A typo comes before a shortened name (`adam` for `adamw_torch`), and that before a mere likeness.
    """
    by_spelling = {_spelling(candidate): candidate for candidate in names}
    spelt = _spelling(name)
    typos = difflib.get_close_matches(spelt, list(by_spelling), n=1, cutoff=max(cutoff, 0.8))
    longer = [candidate for candidate in by_spelling if len(spelt) >= 3 and candidate.startswith(spelt)]
    alike = difflib.get_close_matches(spelt, list(by_spelling), n=1, cutoff=cutoff)
    return next((by_spelling[found] for found in [*typos, *longer, *alike]), None)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'x'?`, to be appended to an error message, or an empty string."""
    candidate = near(name, names)
    return f"; did you mean '{candidate}'?" if candidate else ""


def missing(path: str) -> str:
    """Why a path can't be opened and what stands near it: `no such file or folder; did you mean 'run.yaml'?`."""
    target = at_home(path)
    if not target.parent.is_dir():
        return f"no such file or folder; the folder '{target.parent}' does not exist"
    # Names are compared without their suffix, which would make dev.jsonl a neighbour of train.jsonl.
    entries = sorted(target.parent.iterdir(), key=lambda entry: (entry.suffix == target.suffix, entry.name))
    by_stem = {entry.stem: entry.name for entry in entries}
    neighbour = near(target.stem, by_stem)
    hint = f"; did you mean '{Path(path).parent / by_stem[neighbour]}'?" if neighbour else ""
    return f"no such file or folder{hint}"


def at_home(path: str) -> Path:
    """The path with `~` expanded; as it stands where the name behind `~` is nobody's."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def _spelling(name: str) -> str:
    return name.lower().replace("-", "_")
