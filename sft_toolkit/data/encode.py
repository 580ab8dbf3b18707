"""Texts -> ids, and which characters each token holds.

The offsets that the tokenizers library computes cost a quarter of the encoding. A byte-level tokenizer needs none: each
of its tokens stands for known bytes, so the ids alone say where each token is. That is proven for every text: the bytes
of its tokens, joined, must be the text. And since such a tokenizer cuts a text at its control tokens before anything
else, what stands between two of them is encoded by itself: system texts, tool schemas and whatever else comes again in
row after row are encoded once.

Where the proof fails (a normaliser changed the text, a token swallowed a blank), and for all other tokenizers, the
library's offsets are taken.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN = b"\xff"
"""Stands for a token whose bytes aren't known: no text in UTF-8 holds it, so the proof fails."""

REMEMBERED = 256
"""Segments that are kept for later rows, the last used ones."""

LONGEST_REMEMBERED = 50_000
"""Characters of the longest one, so that memory stays small."""


class Alignment(Protocol):
    """Which token holds a character and which characters a token holds; `tokenizers.Encoding` is one."""

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token that holds this character, or None."""

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters of a token: the first, and the one behind the last."""

    def __len__(self) -> int: ...


class Segment:
    """A stretch of text between control tokens, or one of these.

    Args:
        ids: of its tokens.
        parts: the bytes of each token.
        size: of all of them, in bytes.
    """

    def __init__(self, ids: list[int], parts: list[bytes], size: int) -> None:
        self.ids, self.parts, self.size = ids, parts, size

    @cached_property
    def ends(self) -> list[int]:
        """Where each token ends, in bytes from the beginning; most segments are never asked."""
        return list(accumulate(map(len, self.parts)))


class ByteAlignment:
    """The alignment of a text whose tokens' bytes, joined, are its own.

    Args:
        text: what the segments are together.
        segments: in order; none is empty.
    """

    def __init__(self, text: str, segments: Sequence[Segment]) -> None:
        self.ids: list[int] = []
        self._segments = segments
        self._bytes_before, self._tokens_before, size = [0], [0], 0
        for segment in segments:
            self.ids += segment.ids
            size += segment.size
            self._bytes_before.append(size)
            self._tokens_before.append(len(self.ids))
        self._char_starts: list[int] | None = None
        if not text.isascii():
            first_bytes = (np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0) != 0x80
            self._char_starts = np.flatnonzero(first_bytes).tolist()

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token that holds this character, or None past the end."""
        starts, byte = self._char_starts, char_pos
        if starts is not None:
            byte = starts[char_pos] if char_pos < len(starts) else self._bytes_before[-1]
        place = bisect_right(self._bytes_before, byte) - 1
        if place == len(self._segments):
            return None
        within = byte - self._bytes_before[place]
        return self._tokens_before[place] + (bisect_right(self._segments[place].ends, within) if within else 0)

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters of a token; one that is cut between two tokens belongs to both."""
        place = bisect_right(self._tokens_before, token_index) - 1
        ends, before = self._segments[place].ends, self._bytes_before[place]
        within = token_index - self._tokens_before[place]
        begin, end = before + (ends[within - 1] if within else 0), before + ends[within]
        if self._char_starts is None:
            return begin, end
        return bisect_right(self._char_starts, begin) - 1, bisect_right(self._char_starts, end - 1)

    def __len__(self) -> int:
        return len(self.ids)


class TextEncoder:
    """Encodes texts, without added special tokens, exactly as `tokenizer(texts)` does.

    Args:
        tokenizer: a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._controls = _control_tokens(tokenizer)
        longest_first = sorted(self._controls, key=len, reverse=True)
        self._cut = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._remembered: OrderedDict[str, Segment | None] = OrderedDict()
        self._by_bytes = type(tokenizer.backend_tokenizer.decoder).__name__ == "ByteLevel"

    def __call__(self, texts: list[str]) -> list[tuple[Alignment, list[int]]]:
        """The alignment and the ids of each text, in order."""
        if not texts or not self._by_bytes:
            return self._with_offsets(texts)
        found = self._from_bytes(texts)
        missing = [i for i, one in enumerate(found) if one is None]
        # Where most texts have no proof, encoding twice is the more expensive way.
        self._by_bytes = 2 * len(missing) <= len(texts)
        by_offsets = dict(zip(missing, self._with_offsets([texts[i] for i in missing]), strict=True))
        return [by_offsets[i] if one is None else one for i, one in enumerate(found)]

    def _with_offsets(self, texts: list[str]) -> list[tuple[Alignment, list[int]]]:
        if not texts:
            return []
        batch = self._tokenizer(
            texts, add_special_tokens=False, return_attention_mask=False, return_token_type_ids=False, verbose=False
        )
        return list(zip(batch.encodings or (), batch["input_ids"], strict=True))

    def _from_bytes(self, texts: list[str]) -> list[tuple[Alignment, list[int]] | None]:
        # The call leaves the backend without padding and truncation, as the library's own batch call would.
        ((_, sample),) = self._with_offsets(texts[:1])
        pieces = [[piece for piece in self._cut.split(text) if piece] for text in texts]
        known = self._segments(pieces)
        results = [_aligned(text, [known[piece] for piece in own]) for text, own in zip(texts, pieces, strict=True)]
        first = results[0]
        return results if first is None or first[1] == sample else [None] * len(texts)

    def _segments(self, pieces: list[list[str]]) -> dict[str, Segment | None]:
        """Every piece as a segment; None where its tokens are not its bytes."""
        counts = Counter(chain.from_iterable(pieces))
        known: dict[str, Segment | None] = {**self._controls}
        new = [piece for piece in counts if piece not in known and piece not in self._remembered]
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(new, add_special_tokens=False)
        known |= {piece: self._proven(piece, encoding.ids) for piece, encoding in zip(new, encodings, strict=True)}
        for piece, count in counts.items():
            if piece in self._remembered:
                self._remembered.move_to_end(piece)
                known[piece] = self._remembered[piece]
            elif count > 1 and piece not in self._controls and len(piece) <= LONGEST_REMEMBERED:
                self._remembered[piece] = known[piece]
        while len(self._remembered) > REMEMBERED:
            self._remembered.popitem(last=False)
        return known

    def _proven(self, piece: str, ids: list[int]) -> Segment | None:
        parts = list(map(self._bytes.__getitem__, ids))
        joined = b"".join(parts)
        return Segment(ids, parts, len(joined)) if joined == piece.encode() else None


class TokenBytes(dict[int, bytes]):
    """id -> the bytes that it stands for in a byte-level tokenizer, found out on first use.

    An added token stands for its own text.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__({index: str(added).encode() for index, added in tokenizer.added_tokens_decoder.items()})
        self._tokenizer = tokenizer
        self._byte_of = _byte_of_symbol()

    def __missing__(self, index: int) -> bytes:
        token = self._tokenizer.convert_ids_to_tokens(index)
        known = all(symbol in self._byte_of for symbol in token)
        self[index] = found = bytes(map(self._byte_of.__getitem__, token)) if token and known else _UNKNOWN
        return found


def _aligned(text: str, segments: list[Segment | None]) -> tuple[Alignment, list[int]] | None:
    proven = [segment for segment in segments if segment is not None]
    if len(proven) < len(segments):
        return None
    alignment = ByteAlignment(text, proven)
    return alignment, alignment.ids


def _control_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, Segment]:
    """The tokens at which a text is cut before all else; none where one of them reaches beyond its own text."""
    added = tokenizer.added_tokens_decoder
    if tokenizer.split_special_tokens or any(t.lstrip or t.rstrip or t.single_word for t in added.values()):
        return {}
    # A normalised token is looked for later, in what is between the others.
    found = {str(token): index for index, token in added.items() if not token.normalized and str(token)}
    return {text: Segment([index], [text.encode()], len(text.encode())) for text, index in found.items()}


def _byte_of_symbol() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
