"""Locks in the cache of compiled operators, and whose they are.

A process that is killed while it compiles leaves `<operator>/lock`, and every later one waits for it without a word and
without end (torch/utils/file_baton.py).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from sft_toolkit.engines.files_of_system import is_shared, processes_using


@dataclass(frozen=True)
class Lock:
    """A lock file, the processes of this machine that hold it, and its age in seconds."""

    path: Path
    holders: list[int]
    age: float
    others_may_hold: bool  # another machine's or another user's process can't be seen from here

    @property
    def is_stale(self) -> bool:
        """Nobody will ever remove it."""
        return not self.holders and not self.others_may_hold

    def in_words(self) -> str:
        """Whose it is, and what to do."""
        if self.holders:
            return f"{self.path}: process {', '.join(map(str, self.holders))} compiles; wait for it, and don't kill it"
        if self.others_may_hold:
            return (
                f"{self.path}: held for {self.age / 60:.0f} minutes, by nobody who can be seen from here; remove it if "
                "no other machine and no other user compiles"
            )
        return f"{self.path}: its owner was killed while compiling, and every start would wait for ever; remove it"


def cache_of(env: Mapping[str, str]) -> Path:
    """The folder that torch compiles into."""
    own = env.get("TORCH_EXTENSIONS_DIR")
    return Path(own) if own else Path(env.get("XDG_CACHE_HOME") or Path.home() / ".cache", "torch_extensions")


def locks(env: Mapping[str, str]) -> Iterator[Lock]:
    """Every lock in the cache. A lock without a holder is looked at twice: between two looks it can change hands."""
    if not Path("/proc/self").exists():
        return
    root = cache_of(env)
    for path in sorted([*root.glob("*/lock"), *root.glob("*/*/lock")]):
        holders = processes_using(path)
        if not holders:
            time.sleep(0.2)
            holders = processes_using(path)
        try:
            about = path.stat()
        except FileNotFoundError:
            continue  # its owner is done
        yield Lock(path, holders, time.time() - about.st_mtime, about.st_uid != os.getuid() or is_shared(path))
