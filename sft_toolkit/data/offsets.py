"""From characters to tokens: which tokens hold a stretch of text, with nothing lost and nothing foreign among them."""

from __future__ import annotations

from dataclasses import dataclass

from sft_toolkit.data.encode import Alignment
from sft_toolkit.data.spans import Unproven


@dataclass(frozen=True)
class TokenRange:
    """Tokens `first` to `stop` (not included).

    `swallowed` is true where white space at the beginning of the stretch belongs to a control token before it.
    """

    first: int
    stop: int
    swallowed: bool = False


def token_range(encoding: Alignment, text: str, start: int, end: int) -> TokenRange:
    """The tokens that hold `text[start:end]`.

    A token that holds a character of it is among them, even where it also holds white space from outside.

    Args:
        encoding: of `text`, without added special tokens. Tokens that hold trimmed white space have empty offsets.

    Raises:
        Unproven: a token holds both text from inside and text other than white space from outside.
    """
    first, swallowed = token_at(encoding, start, len(text)), False
    begin, finish = _characters(encoding, first, len(text))
    if begin < start:
        if not text[begin:start].isspace():
            if text[start : min(finish, end)].strip():
                raise Unproven(f"one token holds both {text[begin:start]!r} and the learned {text[start:finish]!r}")
            first, swallowed = first + 1, True
    else:
        while first > 0 and _characters(encoding, first - 1, len(text))[0] > start:
            first -= 1

    stop = token_at(encoding, end, len(text))
    begin, finish = _characters(encoding, stop, len(text))
    if begin < end:
        if text[end:finish].strip():
            raise Unproven(f"one token holds both the learned {text[begin:end]!r} and {text[end:finish]!r}")
        stop += 1
    else:
        while stop > first and _after(_characters(encoding, stop - 1, len(text)), end):
            stop -= 1
    return TokenRange(first, max(first, stop), swallowed)


def token_at(encoding: Alignment, character: int, length: int) -> int:
    """The token that holds this character or, where none does, the nearest one after it; all tokens at the end."""
    for position in range(character, length):
        token = encoding.char_to_token(position)
        if token is not None:
            return int(token)
    return len(encoding)


def starts_token(encoding: Alignment, character: int) -> bool:
    """True if a token begins exactly at this character."""
    token = encoding.char_to_token(character)
    offsets = None if token is None else encoding.token_to_chars(token)
    return offsets is not None and offsets[0] == character


def _characters(encoding: Alignment, token: int, length: int) -> tuple[int, int]:
    """The token's offsets; past the last token, the end of the text."""
    offsets = encoding.token_to_chars(token) if token < len(encoding) else None
    return offsets or (length, length)


def _after(offsets: tuple[int, int], end: int) -> bool:
    # A token of trimmed white space keeps only the end of its place: at `end` exactly, the place lies before.
    return offsets[0] > end or (offsets[0] == end and offsets[1] > end)
