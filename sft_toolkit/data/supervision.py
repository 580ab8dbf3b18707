"""Which turns of a conversation are learned: the `supervise` modes and the weights of single messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sft_toolkit.args import Supervise
from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.turns import Turn

IDLE_WEIGHT = "a weight above 0 on a message that is not the assistant's: it stays unlearned"


class Span(NamedTuple):
    """A learned stretch `text[start:end]`, whose losses count `weight` times.

    Its last token must be `closing`, where that is not None.
    """

    start: int
    end: int
    closing: str | None = None
    weight: float = 1.0


def learned_spans(conversation: Conversation, turns: Iterable[Turn], length: int, supervise: Supervise) -> list[Span]:
    """The learned stretches of a rendered conversation, in order.

    Args:
        conversation: whose messages' weights may be fractions; a turn of weight 0 is not learned.
        turns: the assistant's, in order of position.
        length: characters of the rendered text.
        supervise: the mode; see `Renderer`.
    """
    messages = conversation.messages
    if supervise == "all":
        return _everything(messages, turns, length)
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if supervise == "completion" and conversation.completion_from is not None:
        chosen = [index for index in assistants if index >= conversation.completion_from]
    else:
        chosen = assistants if supervise == "assistant" else assistants[-1:]
    return [
        Span(turn.start, turn.end, turn.closing, _weight(messages[turn.message]))
        for turn in turns
        if turn.message in chosen and messages[turn.message].weight != 0
    ]


def _everything(messages: Sequence[Message], turns: Iterable[Turn], length: int) -> list[Span]:
    """The whole text, cut where an assistant's turn weighs otherwise."""
    spans, at = [], 0
    for turn in turns:
        weight = _weight(messages[turn.message])
        if weight != 1.0:
            spans += [Span(at, turn.start), Span(turn.start, turn.end, weight=weight)]
            at = turn.end
    return [span for span in (*spans, Span(at, length)) if span.start < span.end and span.weight]


def _weight(message: Message) -> float:
    return 1.0 if message.weight is None else message.weight


def weight_problem(messages: Iterable[Message], supervise: Supervise) -> str | None:
    """Why the messages' weights can't be followed, or None."""
    for number, message in enumerate(messages, start=1):
        if supervise == "all" and message.role != "assistant" and message.weight not in (None, 1):
            return (
                f"message {number}: weight {message.weight:g} on a {message.role} message: with supervise: all only an "
                "assistant's turn can weigh less"
            )
    return None


def weight_remarks(messages: Sequence[Message], supervise: Supervise) -> list[str]:
    """What a reader should know about weights that change nothing."""
    idle = any(message.weight for message in messages if message.role != "assistant")
    return [IDLE_WEIGHT] if idle and supervise != "all" else []
