"""Templates whose assistant header can't simply be read off the inference prompt: answers are learned, no header."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.render import NO_PROMPT_HEADER, OTHER_HEADER, Refusal, Renderer, Tokens
from tests.tiny import CHATML, supervised_text, tiny_tokenizer

EACH, END = "{% for m in messages %}", "{% endfor %}"
TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TWO_TURNS = (("user", "Hi"), ("assistant", "Yes"), ("user", "Go"), ("assistant", "No"))


def chat(*turns: tuple[str, str] | Message, **extra: Any) -> Conversation:
    return Conversation(tuple(turn if isinstance(turn, Message) else Message(*turn) for turn in turns), **extra)


def learn(
    template: Any, conversation: Conversation, specials: tuple[str, ...] = (), eos: str = "<|im_end|>"
) -> tuple[str, tuple[str, ...]] | Refusal:
    """What is learned and the remarks, or the refusal."""
    tokenizer: PreTrainedTokenizerFast = tiny_tokenizer(template, extra_specials=[*specials])
    tokenizer.add_special_tokens({"eos_token": eos})
    (tokens,) = Renderer(tokenizer).encode([conversation])
    if isinstance(tokens, Refusal):
        return tokens
    assert isinstance(tokens, Tokens)
    return supervised_text(tokenizer, tokens.input_ids, tokens.labels), tokens.notes


@pytest.mark.parametrize(
    "template",
    [
        EACH + TURN + END,
        EACH + TURN + END + "{{ eos_token }}",
        "{{ bos_token }}" + EACH + TURN + END,
        "{% if messages[-1].role == 'user' %}{{ raise_exception('unanswered') }}{% endif %}" + EACH + TURN + END,
        EACH + TURN.replace("m.content", "'\n' + m.content").replace("+ '\n' + '\n'", "+ '\n\n'") + END,
        EACH + "{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}{{ m.content }}"
        "{% endgeneration %}{{ '<|im_end|>\n' }}{% else %}" + TURN + "{% endif %}" + END,
    ],
    ids=["bare", "eos behind all", "bos before all", "refuses a question alone", "longer header", "generation markers"],
)  # fmt: skip
def test_a_template_without_inference_prompt_learns_the_answers_and_says_so(template: str) -> None:
    assert learn(template, chat(("user", "a"), ("assistant", "b"))) == ("b<|im_end|>", (NO_PROMPT_HEADER,))
    assert learn(template, chat(*TWO_TURNS)) == ("Yes<|im_end|>No<|im_end|>", (NO_PROMPT_HEADER,))


def test_a_template_that_always_ends_in_the_header_needs_no_remark() -> None:
    template = EACH + TURN + END + "{% if messages[-1].role == 'user' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    assert learn(template, chat(*TWO_TURNS)) == ("Yes<|im_end|>No<|im_end|>", ())


@pytest.mark.parametrize("answer", ["{{ '<|im_start|>assistant name=' + m.name }}", "{{ '<|im_start|>' + m.name }}"])
def test_a_header_that_names_the_speaker_is_never_learned(answer: str) -> None:
    named = "{% if m.name is defined %}" + answer + "{{ '\n' + m.content + '<|im_end|>\n' }}{% else %}"
    template = EACH + named + TURN + "{% endif %}" + END + PROMPT
    refusal = learn(template, chat(("user", "a"), Message("assistant", "b", extra={"name": "Bob"})))
    assert refusal == Refusal("mask_unproven", "no assistant header stands before message 2")
    assert learn(template, chat(("user", "a"), ("assistant", "b"))) == ("b<|im_end|>", ())


@pytest.mark.parametrize("prompt", [PROMPT, ""])
def test_a_numbered_header_is_never_learned(prompt: str) -> None:
    template = EACH + TURN.replace("m.role", "m.role ~ loop.index") + END + prompt.replace("assistant", "assistant2")
    assert learn(template, chat(*TWO_TURNS)) == Refusal("mask_unproven", "no assistant header stands before message 4")


def test_turns_in_another_order_are_followed_by_their_headers_or_refused() -> None:
    template = EACH.replace("messages", "messages | reverse") + TURN + END
    assert isinstance(learn(template, chat(*TWO_TURNS)), Refusal)
    assert learn(template + PROMPT, chat(*TWO_TURNS)) == ("No<|im_end|>Yes<|im_end|>", ())  # nothing else, at least


@pytest.mark.parametrize(
    ("prompted", "shown", "learned"),
    [
        ("<think>\n\n</think>\n\n", "", "b<|im_end|>"),  # Qwen 3 told not to think
        ("<think>\n", "", "b<|im_end|>"),  # DeepSeek-R1
        ("<think>\n", "<think></think>", "</think>b<|im_end|>"),  # Nemotron 3
        ("<think>\n", "<think>\n\n</think>\n\n", "\n</think>\n\nb<|im_end|>"),
        ("<think></think>", "</think>", "</think>b<|im_end|>"),  # DeepSeek-V3.2
    ],
)
def test_where_prompt_and_finished_answer_differ_in_reasoning_they_are_followed_until_they_part(
    prompted: str, shown: str, learned: str
) -> None:
    answer = "{% if m.role == 'assistant' %}" + TURN.replace("m.content", f"{shown!r} + m.content") + "{% else %}"
    prompt = PROMPT.replace("assistant\n", "assistant\n" + prompted)
    result = learn(EACH + answer + TURN + "{% endif %}" + END + prompt, chat(("user", "a"), ("assistant", "b")))
    assert result == (learned, () if shown.startswith(prompted) else (OTHER_HEADER,))


def test_control_tokens_right_behind_one_another_end_an_answer_together() -> None:
    specials = ("<|turn|>", "<|user|>", "<|bot|>", "<|say|>", "<|said|>", "<|over|>")
    said = "{{ '<|turn|><|bot|><|say|>' + m.content + '<|said|><|over|>' if m.role == 'assistant'"
    said += " else '<|turn|><|user|>' + m.content + '<|over|>' }}"
    prompt = "{% if add_generation_prompt %}{{ '<|turn|><|bot|><|say|>' }}{% endif %}"
    assert learn(EACH + said + END + prompt, chat(*TWO_TURNS), specials, "<|over|>") == (
        "Yes<|said|><|over|>No<|said|><|over|>",
        (),
    )


def test_the_end_that_a_preamble_shares_ends_earlier_answers_too() -> None:
    specials = ("<|start|>", "<|end|>", "<|message|>", "<|return|>")
    turn = "{{ '<|start|>' + m.role + '<|message|>' + m.content }}"
    end = "{{ '<|return|>' if m.role == 'assistant' and loop.last else '<|end|>' }}"
    template = "<|start|>system<|message|>Today.<|end|>" + EACH + turn + end + END
    template += "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    learned = learn(template, chat(*TWO_TURNS), specials, "<|return|>")
    assert isinstance(learned, tuple)
    assert learned[0] == "<|message|>Yes<|end|><|message|>No<|return|>"


PARTS = "{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
SHOWN_IN_PARTS = EACH + "{{ '<|im_start|>' + m.role + '\n' }}" + PARTS + "{{ '<|im_end|>\n' }}" + END + PROMPT


def test_a_template_that_reads_content_in_parts_gets_parts() -> None:
    assert learn(SHOWN_IN_PARTS, chat(*TWO_TURNS)) == ("Yes<|im_end|>No<|im_end|>", ())
    strict = SHOWN_IN_PARTS.replace("part.type == 'text'", "m.content[0]['type'] == 'text'")
    assert learn(strict, chat(("system", " s"), ("user", "a"), ("assistant", " b "))) == (" b <|im_end|>", ())


CALL = [{"type": "function", "function": {"name": "find", "arguments": {"q": "w"}}}]
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
WITH_TOOLS = (
    "{% for t in tools %}{{ t.function.name + ';' }}{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + ': ' + m.content }}"
    "{% for c in m.tool_calls or [] %}{{ 'CALL ' + c.function.name + ' ' + c.function.arguments | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant: ' }}{% endif %}"
)


@pytest.mark.parametrize("template", [WITH_TOOLS, {"default": CHATML, "tool_use": WITH_TOOLS}])
def test_rows_with_tools_follow_the_template_that_is_made_for_them(template: Any) -> None:
    calling = chat(("user", "1"), Message("assistant", None, tool_calls=CALL), ("tool", "r"), tools=TOOLS)
    assert learn(template, calling) == ('CALL find {"q": "w"}<|im_end|>', ())
    without = learn(template, chat(*TWO_TURNS))
    expected = ("Yes<|im_end|>No<|im_end|>", ())
    assert without == expected if isinstance(template, dict) else isinstance(without, Refusal)


def test_a_call_that_only_the_templates_brackets_end_is_learned_with_them() -> None:
    turn = "{{ '<|' + m.role + '|>' + m.content }}{% for c in m.tool_calls or [] %}"
    turn += (
        "{{ '<tool_call>' + c.function.name + '(' + (c.function.arguments | tojson) + ')</tool_call>' }}{% endfor %}"
    )
    template = EACH + turn + END + "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    specials = ("<|user|>", "<|assistant|>", "<|tool|>")
    learned = learn(template, chat(("user", "1"), Message("assistant", None, tool_calls=CALL), ("tool", "r")), specials)
    assert isinstance(learned, tuple)
    assert learned[0] == '<tool_call>find({"q": "w"})</tool_call>'
