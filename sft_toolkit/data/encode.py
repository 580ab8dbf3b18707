"""Texts -> ids, and which characters each token holds.

The offsets that the tokenizers library computes cost a quarter of the encoding. A byte-level tokenizer needs none: each
of its tokens stands for known bytes, so the ids alone say where each token is. That is proven for every text: the bytes
of its tokens, joined, must be the text. Where they are not (a normaliser changed it, a token swallowed a blank), and
for all other tokenizers, the library's offsets are taken.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN = b"\xff"
"""Stands for a token whose bytes aren't known: no text in UTF-8 holds it, so the proof fails."""


class Alignment(Protocol):
    """Which token holds a character and which characters a token holds; `tokenizers.Encoding` is one."""

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token that holds this character, or None."""

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters of a token: the first, and the one behind the last."""

    def __len__(self) -> int: ...


class ByteAlignment:
    """The alignment of a text whose tokens' bytes, joined, are its own.

    Args:
        raw: the text in UTF-8.
        parts: the bytes of each token; none is empty.
    """

    def __init__(self, raw: bytes, parts: Sequence[bytes]) -> None:
        self._ends = list(accumulate(map(len, parts)))
        self._char_starts: list[int] | None = None
        if not raw.isascii():
            first_bytes = (np.frombuffer(raw, dtype=np.uint8) & 0xC0) != 0x80
            self._char_starts = np.flatnonzero(first_bytes).tolist()

    def char_to_token(self, char_pos: int) -> int | None:
        """The first token that holds this character, or None past the end."""
        starts = self._char_starts
        if starts is not None:
            char_pos = starts[char_pos] if char_pos < len(starts) else self._ends[-1]
        token = bisect_right(self._ends, char_pos)
        return token if token < len(self._ends) else None

    def token_to_chars(self, token_index: int) -> tuple[int, int] | None:
        """The characters of a token; one that is cut between two tokens belongs to both."""
        begin, end = self._ends[token_index - 1] if token_index else 0, self._ends[token_index]
        if self._char_starts is None:
            return begin, end
        return bisect_right(self._char_starts, begin) - 1, bisect_right(self._char_starts, end - 1)

    def __len__(self) -> int:
        return len(self._ends)


class TextEncoder:
    """Encodes texts, without added special tokens, exactly as `tokenizer(texts)` does.

    Args:
        tokenizer: a fast one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
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
        encodings = self._tokenizer.backend_tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        if encodings[0].ids != sample:
            return [None] * len(texts)
        results: list[tuple[Alignment, list[int]] | None] = []
        for text, encoding in zip(texts, encodings, strict=True):
            ids, raw = encoding.ids, text.encode()
            parts = list(map(self._bytes.__getitem__, ids))
            results.append((ByteAlignment(raw, parts), ids) if b"".join(parts) == raw else None)
        return results


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


def _byte_of_symbol() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): printable bytes stand for themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
