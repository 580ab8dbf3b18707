"""The preview shows what is trained, and says whether the model will learn to stop."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from typing import Any, cast

import datasets
import pytest

from sft_toolkit.data import preview
from sft_toolkit.data.preview_page import page
from tests.tiny import chat, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
END = ("<|im_end|>", 4)


def token_rows(*conversations: tuple[str, str], cut: int | None = None) -> datasets.Dataset:
    """Rows as prepared: the answer and its end token are learned. `cut` keeps that many tokens."""
    rows = []
    for number, (user, answer) in enumerate(conversations, 1):
        ids = cast("list[int]", TOKENIZER.apply_chat_template(chat(user, answer), return_dict=False))
        answer_at = len(ids) - 2 - len(answer.encode())
        labels = [-100] * answer_at + ids[answer_at:-1] + [-100]
        rows.append({"input_ids": ids[:cut], "labels": labels[:cut], "row": number, "source": "chat.jsonl"})
    return datasets.Dataset.from_list(rows)


def first(tokens: datasets.Dataset) -> dict[str, Any]:
    return next(preview.records(tokens, TOKENIZER, rows=1))


def test_a_json_line_holds_exactly_the_row_and_its_learned_texts() -> None:
    tokens = token_rows(("a", "b"), ("cc", "dd"))
    lines = list(preview.json_lines(preview.records(tokens, TOKENIZER, rows=1)))
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert list(record) == ["row", "source", "input_ids", "labels", "supervised"]
    assert record["row"] == 1
    assert record["source"] == "chat.jsonl"
    assert record["input_ids"] == tokens[0]["input_ids"]
    assert len(record["input_ids"]) == 23
    assert record["labels"] == [-100] * 20 + [record["input_ids"][20], 4, -100]
    assert record["supervised"] == ["b<|im_end|>"]


def test_each_unbroken_run_of_learned_tokens_is_a_text_of_its_own() -> None:
    ids: list[int] = TOKENIZER("abcdef")["input_ids"]
    labels = [-100, ids[1], ids[2], -100, -100, ids[5]]
    tokens = datasets.Dataset.from_list([{"input_ids": ids, "labels": labels, "row": 9, "source": "x"}])
    assert first(tokens)["supervised"] == ["bc", "f"]


def test_text_beyond_ascii_stays_readable_in_json() -> None:
    line = next(preview.json_lines(preview.records(token_rows(("ä", "日本")), TOKENIZER, rows=5)))
    assert '"supervised": ["日本<|im_end|>"]' in line
    rare = "x\u2028y\x85z\u2029"
    line = next(preview.json_lines(preview.records(token_rows(("a", rare)), TOKENIZER, rows=1)))
    assert line.splitlines() == [line]
    assert json.loads(line)["supervised"] == [f"{rare}<|im_end|>"]


def test_pieces_cover_the_row_and_know_their_kind() -> None:
    pieces = preview.pieces(first(token_rows(("a", "b"))), TOKENIZER)
    assert [(p.text, p.start, p.stop, p.supervised, p.special) for p in pieces] == [
        ("<|im_start|>", 0, 1, False, True),
        ("user\na", 1, 7, False, False),
        ("<|im_end|>", 7, 8, False, True),
        ("\n", 8, 9, False, False),
        ("<|im_start|>", 9, 10, False, True),
        ("assistant\n", 10, 20, False, False),
        ("b", 20, 21, True, False),
        ("<|im_end|>", 21, 22, True, True),
        ("\n", 22, 23, False, False),
    ]


def test_a_character_cut_by_a_change_of_supervision_is_shown_in_parts() -> None:
    ids: list[int] = TOKENIZER("é")["input_ids"]
    record = {"row": 1, "source": "x", "input_ids": ids, "labels": [-100, ids[1]], "supervised": []}
    assert [p.text for p in preview.pieces(record, TOKENIZER)] == ["\ufffd", "\ufffd"]


def test_without_colour_learned_text_stands_in_brackets() -> None:
    assert preview.terminal(first(token_rows(("a", "b"))), TOKENIZER, color=False) == (
        "row 1 of chat.jsonl: 23 tokens, 2 supervised\n"
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n⟦b⟧⟦<|im_end|>⟧\n"
    )


HOSTILE = '</pre></script><img src=x onerror="alert(1)">\x1b[2J\x00\x7f\x9b\r\u202e\ufeff &lt;'
READABLE = '</pre></script><img src=x onerror="alert(1)">␛[2J␀␡\\u009b␍\\u202e\\ufeff &lt;'


class Read(HTMLParser):
    """What a browser makes of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_commands_neither_terminal_nor_browser() -> None:
    record = first(token_rows((HOSTILE, f"👩\u200d👧 é\n{HOSTILE}\n")))
    assert preview.terminal(record, TOKENIZER, color=False).split("\n")[2:] == [
        f"{READABLE}<|im_end|>",
        "<|im_start|>assistant",
        "⟦👩\u200d👧 é↵",
        f"{READABLE}↵",
        "⟧⟦<|im_end|>⟧",
        "",
    ]
    read = Read()
    read.feed(page([record], TOKENIZER, "It will learn to stop."))
    inert = ["html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "span", "article", "pre", "i"]
    assert read.tags == {*inert, "small"}
    assert read.text.count(READABLE) == 2


def test_colour_marks_learned_text_and_control_tokens_and_ends_before_each_line_end() -> None:
    shown = preview.terminal(first(token_rows(("a", "b"))), TOKENIZER, color=True)
    assert shown.split("\n", 1)[1] == (
        "\x1b[2m\x1b[7m<|im_start|>\x1b[0m\x1b[2muser\x1b[0m\n"
        "\x1b[2ma\x1b[0m\x1b[2m\x1b[7m<|im_end|>\x1b[0m\n"
        "\x1b[2m\x1b[7m<|im_start|>\x1b[0m\x1b[2massistant\x1b[0m\n"
        "\x1b[32mb\x1b[0m\x1b[32m\x1b[7m<|im_end|>\x1b[0m\n"
    )


@pytest.mark.parametrize(
    ("tokens", "sentence"),
    [
        (
            token_rows(("a", "b"), ("cc", "dd")),
            "The model will learn to stop: <|im_end|> (id 4) is supervised in all 2 rows.",
        ),
        (
            token_rows(("a", "b"), ("a", "bbbbbb"), cut=23),
            "The model will learn to stop from 1 of 2 rows; in the others no end token is supervised: "
            "they were cut to max_length, or bring their own labels.",
        ),
        (
            token_rows(("a", "bbbbbb"), cut=22),
            "The model will NOT learn to stop: <|im_end|> (id 4) is supervised in no row, so its answers run on until "
            "the length limit. Use a chat template that ends each turn with a token of its own; if rows were cut, "
            "raise max_length.",
        ),
    ],
)
def test_it_says_whether_the_model_will_learn_to_stop(tokens: datasets.Dataset, sentence: str) -> None:
    assert preview.stopping(tokens, TOKENIZER, END) == sentence


def test_a_user_turn_that_ends_does_not_count_as_learned() -> None:
    tokens = token_rows(("a", "b")).map(lambda row: {"labels": [-100] * len(row["labels"])})
    assert preview.stopping(tokens, TOKENIZER, None).startswith("The model will NOT learn to stop: an end token is")


def test_the_page_is_self_contained_and_escapes_the_text() -> None:
    tokens = token_rows(("<b>&", "1 < 2"))
    html = page(preview.records(tokens, TOKENIZER, rows=1), TOKENIZER, "The model will learn to stop: yes.")
    assert '<p class="verdict">The model will learn to stop: yes.</p>' in html
    doubted = page([], TOKENIZER, "The model will NOT learn to stop.")
    assert '<p class="verdict doubt">The model will NOT learn to stop.</p>' in doubted
    assert "<h2>row 1 of chat.jsonl: 30 tokens, 6 supervised</h2>" in html
    assert '<span title="tokens 1 to 9">user<i>↵</i>\n&lt;b&gt;&amp;</span>' in html
    assert '<span class="learn" title="tokens 23 to 27">1 &lt; 2</span>' in html
    assert '<span class="learn special" title="token 28">&lt;|im_end|&gt;</span>' in html
    assert "<b>" not in html
    for outside in ("http:", "https:", "<script", "<link", "url("):
        assert outside not in html
