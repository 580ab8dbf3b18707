"""Rows without turns: prompt and completion, plain text, ready tokens; and tokens that reach over a boundary."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken, processors
from transformers import PreTrainedTokenizerFast

from sft_toolkit.args import Supervise
from sft_toolkit.data.conversation import Conversation, Message, PlainText, TokenRow
from sft_toolkit.data.render import NO_END_TOKEN, OTHER_LABELS, SWALLOWED, Refusal, Renderer, Tokens
from tests.templates import PHI
from tests.tiny import supervised_text, tiny_tokenizer


def encode(
    tokenizer: PreTrainedTokenizerFast, example: PlainText | TokenRow, supervise: Supervise = "assistant"
) -> tuple[str, str]:
    """The whole row and what is learned of it, as texts."""
    (tokens,) = Renderer(tokenizer, supervise).encode([example])
    assert isinstance(tokens, Tokens), tokens
    whole = str(tokenizer.decode(tokens.input_ids))
    return whole, supervised_text(tokenizer, tokens.input_ids, tokens.labels)


@pytest.mark.parametrize("bos_by_tokenizer", [False, True])
@pytest.mark.parametrize("supervise", ["assistant", "last_assistant", "completion", "all"])
def test_a_completion_is_learned_with_one_end_token(supervise: Supervise, bos_by_tokenizer: bool) -> None:
    tokenizer = tiny_tokenizer(None, bos_by_tokenizer=bos_by_tokenizer)
    whole, learned = encode(tokenizer, PlainText("2+2=", "4"), supervise)
    assert whole == ("<s>" if bos_by_tokenizer else "") + "2+2=4<|im_end|>"
    assert learned == ("2+2=4<|im_end|>" if supervise == "all" else "4<|im_end|>")


def test_a_text_is_learned_from_its_first_character() -> None:
    assert encode(tiny_tokenizer(None, bos_by_tokenizer=True), PlainText("", "ab\n")) == (
        "<s>ab\n<|im_end|>",
        "ab\n<|im_end|>",
    )


def test_bos_and_eos_that_the_text_brings_are_not_doubled() -> None:
    tokenizer = tiny_tokenizer(None, bos_by_tokenizer=True)
    assert encode(tokenizer, PlainText("<s>a", "b<|im_end|>")) == ("<s>ab<|im_end|>", "b<|im_end|>")


def test_an_end_token_that_the_tokenizer_adds_itself_is_not_doubled() -> None:
    tokenizer = tiny_tokenizer(None)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|im_end|>", special_tokens=[("<s>", 1), ("<|im_end|>", 4)]
    )
    assert tokenizer("ab")["input_ids"][-1] == 4
    assert encode(tokenizer, PlainText("a", "b")) == ("<s>ab<|im_end|>", "b<|im_end|>")


def test_a_tokenizer_without_end_token_is_said() -> None:
    tokenizer = tiny_tokenizer(None)
    tokenizer.eos_token = None
    (tokens,) = Renderer(tokenizer).encode([PlainText("a", "b")])
    assert isinstance(tokens, Tokens)
    assert (len(tokens.input_ids), tokens.notes) == (2, (NO_END_TOKEN,))


def test_a_token_that_reaches_into_the_prompts_last_blank_is_learned_whole() -> None:
    tokenizer = tiny_tokenizer(None, merges=[("Ġ", "h")])
    prompt = tokenizer("A: ")["input_ids"]
    (tokens,) = Renderer(tokenizer).encode([PlainText("A: ", "hi")])
    assert isinstance(tokens, Tokens)
    assert tokens.input_ids[: len(prompt)] != prompt
    assert tokens.input_ids == [*tokenizer("A: hi")["input_ids"], 4]
    assert tokens.labels == [-100, -100, *tokens.input_ids[2:]]
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == " hi<|im_end|>"


def test_a_token_that_holds_prompt_and_answer_is_refused() -> None:
    tokenizer = tiny_tokenizer(None, merges=[("4", "2")])
    (result,) = Renderer(tokenizer).encode([PlainText("2+2=4", "2")])
    assert result == Refusal("mask_unproven", "one token holds both '4' and the learned '2'")


def test_a_token_that_holds_answer_and_what_follows_is_refused() -> None:
    tokenizer = tiny_tokenizer(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}",
        merges=[("b", ";")],
    )
    row = Conversation((Message("user", "a"), Message("assistant", "b"), Message("user", "c")))
    (result,) = Renderer(tokenizer).encode([row])
    assert result == Refusal("mask_unproven", "one token holds both the learned 'b' and ';'")


@pytest.mark.parametrize("answer", ["b", " b \n", "\n\nb", "é😀 "])
def test_offsets_without_white_space_lose_none_of_the_answer(answer: str) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    row = Conversation((Message("user", "a "), Message("assistant", answer), Message("user", " c")))
    (tokens,) = Renderer(tokenizer).encode([row])
    assert isinstance(tokens, Tokens)
    assert supervised_text(tokenizer, tokens.input_ids, tokens.labels) == f"{answer}<|im_end|>"
    whole, learned = encode(tokenizer, PlainText("a ", answer))
    assert (whole, learned) == (f"a {answer}<|im_end|>", f"{answer}<|im_end|>")


def test_white_space_that_a_control_token_swallows_is_said() -> None:
    tokenizer = tiny_tokenizer(PHI)
    swallowing = [AddedToken(text, rstrip=True, special=True) for text in ("<|user|>", "<|assistant|>", "<|end|>")]
    tokenizer.add_tokens(swallowing, special_tokens=True)
    rows = [Conversation((Message("user", "a"), Message("assistant", answer))) for answer in ("b", " b")]
    first, second = Renderer(tokenizer).encode(rows)
    assert isinstance(first, Tokens)
    assert isinstance(second, Tokens)
    assert (first.input_ids, first.labels) == (second.input_ids, second.labels)
    assert [i for i in first.labels if i != -100] == tokenizer.convert_tokens_to_ids(["b", "<|end|>"])
    assert (first.notes, second.notes) == ((), (SWALLOWED,))


def test_ready_tokens_pass_as_they_are() -> None:
    (tokens,) = Renderer(tiny_tokenizer()).encode([TokenRow([1, 10, 11, 4], [-100, -100, 11, 4])])
    assert tokens == Tokens([1, 10, 11, 4], [-100, -100, 11, 4], head=1, starts=range(1, 2))


def test_labels_that_differ_from_their_tokens_are_kept_and_said() -> None:
    renderer = Renderer(tiny_tokenizer())
    (tokens,) = renderer.encode([TokenRow([10, 11, 4], [-100, 12, 4])])
    assert isinstance(tokens, Tokens)
    assert tokens.labels == [-100, 12, 4]
    assert renderer.notes == {OTHER_LABELS: 1}


@pytest.mark.parametrize(
    ("ids", "labels", "detail"),
    [
        ([10, 261], [-100, 261], "input_ids holds 261; the tokenizer has the ids 0 to 260"),
        ([-1, 10], [-100, 10], "input_ids holds -1; the tokenizer has the ids 0 to 260"),
        ([10, 11], [-100, -1], "labels holds -1; expected -100 or an id of 0 to 260"),
        ([10, 11], [-100, 300], "labels holds 300; expected -100 or an id of 0 to 260"),
        ([10, 1.5], [-100, 10], "input_ids and labels must be whole numbers"),
        ([10, 11], [-100, True], "input_ids and labels must be whole numbers"),
    ],
)
def test_impossible_tokens_are_refused(ids: list[int], labels: list[int], detail: str) -> None:
    (result,) = Renderer(tiny_tokenizer()).encode([TokenRow(ids, labels)])
    assert result == Refusal("bad_row", detail)


def test_kinds_of_rows_may_be_mixed_and_keep_their_order() -> None:
    tokenizer = tiny_tokenizer()
    conversation = Conversation((Message("user", "a"), Message("assistant", "b")))
    rows = Renderer(tokenizer).encode([PlainText("x", "y"), conversation, TokenRow([10, 11], [-100, 11])])
    texts = [supervised_text(tokenizer, row.input_ids, row.labels) for row in rows if isinstance(row, Tokens)]
    assert texts == ["y<|im_end|>", "b<|im_end|>", tokenizer.decode([11])]
