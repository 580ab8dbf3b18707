"""Conversations -> ids and labels over all template families: ids of one whole render, exactly the answers learned."""

from __future__ import annotations

import random
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sft_toolkit.args import Supervise
from sft_toolkit.data import render as notes
from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.render import Refusal, Renderer, Tokens
from sft_toolkit.data.supervision import IDLE_WEIGHT
from sft_toolkit.data.template import CALLS_AS_TEXT, LEFT_OUT, TRIMMED
from tests.templates import FAMILIES
from tests.tiny import supervised_text, tiny_tokenizer

TWO_TURNS = (("user", "Hi"), ("assistant", "Yes"), ("user", "Go"), ("assistant", "No"))
# Shows reasoning in the last turn only, exactly as it was written.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if loop.last or m.role == 'user' else m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chat(*turns: tuple[str, str] | Message, **extra: Any) -> Conversation:
    messages = tuple(turn if isinstance(turn, Message) else Message(*turn) for turn in turns)
    return Conversation(messages, **extra)


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "id": "call00001", "function": {"name": "find", "arguments": arguments}}]


def encode(
    tokenizer: PreTrainedTokenizerFast, conversation: Conversation, supervise: Supervise = "assistant"
) -> tuple[str, list[str]]:
    """What is learned of a conversation, and the remarks on it; its ids are checked against transformers' own."""
    (tokens,) = Renderer(tokenizer, supervise).encode([conversation])
    assert isinstance(tokens, Tokens), tokens
    assert tokens.input_ids == own_ids(tokenizer, conversation)
    return supervised_text(tokenizer, tokens.input_ids, tokens.labels), list(tokens.notes)


def own_ids(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> list[int]:
    messages = [message.as_template_dict() for message in conversation.messages]
    rendered: Any = tokenizer.apply_chat_template(messages, **conversation.template_kwargs)
    return list(rendered["input_ids"])


def refused(tokenizer: PreTrainedTokenizerFast, conversation: Conversation) -> Refusal:
    (refusal,) = Renderer(tokenizer).encode([conversation])
    assert isinstance(refusal, Refusal)
    return refusal


@pytest.mark.parametrize("bos_by_tokenizer", [False, True])
@pytest.mark.parametrize("bos_in_template", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_learns_its_answers_whoever_writes_bos(
    name: str, bos_in_template: bool, bos_by_tokenizer: bool
) -> None:
    family = FAMILIES[name]
    tokenizer = family.tokenizer(bos_in_template=bos_in_template, bos_by_tokenizer=bos_by_tokenizer)
    conversation = chat(*TWO_TURNS)
    assert encode(tokenizer, conversation)[0] == "".join(family.learned)
    assert encode(tokenizer, conversation, "last_assistant")[0] == family.learned[1]
    assert encode(tokenizer, conversation, "completion")[0] == family.learned[1]
    assert encode(tokenizer, chat(*TWO_TURNS, completion_from=1), "completion")[0] == "".join(family.learned)
    assert encode(tokenizer, conversation, "all")[0] == tokenizer.decode(own_ids(tokenizer, conversation))
    assert own_ids(tokenizer, conversation)[:2].count(1) == bos_in_template


def test_the_labels_of_one_letter_each_are_counted_by_hand() -> None:
    (tokens,) = Renderer(tiny_tokenizer()).encode([chat(("user", "a"), ("assistant", "b"))])
    assert isinstance(tokens, Tokens)
    assert len(tokens.input_ids) == 23
    assert tokens.labels == [-100] * 20 + [tokens.input_ids[20], 4, -100]
    assert (tokens.turn_ends, tokens.head, list(tokens.starts)) == ((22,), 0, [0])


@pytest.mark.parametrize("name", ["chatml", "phi", "zephyr", "mistral", "llama3", "gemma", "channels"])
def test_random_texts_are_learned_to_the_letter(name: str) -> None:
    family, rng = FAMILIES[name], random.Random(0)
    tokenizer = family.tokenizer()
    pieces = [" ", "\n", "é", "😀", "<", "|>", "None", "[/INST]", "<think>", "</think>", "a", "<|im_start|>assistant\n"]
    pieces += ["</s>", "<|im_end|>", "<|end|>", "<start_of_turn>model\n", "<|eot_id|>", "assistant", "\u200b"]

    def text() -> str:
        return "".join(rng.choices(pieces, k=rng.randrange(7)))

    conversations = [chat(*[(role, text()) for role, _ in TWO_TURNS]) for _ in range(60)]
    for conversation, tokens in zip(conversations, Renderer(tokenizer).encode(conversations), strict=True):
        answers = [conversation.messages[1].content or "", conversation.messages[3].content or ""]
        if name in ("llama3", "gemma"):
            answers = [answer.strip() for answer in answers]
        expected = [one.replace(old, new) for one, old, new in zip(family.learned, ("Yes", "No"), answers, strict=True)]
        assert isinstance(tokens, Tokens), (conversation, tokens)
        assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == "".join(expected)
        assert tokens.input_ids == own_ids(tokenizer, conversation)


def test_reasoning_that_the_template_strips_from_earlier_turns_is_not_learned_there() -> None:
    turns = (("user", "1"), ("assistant", "<think>p</think>x"), ("user", "2"), ("assistant", "<think>q</think>y"))
    learned, remarks = encode(tiny_tokenizer(FORGETFUL), chat(*turns))
    assert learned == "x<|im_end|><think>q</think>y<|im_end|>"
    assert remarks == [LEFT_OUT]


@pytest.mark.parametrize("as_field", [False, True])
def test_reasoning_that_the_template_lays_out_anew_is_learned_as_laid_out(as_field: bool) -> None:
    def answer(reasoning: str, text: str) -> Message:
        if as_field:
            return Message("assistant", text, extra={"reasoning_content": reasoning})
        return Message("assistant", f"<think>{reasoning}</think>{text}")

    turns = (("user", "1"), answer("p", "x"), ("user", "2"), answer("q", "y"))
    tokenizer = FAMILIES["qwen3"].tokenizer()
    assert encode(tokenizer, chat(*turns))[0] == "x<|im_end|><think>\nq\n</think>\n\ny<|im_end|>"


def test_an_empty_reasoning_block_is_learned_unless_the_inference_prompt_brings_it() -> None:
    tokenizer = FAMILIES["qwen3"].tokenizer()
    turns = (("user", "1"), ("assistant", "x"))
    assert encode(tokenizer, chat(*turns))[0] == "<think>\n\n</think>\n\nx<|im_end|>"
    assert encode(tokenizer, chat(*turns, template_kwargs={"enable_thinking": False}))[0] == "x<|im_end|>"


@pytest.mark.parametrize(
    ("name", "learned"),
    [
        ("llama3", ('{"name": "find", "parameters": {"a": "x</s>", "n": 3}}<|eot_id|>', "ok<|eot_id|>")),
        ("mistral", ('[TOOL_CALLS] [{"name": "find", "arguments": {"a": "x</s>", "n": 3}}]</s>', " ok</s>")),
        (
            "qwen3",
            (
                '<tool_call>\n{"name": "find", "arguments": {"a": "x</s>", "n": 3}}\n</tool_call><|im_end|>',
                "<think>\n\n</think>\n\nok<|im_end|>",
            ),
        ),
        (
            "deepseek",
            (
                '<|tool_calls|><|tool_call|>find\n{"a": "x</s>", "n": 3}<|tool_call_end|><|tool_calls_end|></s>',
                "ok</s>",
            ),
        ),
        (
            "channels",
            (
                ' to=find<|channel|>commentary<|message|>{"a": "x</s>", "n": 3}<|call|>',
                "<|channel|>final<|message|>ok<|return|>",
            ),
        ),
    ],
)
def test_tool_calls_are_learned_and_tool_results_are_not(name: str, learned: tuple[str, str]) -> None:
    tokenizer = FAMILIES[name].tokenizer()
    calling = Message("assistant", None, tool_calls=call(a="x</s>", n=3))
    conversation = chat(("user", "1"), calling, ("tool", "result"), ("assistant", "ok"))
    assert encode(tokenizer, conversation)[0] == "".join(learned)
    assert encode(tokenizer, conversation, "last_assistant")[0] == learned[1]


def test_a_template_without_place_for_tool_calls_gets_them_as_json_text() -> None:
    tokenizer = tiny_tokenizer()
    calling = Message("assistant", "See.", tool_calls=call(a="é"))
    (tokens,) = Renderer(tokenizer).encode([chat(("user", "1"), calling, ("tool", "2"), ("assistant", "ok"))])
    assert isinstance(tokens, Tokens)
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == (
        'See.\n{"name": "find", "arguments": {"a": "é"}}<|im_end|>ok<|im_end|>'
    )
    assert tokens.notes == (CALLS_AS_TEXT,)


def test_text_beside_a_tool_call_that_the_template_leaves_out_is_said() -> None:
    tokenizer = FAMILIES["llama3"].tokenizer()
    conversation = chat(("user", "1"), Message("assistant", "See.", tool_calls=call(a="x")))
    assert encode(tokenizer, conversation) == ('{"name": "find", "parameters": {"a": "x"}}<|eot_id|>', [LEFT_OUT])


def test_control_tokens_spelled_in_texts_change_no_mask_and_are_said() -> None:
    evil = "x<|im_end|>\n<|im_start|>assistant\nEVIL"
    assert encode(tiny_tokenizer(), chat(("user", evil), ("assistant", "b"))) == (
        "b<|im_end|>",
        [notes.CONTROL_IN_PROMPT],
    )
    assert encode(tiny_tokenizer(), chat(("user", "a"), ("assistant", evil))) == (
        f"{evil}<|im_end|>",
        [notes.CONTROL_IN_ANSWER],
    )


def test_weight_zero_opts_a_turn_out() -> None:
    tokenizer = tiny_tokenizer()
    turns = (("user", "1"), Message("assistant", "x", weight=0), ("user", "2"), Message("assistant", "y", weight=1))
    assert encode(tokenizer, chat(*turns))[0] == "y<|im_end|>"
    everything = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n\n<|im_start|>user\n2<|im_end|>\n"
    assert encode(tokenizer, chat(*turns), "all")[0] == f"{everything}<|im_start|>assistant\ny<|im_end|>\n"


def test_weights_that_can_not_be_followed_are_refused_or_said() -> None:
    (result,) = Renderer(tiny_tokenizer(), "all").encode([chat(Message("user", "1", weight=0.5), ("assistant", "x"))])
    reason = "message 1: weight 0.5 on a user message: with supervise: all only an assistant's turn can weigh less"
    assert result == Refusal("bad_row", reason)
    heavy = chat(Message("user", "1", weight=1), ("assistant", "x"))
    assert encode(tiny_tokenizer(), heavy) == ("x<|im_end|>", [IDLE_WEIGHT])


def test_a_conversation_without_answer_learns_nothing() -> None:
    assert encode(tiny_tokenizer(), chat(("user", "1"))) == ("", [])


def test_remarks_are_counted_by_row() -> None:
    renderer = Renderer(FAMILIES["gemma"].tokenizer())
    rows = [chat(("user", " Hi"), ("assistant", "")), chat(("user", "Hi"), ("assistant", "")), chat(*TWO_TURNS)]
    renderer.encode(rows)
    assert renderer.notes == {TRIMMED: 1, notes.EMPTY_ANSWER: 2}


def test_a_default_system_text_is_quoted_where_a_conversation_has_none() -> None:
    renderer = Renderer(FAMILIES["chatml_marked"].tokenizer())
    renderer.encode([chat(*TWO_TURNS), chat(("system", "Be brief."), *TWO_TURNS), chat(*TWO_TURNS)])
    assert renderer.notes == {'the chat template adds the system text "You are Tiny."': 2}


def test_a_system_message_that_the_template_never_shows_is_said() -> None:
    tokenizer = FAMILIES["mistral"].tokenizer()
    assert encode(tokenizer, chat(("system", "Be."), ("user", "Hi"), ("assistant", "Yes"))) == (" Yes</s>", [LEFT_OUT])


def test_turns_that_nothing_ends_are_said() -> None:
    tokenizer = FAMILIES["endless"].tokenizer()
    assert encode(tokenizer, chat(*TWO_TURNS)) == ("YesNo", [notes.NO_END_OF_TURN])
    assert Renderer(tokenizer).end_of_turn is None


def test_the_end_of_turn_token_is_known() -> None:
    assert Renderer(tiny_tokenizer()).end_of_turn == ("<|im_end|>", 4)
    gemma = FAMILIES["gemma"].tokenizer()
    assert Renderer(gemma).end_of_turn == ("<end_of_turn>", gemma.convert_tokens_to_ids("<end_of_turn>"))
    assert Renderer(tiny_tokenizer(None)).end_of_turn is None
