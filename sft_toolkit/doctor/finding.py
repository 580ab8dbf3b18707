"""One thing that a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True)
class Finding:
    """`bad` stops a training or makes it wait; `note` may matter; `remedy` says what to do."""

    level: Level
    topic: str
    text: str
    remedy: str = ""

    def in_words(self) -> str:
        """One line for a terminal."""
        return f"{self.level:5} {self.topic:12} {self.text}" + (f": {self.remedy}" if self.remedy else "")
