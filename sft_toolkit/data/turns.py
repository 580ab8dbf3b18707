"""Which part of a rendered conversation each assistant message produces. Pure functions of a layout and a grammar."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from sft_toolkit.data.spans import TAG, Grammar, Layout, Unproven

Tail = Callable[[int], str]
_REASONING = re.compile(rf"\s|{TAG.pattern}")
_OPENED = re.compile(rf"(?:{_REASONING.pattern})*\Z")


@dataclass(frozen=True)
class Turn:
    """What an assistant produces: `text[start:end]`, from the end of its header to the end of its closing token.

    `closing` is that token's text, None where the template writes none. `diverges` says that the template shows the
    finished turn with another beginning than its inference prompt has; the turn starts where the two part.
    """

    message: int
    start: int
    end: int
    closing: str | None
    diverges: bool = False


@dataclass(frozen=True)
class Tails:
    """The template's own text at the end of shorter conversations; each is rendered only when it is asked for.

    Attributes:
        prompt: index of a message -> the end of the inference prompt that it answers.
        finished: index of a message -> the end of the conversation whose last message it is.
    """

    prompt: Tail
    finished: Tail


def assistant_turns(
    layout: Layout, assistants: Sequence[int], with_calls: Collection[int], grammar: Grammar, tails: Tails
) -> list[Turn]:
    """What each assistant message produces, in order of position.

    Args:
        layout: the rendered conversation.
        assistants: indices of the assistant messages.
        with_calls: indices of those that call tools.
        grammar: of the template.
        tails: asked where no header of the grammar stands before a message, or no closing token behind a tool call.

    Returns:
        A turn for each message that the template renders at all.

    Raises:
        Unproven: a turn's beginning or end can't be told.
    """
    turns = []
    for message in assistants:
        own = [i for i, slot in enumerate(layout.slots) if slot.message == message]
        turn = (
            _turn(layout, own, message in with_calls, grammar, tails)
            if own
            else _turn_without_text(layout, message, grammar)
        )
        if turn is not None:
            turns.append(turn)
    turns.sort(key=lambda turn: turn.start)
    for before, after in pairwise(turns):
        if before.end > after.start:
            raise Unproven(f"the turns of messages {before.message + 1} and {after.message + 1} overlap")
    return turns


def _turn(layout: Layout, own: list[int], calls: bool, grammar: Grammar, tails: Tails) -> Turn:
    slots, text = layout.slots, layout.text
    own = _without_echoes(layout, own, grammar)
    first, last = slots[own[0]], slots[own[-1]]
    floor = slots[own[0] - 1].end if own[0] else 0
    start, diverges = _after_header(text, floor, first.start, grammar, calls)
    if start is None:
        tail = tails.prompt(first.message)
        start = floor + len(tail)
        if not text.startswith(tail, floor) or not _may_begin(text, start, first.start, calls, grammar):
            raise Unproven(f"no assistant header stands before message {first.message + 1}")
    ceiling = slots[own[-1] + 1].start if own[-1] + 1 < len(slots) else len(text)
    closing = _closing(text, last.end, ceiling, grammar)
    if closing is not None:
        return Turn(first.message, start, closing.end(), closing.group(), diverges)
    brackets = tails.finished(first.message) if calls else ""
    if not text.startswith(brackets, last.end):
        raise Unproven(f"the end of the tool calls of message {first.message + 1} can't be told")
    return Turn(first.message, start, last.end + len(brackets), None, diverges)


def _without_echoes(layout: Layout, own: list[int], grammar: Grammar) -> list[int]:
    """The slots of a message's own turn: some templates name a called function again before the tool's answer.

    Raises:
        Unproven: the slots are not one turn, and what repeats them does not come behind its closing token.
    """
    slots, seen = layout.slots, set[int]()
    for count, i in enumerate(own):
        if slots[i].number in seen:
            is_over = own[count - 1] == i - 1 and _closing(layout.text, slots[i - 1].end, slots[i].start, grammar)
            if is_over and {slots[j].number for j in own[count:]} <= seen:
                own = own[:count]
                break
        seen.add(slots[i].number)
    if own[-1] - own[0] + 1 != len(own) or len({slots[i].number for i in own}) != len(own):
        raise Unproven(f"the chat template repeats message {slots[own[0]].message + 1} or mixes it with another")
    return own


def _turn_without_text(layout: Layout, message: int, grammar: Grammar) -> Turn | None:
    """The turn of a message that shows no text of its own: its header must be the only one between its neighbours."""
    start = max((slot.end for slot in layout.slots if slot.message < message), default=0)
    end = min((slot.start for slot in layout.slots if slot.message > message), default=len(layout.text))
    stem = _stem(grammar.headers[-1]) if grammar.headers else ""
    headers = layout.text.count(stem, start, end) if stem else 2
    if start > end or headers > 1:
        raise Unproven(f"message {message + 1} shows no text of its own, so its place can't be told")
    at = layout.text.find(stem, start, end)
    closing = None if at < 0 else _closing(layout.text, at + len(stem), end, grammar)
    begin, diverges = _after_header(layout.text, start, closing.start() if closing else end, grammar)
    if begin is None:
        return None
    return Turn(message, begin, closing.end() if closing else begin, closing.group() if closing else None, diverges)


def _after_header(text: str, start: int, end: int, grammar: Grammar, calls: bool = False) -> tuple[int | None, bool]:
    """Where the header that stands last in `text[start:end]` ends, and whether it is not quite the prompt's."""
    for number, header in enumerate(grammar.headers):
        found = text.rfind(header, start, end)
        if found >= 0 and (number == 0 or calls or grammar.fillers.match(text, found + len(header), end)):
            return found + len(header), number > 0
    for header in grammar.headers:
        stem = _stem(header)
        found = text.rfind(stem, start, end) if stem else -1
        if found >= 0:
            parting = found + len(stem)
            for piece in _REASONING.finditer(header, len(stem)):
                if not text.startswith(piece.group(), parting):
                    break
                parting += len(piece.group())
            if grammar.fillers.match(text, parting, end):
                return parting, True
    return None, False


def _may_begin(text: str, start: int, end: int, calls: bool, grammar: Grammar) -> bool:
    """True if what stands between an inference prompt without header and a message's text is no header."""
    if not calls:
        return _OPENED.match(text, start, end) is not None
    return not grammar.headers or grammar.fillers.match(text, start, end) is not None


def _stem(header: str) -> str:
    """The header without the reasoning tags and the white space at its end; "" if no word is left."""
    stem = _OPENED.sub("", header)
    return stem if any(map(str.isalnum, stem)) else ""


def _closing(text: str, start: int, end: int, grammar: Grammar) -> re.Match[str] | None:
    """The token that closes the turn whose text ends at `start`, before `end`."""
    tokens = grammar.controls.finditer(text, start, end)
    return next((token for token in tokens if token.group() in grammar.closings), None)


def user_turn_starts(layout: Layout, users: Collection[int], systems: Collection[int], header: str) -> list[int]:
    """Positions where a user's turn begins, in order: older turns can be taken out between two of them.

    Empty where that would not be clean: the text before the first one must be the system's alone.
    """
    starts: list[int] = []
    for i, slot in enumerate(layout.slots):
        if slot.message in users and header and layout.before(i).endswith(header):
            starts.append(slot.start - len(header))
        elif bool(starts) == (slot.message in systems):
            return []
    return starts
