"""Ids and alignments are those of the tokenizers library, whichever way they were found."""

from __future__ import annotations

import random
from typing import Any

import pytest
from tokenizers import AddedToken, normalizers
from transformers import PreTrainedTokenizerFast

from sft_toolkit.data import encode
from sft_toolkit.data.encode import ByteAlignment, TextEncoder, TokenBytes
from tests.tiny import tiny_tokenizer

MERGES = [("Ġ", "h"), ("Ġh", "i"), ("a", "b"), ("Ã", "©"), ("æ", "Ĺ"), ("æĹ", "¥"), ("Ċ", "Ċ")]
LETTERS = [*"ab h i\n\t", "é", "日", "本", "🙂", "<|im_end|>", "<|im_start|>", "  ", "\r\n", "\u00a0", "ſ"]


def texts(count: int, seed: int) -> list[str]:
    stream = random.Random(seed)
    return ["".join(stream.choices(LETTERS, k=stream.randint(1, 40))) for _ in range(count)]


def by_library(tokenizer: PreTrainedTokenizerFast, text: str) -> Any:
    return tokenizer([text], add_special_tokens=False).encodings[0]


def only_bytes(tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch) -> TextEncoder:
    """An encoder that may not fall back to offsets but for its one sample."""
    encoder = TextEncoder(tokenizer)
    with_offsets = encoder._with_offsets

    def sample_alone(asked: list[str]) -> Any:
        assert len(asked) <= 1
        return with_offsets(asked)

    monkeypatch.setattr(encoder, "_with_offsets", sample_alone)
    return encoder


@pytest.mark.parametrize("merges", [None, MERGES])
def test_bytes_give_the_ids_and_places_of_the_library(
    merges: list[tuple[str, str]] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = tiny_tokenizer(merges=merges)
    written = texts(200, seed=1)
    for text, (alignment, ids) in zip(written, only_bytes(tokenizer, monkeypatch)(written), strict=True):
        expected = by_library(tokenizer, text)
        assert isinstance(alignment, ByteAlignment)
        assert ids == expected.ids
        assert len(alignment) == len(expected)
        assert [alignment.char_to_token(i) for i in range(len(text))] == [
            expected.char_to_token(i) for i in range(len(text))
        ]
        assert [alignment.token_to_chars(i) for i in range(len(ids))] == [
            expected.token_to_chars(i) for i in range(len(ids))
        ]
        assert alignment.char_to_token(len(text)) is None


def test_the_bytes_of_a_token_are_those_that_it_decodes_to() -> None:
    tokenizer = tiny_tokenizer(merges=MERGES)
    pieces = TokenBytes(tokenizer)
    assert pieces[4] == b"<|im_end|>"
    for text in ("é", "日", " hi", "\n\n", "a b"):
        assert b"".join(pieces[i] for i in tokenizer(text)["input_ids"]) == text.encode()


def test_a_text_that_the_tokenizer_changes_gets_its_offsets_and_the_others_do_not() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    written = ["plain", "e\u0301", "ascii", "more"]
    found = TextEncoder(tokenizer)(written)
    assert [isinstance(alignment, ByteAlignment) for alignment, _ in found] == [True, False, True, True]
    assert [ids for _, ids in found] == [by_library(tokenizer, text).ids for text in written]


def test_a_token_that_swallows_blanks_is_no_text_of_its_own() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<x>", lstrip=True, rstrip=True)]})
    encoder = TextEncoder(tokenizer)
    (first, ids), (second, _) = encoder(["a <x> b", "plain"])
    assert not isinstance(first, ByteAlignment)
    assert isinstance(second, ByteAlignment)
    assert ids == by_library(tokenizer, "a <x> b").ids


def test_where_most_texts_have_no_proof_offsets_are_taken_at_once() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    encoder = TextEncoder(tokenizer)
    encoder(["A", "B", "c"])
    assert encoder._by_bytes is False
    assert [ids for _, ids in encoder(["A"])] == [by_library(tokenizer, "A").ids]


def test_padding_of_an_earlier_call_changes_nothing() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    (_, first), (_, second) = TextEncoder(tokenizer)(["a", "bcd"])
    assert (len(first), len(second)) == (1, 3)


def test_what_comes_again_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    encoder = TextEncoder(tokenizer)
    asked: list[str] = []
    proven = encoder._proven

    def noted(piece: str, ids: list[int]) -> Any:
        asked.append(piece)
        return proven(piece, ids)

    monkeypatch.setattr(encoder, "_proven", noted)
    system = "<|im_start|>system\nlong text<|im_end|>"
    first = encoder([f"{system}{i}" for i in "abc"])
    second = encoder([f"{system}d", "e"])
    assert asked == ["system\nlong text", "a", "b", "c", "d", "e"]
    for text, (_, ids) in zip([f"{system}{i}" for i in "abcd"], [*first, *second], strict=False):
        assert ids == by_library(tokenizer, text).ids


def test_only_the_last_used_pieces_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "REMEMBERED", 2)
    monkeypatch.setattr(encode, "LONGEST_REMEMBERED", 3)
    encoder = TextEncoder(tiny_tokenizer())
    end = "<|im_end|>"
    encoder([f"aa{end}aa", f"bb{end}bb", f"once{end}", f"too long{end}too long"])
    assert list(encoder._remembered) == ["aa", "bb"]
    encoder([f"cc{end}cc", f"aa{end}"])
    assert list(encoder._remembered) == ["cc", "aa"] or list(encoder._remembered) == ["aa", "cc"]


def test_special_tokens_that_are_read_as_text_cut_nothing() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.split_special_tokens = True
    ((alignment, ids),) = TextEncoder(tokenizer)(["a<|im_end|>b"])
    assert ids == by_library(tokenizer, "a<|im_end|>b").ids
    assert len(ids) == 12
    assert len(alignment) == 12


def test_a_token_that_is_looked_for_after_normalising_cuts_nothing() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<b>", normalized=True), AddedToken("<b><c>", normalized=False)])
    written = ["x<b><c>y", "x<b>y", "<b>", "<b><b><c>"]
    assert [ids for _, ids in TextEncoder(tokenizer)(written)] == [by_library(tokenizer, text).ids for text in written]


def test_no_text_gives_nothing() -> None:
    assert TextEncoder(tiny_tokenizer())([]) == []
