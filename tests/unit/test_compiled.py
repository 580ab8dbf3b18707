"""Plain conversations render to the very texts of `apply_chat_template`."""

from __future__ import annotations

from typing import Any

import pytest
from transformers.utils import chat_template_utils

from sft_toolkit.data.compiled import PlainRenderer
from tests.templates import FAMILIES
from tests.tiny import CHATML, chat, tiny_tokenizer

CONVERSATIONS: list[list[dict[str, Any]]] = [
    chat("a", "b"),
    [*chat("  x\n", "<think>p</think>y "), *chat("é🙂", "")],
    [{"role": "user", "content": "{{ 7 * 7 }}"}, {"role": "assistant", "content": "{% raw %}"}],
]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_renders_the_same_text(family: str) -> None:
    tokenizer = FAMILIES[family].tokenizer(bos_in_template=True)
    expected = [tokenizer.apply_chat_template(messages, tokenize=False) for messages in CONVERSATIONS]
    assert PlainRenderer(tokenizer)(CONVERSATIONS) == expected


def test_without_the_compiled_template_the_public_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tiny_tokenizer()
    expected = PlainRenderer(tokenizer)(CONVERSATIONS)
    monkeypatch.delattr(chat_template_utils, "_compile_jinja_template")
    renderer = PlainRenderer(tokenizer)
    assert renderer._direct is None
    monkeypatch.undo()
    assert renderer(CONVERSATIONS) == expected


def test_a_template_that_sees_something_else_than_messages_is_rendered_the_public_way() -> None:
    tokenizer = tiny_tokenizer(CHATML + "{{ marker }}")
    renderer = PlainRenderer(tokenizer)
    assert renderer._direct is not None
    renderer._direct = lambda messages: "something else"
    assert renderer([chat("a", "b")]) == [tokenizer.apply_chat_template(chat("a", "b"), tokenize=False)]


def test_no_conversation_gives_no_text() -> None:
    assert PlainRenderer(tiny_tokenizer())([]) == []
