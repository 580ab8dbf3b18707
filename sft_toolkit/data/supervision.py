"""Which turns of a conversation are learned: the `supervise` modes and the weights of single messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from sft_toolkit.args import Supervise
from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.turns import Turn

IDLE_WEIGHT = "weight 1 on a message that is not the assistant's: it stays unlearned"


class Span(NamedTuple):
    """A learned stretch `text[start:end]`. Its last token must be `closing`, where that is not None."""

    start: int
    end: int
    closing: str | None = None


def learned_spans(conversation: Conversation, turns: Iterable[Turn], length: int, supervise: Supervise) -> list[Span]:
    """The learned stretches of a rendered conversation, in order.

    Args:
        conversation: whose messages' weights are 0, 1 or None.
        turns: the assistant's, in order of position.
        length: characters of the rendered text.
        supervise: the mode; see `Renderer`.
    """
    messages = conversation.messages
    if supervise == "all":
        rims = [rim for turn in turns if messages[turn.message].weight == 0 for rim in (turn.start, turn.end)]
        return [Span(a, b) for a, b in zip([0, *rims[1::2]], [*rims[::2], length], strict=True) if a < b]
    assistants = [index for index, message in enumerate(messages) if message.role == "assistant"]
    if supervise == "completion" and conversation.completion_from is not None:
        chosen = [index for index in assistants if index >= conversation.completion_from]
    else:
        chosen = assistants if supervise == "assistant" else assistants[-1:]
    return [
        Span(turn.start, turn.end, turn.closing)
        for turn in turns
        if turn.message in chosen and messages[turn.message].weight != 0
    ]


def weight_problem(messages: Iterable[Message], supervise: Supervise) -> str | None:
    """Why the messages' weights can't be followed, or None."""
    for number, message in enumerate(messages, start=1):
        if message.weight not in (None, 0, 1):
            return f"message {number}: weight is {message.weight}; only 0 (not learned) and 1 are supported"
        if message.weight == 0 and message.role != "assistant" and supervise == "all":
            return f"message {number}: weight 0 on a {message.role} message has no meaning with supervise: all"
    return None


def weight_remarks(messages: Sequence[Message], supervise: Supervise) -> list[str]:
    """What a reader should know about weights that change nothing."""
    idle = any(message.weight == 1 for message in messages if message.role != "assistant")
    return [IDLE_WEIGHT] if idle and supervise != "all" else []
