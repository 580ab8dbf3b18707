"""What is learned of each template family, to the letter."""

from __future__ import annotations

import pytest

from sft_toolkit.data.spans import Grammar, Unproven
from sft_toolkit.data.template import ChatTemplate
from tests.templates import FAMILIES
from tests.tiny import tiny_tokenizer


def learned(template: str, *specials: str) -> Grammar:
    return ChatTemplate(tiny_tokenizer(template, extra_specials=list(specials))).grammar()


def of(family: str, kwargs: str = "") -> Grammar:
    return ChatTemplate(FAMILIES[family].tokenizer(bos_in_template=True)).grammar((kwargs, False))


@pytest.mark.parametrize(
    ("family", "headers"),
    [
        ("chatml", ("<|im_start|>assistant\n",)),
        ("chatml_marked", ("<|im_start|>assistant\n",)),
        ("llama3", ("<|start_header_id|>assistant<|end_header_id|>\n\n",)),
        ("mistral", ()),
        ("mistral_text", ()),
        ("gemma", ("<start_of_turn>model\n",)),
        ("phi", ("<|assistant|>\n",)),
        ("qwen3", ("<|im_start|>assistant\n",)),
        ("deepseek", ("<|Assistant|><think>\n", "<|Assistant|>")),
        ("zephyr", ("<|assistant|>\n",)),
        ("channels", ("<|start|>assistant",)),
        ("endless", ("<|assistant|>\n",)),
    ],
)
def test_assistant_headers(family: str, headers: tuple[str, ...]) -> None:
    assert of(family).headers == headers


@pytest.mark.parametrize(
    ("family", "closings"),
    [
        ("chatml", ("<|im_end|>",)),
        ("llama3", ("<|eot_id|>",)),
        ("mistral", ("</s>",)),
        ("gemma", ("<end_of_turn>",)),
        ("phi", ("<|end|>",)),
        ("deepseek", ("</s>",)),
        ("zephyr", ("</s>",)),
        ("channels", ("<|return|>", "<|end|>", "<|call|>")),
        ("endless", ()),
    ],
)
def test_tokens_that_close_an_assistants_turn(family: str, closings: tuple[str, ...]) -> None:
    assert of(family).closings == closings


@pytest.mark.parametrize(
    ("family", "header"),
    [
        ("chatml", "<|im_start|>user\n"),
        ("chatml_marked", "<|im_start|>user\n"),
        ("llama3", "<|start_header_id|>user<|end_header_id|>\n\n"),
        ("mistral_text", "[INST] "),
        ("gemma", "<start_of_turn>user\n"),
        ("deepseek", "<|User|>"),
        ("channels", "<|start|>user<|message|>"),
    ],
)
def test_user_headers(family: str, header: str) -> None:
    assert of(family).user_header == header


@pytest.mark.parametrize("family", FAMILIES)
def test_only_the_system_text_of_the_template_itself_counts_as_default(family: str) -> None:
    assert of(family).default_system == {"chatml_marked": "You are Tiny."}.get(family, "")


@pytest.mark.parametrize("family", FAMILIES)
def test_families_that_show_tool_calls(family: str) -> None:
    shows = {"llama3", "mistral", "mistral_text", "qwen3", "deepseek", "channels"}
    assert of(family).shows_calls == (family in shows)


def test_template_arguments_change_the_header() -> None:
    assert of("qwen3", '{"enable_thinking": false}').headers == (
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "<|im_start|>assistant\n",
    )


def test_a_template_that_demands_a_system_message_is_learned_with_one() -> None:
    demanding = (
        "{% if messages[0].role != 'system' %}{{ raise_exception('system first') }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    grammar = learned(demanding)
    assert (grammar.headers, grammar.closings, grammar.user_header) == (
        ("<|im_start|>assistant:",),
        ("<|im_end|>",),
        "<|im_start|>user:",
    )


def test_a_template_for_one_question_is_learned_from_one_question() -> None:
    single = (
        "{% if messages | length > 2 %}{{ raise_exception('one question only') }}{% endif %}"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    tokenizer = tiny_tokenizer(single)
    tokenizer.add_special_tokens({"eos_token": "</s>"})
    grammar = ChatTemplate(tokenizer).grammar()
    assert (grammar.headers, grammar.closings, grammar.user_header) == (("[assistant]",), ("</s>",), "")


def test_a_closing_token_that_is_not_flagged_as_special_is_learned() -> None:
    tokenizer = tiny_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}<end>\n{% endfor %}")
    tokenizer.add_tokens(["<end>"])
    grammar = ChatTemplate(tokenizer).grammar()
    assert grammar.closings == ("<end>",)
    assert grammar.controls.findall("a<end>b") == ["<end>"]


def test_a_template_that_shows_no_answers_is_refused() -> None:
    silent = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    with pytest.raises(Unproven, match="leaves out or repeats a plain user or assistant message"):
        learned(silent)


def test_a_template_that_refuses_everything_says_its_reason() -> None:
    with pytest.raises(Unproven, match=r"refuses one user turn with one assistant turn: .*not today"):
        learned("{{ raise_exception('not today') }}")


def test_a_template_that_ends_only_earlier_turns_has_their_closing_token() -> None:
    forgetful = (
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
        "{% if not loop.last or add_generation_prompt %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    grammar = learned(forgetful)
    assert (grammar.headers, grammar.closings) == (("<|im_end|><|im_start|>assistant:",), ("<|im_end|>",))


def test_what_ends_a_call_ends_no_answer() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function | tojson }}</call>{% endfor %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
    )
    tokenizer.add_tokens(["</call>"])
    grammar = ChatTemplate(tokenizer).grammar()
    assert (grammar.end_of_turn, grammar.closings) == (None, ("</call>",))
