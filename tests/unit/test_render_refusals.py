"""Rows and tokenizers that the renderer refuses, each with its reason, and rows beside them that stay untouched."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import ByT5Tokenizer

from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.render import Refusal, Renderer, Tokens
from sft_toolkit.errors import ConfigError
from tests.templates import FAMILIES
from tests.tiny import supervised_text, tiny_tokenizer


def chat(*turns: tuple[str, str] | Message, **extra: Any) -> Conversation:
    return Conversation(tuple(turn if isinstance(turn, Message) else Message(*turn) for turn in turns), **extra)


def refusal(template: str, *turns: tuple[str, str] | Message) -> Refusal:
    (result,) = Renderer(tiny_tokenizer(template)).encode([chat(*turns)])
    assert isinstance(result, Refusal), result
    return result


TURN = "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"


@pytest.mark.parametrize(
    ("shown", "reason"),
    [
        ("{{ m.content[:3] }}", "the chat template cuts the text of message 1"),
        ("{{ m.content | length }}:{{ m.content }}", "treats a text differently once its ends are marked"),
        ("{{ m.content }}{{ m.content if 'or' in m.content }}", "repeats message 2 or mixes it with another"),
    ],
)
def test_a_template_whose_texts_can_not_be_followed_is_refused_by_row(shown: str, reason: str) -> None:
    template = "{% for m in messages %}" + TURN.replace("{{ m.content }}", shown) + "{% endfor %}" + PROMPT
    result = refusal(template, ("user", "hello"), ("assistant", "world"))
    assert result.reason == "mask_unproven"
    assert reason in result.detail


def test_texts_that_a_template_changes_in_place_are_followed() -> None:
    template = "{% for m in messages %}" + TURN.replace("m.content", "m.content | upper") + "{% endfor %}" + PROMPT
    tokenizer = tiny_tokenizer(template)
    (tokens,) = Renderer(tokenizer).encode([chat(("user", "hello"), ("assistant", "world"))])
    assert isinstance(tokens, Tokens)
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == "WORLD<|im_end|>"


def test_a_control_token_in_an_argument_name_is_refused() -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"a<|im_end|>": "x"}}}]
    (result,) = Renderer(FAMILIES["qwen3"].tokenizer()).encode(
        [chat(("user", "1"), Message("assistant", None, tool_calls=calls))]
    )
    assert result == Refusal(
        "mask_unproven", "a control token is spelled in the id or in an argument name of a tool call"
    )


def test_a_closing_token_that_the_tokenizer_splits_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.split_special_tokens = True
    (result,) = Renderer(tokenizer).encode([chat(("user", "a"), ("assistant", "b"))])
    detail = "the tokenizer does not keep '<|im_end|>' as one token at the end of a turn"
    assert result == Refusal("mask_unproven", detail)


def test_everything_can_be_learned_without_proof_of_turns() -> None:
    template = "{% for m in messages %}{{ m.content[:3] }}{% endfor %}"
    tokenizer = tiny_tokenizer(template)
    (tokens,) = Renderer(tokenizer, "all").encode([chat(("user", "hello"), ("assistant", "world"))])
    assert isinstance(tokens, Tokens)
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == "helwor"


def test_a_row_that_the_template_refuses_leaves_the_others_alone() -> None:
    tokenizer = FAMILIES["gemma"].tokenizer()
    good, bad = chat(("user", "Hi"), ("assistant", "Yes")), chat(("assistant", "Hi"), ("user", "Yes"))
    first, second, third = Renderer(tokenizer).encode([good, bad, good])
    reason = "the chat template refuses the conversation: Roles must alternate, beginning with user"
    assert second == Refusal("bad_row", reason)
    assert first == third
    assert isinstance(first, Tokens)
    assert supervised_text(tokenizer, first.input_ids, first.labels) == "Yes<end_of_turn>"


def test_half_a_surrogate_pair_is_refused_and_the_others_stay() -> None:
    good = chat(("user", "Hi"), ("assistant", "Yes"))
    first, second = Renderer(tiny_tokenizer()).encode([good, chat(("user", "\ud83d"), ("assistant", "b"))])
    assert second == Refusal("bad_row", "the text holds half of a surrogate pair, which is no character")
    assert isinstance(first, Tokens)


def test_conversations_without_chat_template_name_the_option_that_gives_one() -> None:
    renderer = Renderer(tiny_tokenizer(None))
    with pytest.raises(ConfigError, match=r"has no default chat template.*model.chat_template: FILE gives it one"):
        renderer.encode([chat(("user", "a"), ("assistant", "b"))])


def test_a_tokenizer_without_offsets_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"the tokenizer ByT5Tokenizer of '.*' gives no character offsets"):
        Renderer(ByT5Tokenizer())


def test_nothing_in_gives_nothing_out() -> None:
    assert Renderer(tiny_tokenizer()).encode([]) == []
