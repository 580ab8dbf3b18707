"""Where each message's text stands in a rendered conversation. Pure string functions: no tokenizer, no template.

Every text that a user wrote is put between two marker characters before the template sees it. The rendered text then
says by itself what came from where. Take the markers out again: if the result is, to the letter, what the template
renders without them, the places are proven. Nothing was searched for, so no text can be mistaken for another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# The end of the last private-use plane: templates keep these characters, trim() does not count them as white space,
# and the icon fonts that use private planes stay below.
_FIRST_MARKER = 0x10E000
_LAST_MARKER = 0x10FFFD
_MARKER = re.compile(f"[{chr(_FIRST_MARKER)}-{chr(_LAST_MARKER)}]")
_MOST_SLOTS = (_LAST_MARKER - _FIRST_MARKER + 1) // 2

# Templates cut texts at these tags, or ask whether a text starts with one, so a tag stays outside the markers.
TAG = re.compile(
    r"(</?(?:\w+:)?(?:think|thinking|thought|reasoning|tool_response|tool_call)>"
    r"|\[/?THINK\]|<\|(?:START|END)_THINKING\|>)"
)
_TEXT_KEYS = ("content", "reasoning_content", "thinking", "reasoning")


class Unproven(ValueError):
    """The place of a message's text can't be proven. The message is the reason, without file and row."""


@dataclass(frozen=True)
class Slot:
    """One stretch of user-written text: `text[start:end]`, the `number`-th text that was put between markers."""

    number: int
    message: int
    start: int
    end: int


@dataclass(frozen=True)
class Layout:
    """A rendered text without markers, and its slots in order of position; slots never overlap."""

    text: str
    slots: tuple[Slot, ...]

    def before(self, index: int) -> str:
        """The template's own text between slot `index` (-1: the end of the text) and the slot before it."""
        index %= len(self.slots) + 1
        start = self.slots[index - 1].end if index else 0
        return self.text[start : self.slots[index].start if index < len(self.slots) else None]


@dataclass(frozen=True)
class Grammar:
    """What a template writes around turns; `grammar.learn` finds it out.

    Attributes:
        headers: texts after which an assistant speaks, the longest first; none where turns just follow one another.
        end_of_turn: the token that ends an assistant's answer, None where nothing does.
        closings: every token that ends an assistant's turn: an answer, an earlier answer, a tool call.
        shows_calls: the template shows the tool calls of an assistant.
        controls: finds every control token in a text.
        initials: the first characters of the control tokens.
        fillers: matches where a header that is not quite the inference prompt's may end: a reasoning tag, a control
            token that closes no turn, or nothing but white space follows.
        unprompted: the header is what the template writes before answers; its inference prompt lacks it.
        user_header: what stands directly before a user's text and begins that turn.
        default_system: system text that the template adds where a conversation has none.
    """

    headers: tuple[str, ...]
    end_of_turn: str | None
    closings: tuple[str, ...]
    shows_calls: bool
    controls: re.Pattern[str]
    initials: frozenset[str]
    fillers: re.Pattern[str]
    unprompted: bool
    user_header: str
    default_system: str

    def spells_control(self, text: str) -> bool:
        """True if a control token is spelled in the text."""
        # Most texts hold no such first character; asking for it costs a hundredth of the search.
        return any(initial in text for initial in self.initials) and self.controls.search(text) is not None


class Marker:
    """Puts the texts of one conversation between markers.

    Attributes:
        owners: `owners[n]` is the index of the message that text number `n` belongs to.
        unmarked: strings that a template may show too, but that have no markers (ids and keys of tool calls).
    """

    def __init__(self) -> None:
        self.owners: list[int] = []
        self.unmarked: list[str] = []

    def mark(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies of the messages (as a chat template reads them) with every text between markers.

        Raises:
            Unproven: more texts than there are markers, or a text that holds a marker character.
        """
        return [self._message(index, message) for index, message in enumerate(messages)]

    def _message(self, index: int, message: Mapping[str, Any]) -> dict[str, Any]:
        marked = {key: self._value(index, item) if key in _TEXT_KEYS else item for key, item in message.items()}
        if message.get("tool_calls"):
            marked["tool_calls"] = [self._call(index, call) for call in message["tool_calls"]]
        return marked

    def _call(self, index: int, call: Mapping[str, Any]) -> dict[str, Any]:
        marked = {}
        for key, item in call.items():
            if key == "function":
                marked[key] = self._call(index, item)
            elif key in ("name", "arguments"):
                marked[key] = self._value(index, item)
            else:
                marked[key] = item
                self.unmarked.append(str(item))
        return marked

    def _value(self, index: int, value: Any) -> Any:
        if isinstance(value, str):
            return "".join(part if TAG.fullmatch(part) else self._wrap(index, part) for part in TAG.split(value))
        if isinstance(value, Mapping):
            self.unmarked += map(str, value)
            return {key: self._value(index, item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._value(index, item) for item in value]
        return value

    def _wrap(self, index: int, text: str) -> str:
        core = text.strip()
        if not core:
            return text
        if _MARKER.search(core):
            raise Unproven(f"message {index + 1} holds a character of the private range U+10E000-U+10FFFD")
        number = len(self.owners)
        if number == _MOST_SLOTS:
            raise Unproven(f"the conversation has more than {_MOST_SLOTS} separate texts")
        self.owners.append(index)
        # White space stays outside: a template that trims the text must still see it at the rim.
        start = text.index(core)
        opening, closing = chr(_FIRST_MARKER + 2 * number), chr(_FIRST_MARKER + 2 * number + 1)
        return f"{text[:start]}{opening}{core}{closing}{text[start + len(core) :]}"


def unmark(marked: str, owners: Sequence[int]) -> Layout:
    """Takes the markers out of a rendered text and says where they stood.

    Raises:
        Unproven: the template kept only a part of a marked text, so its end can't be told.
    """
    parts: list[str] = []
    slots: list[Slot] = []
    opened: tuple[int, int] | None = None
    length = at = 0
    for match in _MARKER.finditer(marked):
        parts.append(marked[at : match.start()])
        length += match.start() - at
        at = match.end()
        number, closes = divmod(ord(match.group()) - _FIRST_MARKER, 2)
        if number >= len(owners):
            raise Unproven("the conversation holds a character of the private range U+10E000-U+10FFFD")
        if not closes and opened is None:
            opened = number, length
        elif closes and opened is not None and opened[0] == number:
            slots.append(Slot(number, owners[number], opened[1], length))
            opened = None
        else:
            cut = opened[0] if opened else number
            raise Unproven(f"the chat template cuts the text of message {owners[cut] + 1}")
    if opened is not None:
        raise Unproven(f"the chat template cuts the text of message {owners[opened[0]] + 1}")
    return Layout("".join([*parts, marked[at:]]), tuple(slots))
