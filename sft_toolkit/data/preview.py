"""What exactly is trained, for the eye: prepared rows in the terminal, as JSON lines, or as a page."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from sft_toolkit.data.collate import IGNORED

_UNSEEN = {
    **{code: chr(0x2400 + code) for code in range(0x20) if chr(code) not in "\n\t"},  # ESC is shown as the sign ␛
    0x7F: "\u2421",
    **{
        code: f"\\u{code:04x}"
        for codes in (range(0x80, 0xA0), range(0x2028, 0x202F), range(0x2066, 0x206A), [0x200B, 0xFEFF])
        for code in codes
    },
}


def readable(text: str) -> str:
    """The text with signs for what can't be seen, or would command a terminal or turn the direction of writing.

    Line ends, tabs, and what joins or selects glyphs stay as they are.
    """
    return text.translate(_UNSEEN)


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind.

    Attributes:
        text: what they decode to, special tokens spelled out.
        start, stop: their positions in the row.
        supervised: they are learned.
        special: they are control tokens, such as `<|im_end|>`.
        weight: factor of their losses.
    """

    text: str
    start: int
    stop: int
    supervised: bool
    special: bool
    weight: float = 1.0


def records(tokens: Dataset, tokenizer: PreTrainedTokenizerBase, rows: int) -> Iterator[dict[str, Any]]:
    """The first `rows` rows of a token data set, each as

    `{"row": N, "source": FILE, "input_ids": [...], "labels": [...], "supervised": [TEXT, ...]}`,
    where `supervised` holds the decoded text of each unbroken run of learned tokens. A row of which some tokens weigh
    otherwise than 1 has `loss_weights` too.
    """
    for row in tokens.select(range(min(rows, len(tokens)))):
        ids, labels = row["input_ids"], row["labels"]
        runs = groupby(range(len(ids)), key=lambda i: labels[i] != IGNORED)
        supervised = [_decode(tokenizer, [ids[i] for i in run]) for learned, run in runs if learned]
        record = {"row": row["row"], "source": row["source"], "input_ids": ids, "labels": labels}
        weights = row.get("loss_weights")
        yield {**record, "supervised": supervised, **({} if weights is None else {"loss_weights": weights})}


def json_lines(shown: Iterable[dict[str, Any]]) -> Iterator[str]:
    """One JSON object a line, without a line end.

    JSON may hold U+0085, U+2028 and U+2029 as they are, but for Python's `splitlines` a line ends there.
    """
    texts = (json.dumps(record, ensure_ascii=False) for record in shown)
    return (text.translate({ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"}) for text in texts)


def pieces(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> list[Piece]:
    """The row's text, cut wherever supervision or the kind of token changes."""
    ids, labels = record["input_ids"], record["labels"]
    control = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    result = []
    before = ""
    weights = record.get("loss_weights") or [1.0] * len(ids)

    def kind(i: int) -> tuple[bool, bool, float]:
        return labels[i] != IGNORED, ids[i] in control, weights[i] if labels[i] != IGNORED else 1.0

    for (supervised, special, weight), run in groupby(range(len(ids)), key=kind):
        positions = list(run)
        start, stop = positions[0], positions[-1] + 1
        # Decoded from the start of the row, because some tokenizers strip the first blank of whatever they decode.
        after = _decode(tokenizer, ids[:stop])
        text = after.removeprefix(before) if after.startswith(before) else _decode(tokenizer, ids[start:stop])
        result.append(Piece(text, start, stop, supervised, special, weight))
        before = after
    return result


def terminal(record: dict[str, Any], tokenizer: PreTrainedTokenizerBase, color: bool) -> str:
    """A row for the terminal: what is learned is green, control tokens are inverted, the rest is dim.

    Without colour, what is learned stands between the brackets of `MARKS`. A weight stands before what it weighs.
    """
    painted = []
    weight = 1.0
    for piece in pieces(record, tokenizer):
        painted.append(f"{piece.weight:g}×" if piece.supervised and piece.weight not in (weight, 1.0) else "")
        painted.append(_painted(piece, color))
        weight = piece.weight if piece.supervised else 1.0
    return f"{title(record)}\n{''.join(painted)}"


MARKS = ("⟦", "⟧")
LINE_END = "↵"
_GREEN, _DIM, _INVERTED, _RESET = "\033[32m", "\033[2m", "\033[7m", "\033[0m"


def _painted(piece: Piece, color: bool) -> str:
    text = readable(piece.text)
    if piece.supervised:
        text = text.replace("\n", f"{LINE_END}\n")  # a learned line end has no colour to be seen by
    if not color:
        return text.join(MARKS) if piece.supervised else text
    style = (_GREEN if piece.supervised else _DIM) + (_INVERTED if piece.special else "")
    # Styles end at each line end, so that a pager or a narrow terminal never paints its margin.
    return "\n".join(f"{style}{line}{_RESET}" if line else "" for line in text.split("\n"))


STOPS = "The model will learn to stop:"


def stopping(tokens: Dataset, tokenizer: PreTrainedTokenizerBase, end_of_turn: tuple[str, int] | None) -> str:
    """Whether the model will learn to end its answers, in words, from all rows of a token data set.

    Args:
        end_of_turn: text and id of the token that closes an assistant turn, where the template has one; the
            tokenizer's eos counts as an end too.
    """
    ends = {end_of_turn[1]} if end_of_turn else set()
    if tokenizer.eos_token_id is not None:
        ends.add(int(tokenizer.eos_token_id))
    rows, taught = len(tokens), _rows_with(tokens, ends)
    token = f"{end_of_turn[0]} (id {end_of_turn[1]})" if end_of_turn else "an end token"
    if rows and taught == rows:
        return f"{STOPS} {token} is supervised in all {rows:,} rows."
    if taught:
        return (
            f"The model will learn to stop from {taught:,} of {rows:,} rows; in the others no end token is supervised: "
            "they were cut to max_length, or bring their own labels."
        )
    return (
        f"The model will NOT learn to stop: {token} is supervised in no row, so its answers run on until the length "
        "limit. Use a chat template that ends each turn with a token of its own; if rows were cut, raise max_length."
    )


def _rows_with(tokens: Dataset, ends: set[int]) -> int:
    """Rows of which some label is one of `ends`."""
    count = 0
    for batch in tokens.select_columns(["labels"]).with_format("arrow").iter(batch_size=1000):
        for labels in batch["labels"].chunks:
            hit = np.isin(labels.flatten().to_numpy(), list(ends))
            row_of_label = np.repeat(np.arange(len(labels)), labels.value_lengths().to_numpy())
            count += len(np.unique(row_of_label[hit]))
    return count


def title(record: dict[str, Any]) -> str:
    """`row 7 of train.jsonl: 143 tokens, 25 supervised`."""
    supervised = sum(label != IGNORED for label in record["labels"])
    return f"row {record['row']} of {record['source']}: {len(record['input_ids'])} tokens, {supervised} supervised"


def _decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
