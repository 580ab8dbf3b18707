"""What happens to a row that is longer than `max_length`. Nothing is ever added to a cut row, no end token either."""

from __future__ import annotations

from dataclasses import dataclass

from sft_toolkit.args import TooLong
from sft_toolkit.data.conversation import IGNORED
from sft_toolkit.data.render import Tokens

TOO_LONG = "too_long"
NO_SUPERVISED_TOKEN = "no_supervised_token"


@dataclass(frozen=True)
class Fitted:
    """The row as it is trained on, or the reason why it is not.

    Attributes:
        tokens: at most `max_length` of them, one learned at least; None for a dropped row.
        reason: "too_long" or "no_supervised_token" for a dropped row, else None.
        truncated: tokens were taken out of the row.
    """

    tokens: Tokens | None
    reason: str | None = None
    truncated: bool = False


def fit(tokens: Tokens, max_length: int, policy: TooLong) -> Fitted:
    """Applies a length policy to one row.

    Args:
        tokens: the row.
        max_length: most tokens of a row.
        policy: `drop` and `error` give the reason "too_long" (the caller raises for `error`). `truncate_right` keeps
            the first `max_length` tokens. `cut_at_turn` keeps whole turns from the left. `truncate_prompt_left` takes
            tokens out of the prompt: of a conversation the oldest turns, so that the system text, the last user turn
            and the answer stay whole; of other rows the beginning of the prompt after bos. Where a policy can't make
            a row fit, the reason is "too_long".
    """
    if len(tokens.input_ids) <= max_length:
        kept, truncated = tokens, False
    else:
        cut = _shortened(tokens, max_length, policy)
        if cut is None:
            return Fitted(None, TOO_LONG)
        kept, truncated = cut, True
    # The first token has nothing before it to be predicted from: its label is learned by no loss.
    if kept.labels[1:].count(IGNORED) == len(kept.labels) - 1:
        return Fitted(None, NO_SUPERVISED_TOKEN)
    return Fitted(kept, truncated=truncated)


def _shortened(tokens: Tokens, max_length: int, policy: TooLong) -> Tokens | None:
    if policy == "truncate_right":
        return _until(tokens, max_length)
    if policy == "cut_at_turn":
        ends = [end for end in tokens.turn_ends if end <= max_length]
        return _until(tokens, ends[-1]) if ends else None
    if policy == "truncate_prompt_left":
        room = len(tokens.input_ids) + tokens.head - max_length
        start = next((start for start in tokens.starts if start >= room), None)
        if start is not None and any(label != IGNORED for label in tokens.labels[start:]):
            return _without(tokens, start)
    return None


def _until(tokens: Tokens, stop: int) -> Tokens:
    return Tokens(
        tokens.input_ids[:stop],
        tokens.labels[:stop],
        tuple(end for end in tokens.turn_ends if end <= stop),
        min(tokens.head, stop),
        tuple(start for start in tokens.starts if start < stop),
        tokens.notes,
        None if tokens.weights is None else tokens.weights[:stop],
    )


def _without(tokens: Tokens, start: int) -> Tokens:
    """The row without what stands between its head and `start`."""
    head, gone = tokens.head, start - tokens.head
    return Tokens(
        tokens.input_ids[:head] + tokens.input_ids[start:],
        tokens.labels[:head] + tokens.labels[start:],
        tuple(end - gone for end in tokens.turn_ends if end > start),
        head,
        tuple(at - gone for at in tokens.starts if at >= start),
        tokens.notes,
        None if tokens.weights is None else tokens.weights[:head] + tokens.weights[start:],
    )
