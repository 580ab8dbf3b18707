"""Turns of plain conversations by arithmetic, from one conversation of the same roles whose turns are located."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

from sft_toolkit.data.spans import Layout
from sft_toolkit.data.turns import Turn

LEFT_OUT = "text that the chat template leaves out (earlier reasoning, a system message, text beside a tool call)"


@dataclass(frozen=True)
class Located:
    """Character positions in a rendered conversation: what assistants produce, and where user turns begin.

    `notes` say what the template did to the texts.
    """

    turns: list[Turn]
    user_starts: list[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Skeleton:
    """A located conversation of one-letter texts, from which others of the same roles are located by arithmetic.

    Attributes:
        parts: the template's pieces and, at the odd places, the texts.
        order: message index of each text.
        hidden: messages that the template leaves out.
        ends: end of each text in the skeleton's own text.
        located: turns in the skeleton's own text.
    """

    parts: list[str]
    order: list[int]
    hidden: list[int]
    ends: list[int]
    located: Located

    @classmethod
    def of(cls, layout: Layout, located: Located, messages: int) -> Skeleton:
        """The skeleton of a conversation of so many messages."""
        order = [slot.message for slot in layout.slots]
        parts = [part for i in range(len(order)) for part in (layout.before(i), "")]
        hidden = [message for message in range(messages) if message not in order]
        return cls([*parts, layout.before(-1)], order, hidden, [slot.end for slot in layout.slots], located)

    def locate(self, text: str, contents: Sequence[str], note: str = "") -> Located | None:
        """Positions in `text` if it is exactly the pieces around these contents, else None."""
        texts = [contents[message] for message in self.order]
        parts = self.parts.copy()
        parts[1::2] = texts
        if "".join(parts) != text:
            return None
        grown = list(accumulate((len(item) - 1 for item in texts), initial=0))

        def moved(position: int) -> int:
            return position + grown[bisect_right(self.ends, position)]

        turns = [replace(turn, start=moved(turn.start), end=moved(turn.end)) for turn in self.located.turns]
        notes = [note] if note else []
        notes += [LEFT_OUT] if any(contents[message].strip() for message in self.hidden) else []
        return Located(turns, [moved(start) for start in self.located.user_starts], tuple(notes))
