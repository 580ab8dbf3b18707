"""Length policies: what a row that is too long becomes, to the token."""

from __future__ import annotations

from typing import get_args

import pytest

from sft_toolkit.args import TooLong
from sft_toolkit.data.conversation import Conversation, Message, PlainText, TokenRow
from sft_toolkit.data.lengths import Fitted, fit
from sft_toolkit.data.render import Renderer, Tokens
from tests.templates import FAMILIES
from tests.tiny import CHATML, supervised_text, tiny_tokenizer

TOKENIZER = tiny_tokenizer("{{ bos_token }}" + CHATML)
SYSTEM, FIRST, SECOND = (
    "<s><|im_start|>system\nS<|im_end|>\n",
    "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nx<|im_end|>\n",
    "<|im_start|>user\n2<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n",
)
LENGTHS = [len(TOKENIZER(text, add_special_tokens=False)["input_ids"]) for text in (SYSTEM, FIRST, SECOND)]
WHOLE = sum(LENGTHS)


def row(example: Conversation | PlainText | TokenRow) -> Tokens:
    (tokens,) = Renderer(TOKENIZER).encode([example])
    assert isinstance(tokens, Tokens)
    return tokens


def conversation() -> Tokens:
    turns = (("system", "S"), ("user", "1"), ("assistant", "x"), ("user", "2"), ("assistant", "y"))
    return row(Conversation(tuple(Message(*turn) for turn in turns)))


def texts(fitted: Fitted) -> tuple[str, str]:
    """The fitted row and what is learned of it."""
    assert fitted.tokens is not None, fitted
    assert fitted.reason is None
    ids, labels = fitted.tokens.input_ids, fitted.tokens.labels
    return str(TOKENIZER.decode(ids)), supervised_text(TOKENIZER, ids, labels)


@pytest.mark.parametrize("policy", get_args(TooLong))
def test_a_row_that_fits_stays_the_same_object(policy: TooLong) -> None:
    tokens = conversation()
    assert len(tokens.input_ids) == WHOLE
    assert fit(tokens, WHOLE, policy) == Fitted(tokens)


@pytest.mark.parametrize("policy", ["drop", "error"])
def test_a_longer_row_is_too_long(policy: TooLong) -> None:
    assert fit(conversation(), WHOLE - 1, policy) == Fitted(None, "too_long")


@pytest.mark.parametrize("policy", get_args(TooLong))
def test_a_row_that_teaches_nothing_is_named(policy: TooLong) -> None:
    assert fit(row(TokenRow([5, 6, 7], [-100] * 3)), 3, policy) == Fitted(None, "no_supervised_token")
    assert fit(row(TokenRow([5, 6, 7], [5, -100, -100])), 3, policy) == Fitted(None, "no_supervised_token")


def test_truncation_from_the_right_keeps_the_first_tokens_and_adds_no_end() -> None:
    fitted = fit(conversation(), WHOLE - 2, "truncate_right")
    assert texts(fitted) == ((SYSTEM + FIRST + SECOND).removesuffix("<|im_end|>\n"), "x<|im_end|>y")
    assert fitted.truncated
    assert texts(fit(row(PlainText("ab", "cd")), 3, "truncate_right")) == ("abc", "c")


def test_truncation_that_leaves_no_label_is_counted_as_such() -> None:
    long_prompt = row(Conversation((Message("user", "long question"), Message("assistant", "b"))))
    assert fit(long_prompt, 12, "truncate_right") == Fitted(None, "no_supervised_token")


def test_a_cut_at_a_turn_keeps_whole_turns() -> None:
    for room in (sum(LENGTHS[:2]) - 1, sum(LENGTHS[:2]), WHOLE - 2):
        fitted = fit(conversation(), room, "cut_at_turn")
        assert texts(fitted) == ((SYSTEM + FIRST).removesuffix("\n"), "x<|im_end|>")
        assert fitted.truncated
    assert texts(fit(conversation(), WHOLE - 1, "cut_at_turn"))[1] == "x<|im_end|>y<|im_end|>"
    assert fit(conversation(), sum(LENGTHS[:2]) - 2, "cut_at_turn") == Fitted(None, "too_long")


def test_a_row_without_turns_can_not_be_cut_at_one() -> None:
    assert fit(row(PlainText("ab", "cd")), 4, "cut_at_turn") == Fitted(None, "too_long")


def test_the_oldest_turns_go_and_system_last_question_and_answer_stay() -> None:
    for room in (WHOLE - 1, WHOLE - LENGTHS[1]):
        fitted = fit(conversation(), room, "truncate_prompt_left")
        assert texts(fitted) == (SYSTEM + SECOND, "y<|im_end|>")
        assert fitted.truncated
    assert fit(conversation(), WHOLE - LENGTHS[1] - 1, "truncate_prompt_left") == Fitted(None, "too_long")


def test_a_shortened_conversation_is_what_the_template_renders_without_its_oldest_turns() -> None:
    short = row(Conversation((Message("system", "S"), Message("user", "2"), Message("assistant", "y"))))
    assert fit(conversation(), WHOLE - 1, "truncate_prompt_left").tokens == short


def test_a_last_question_without_answer_is_not_kept_for_its_own_sake() -> None:
    turns = (Message("user", "1"), Message("assistant", "x"), Message("user", "2"))
    tokens = row(Conversation(turns))
    assert fit(tokens, len(tokens.input_ids) - 1, "truncate_prompt_left") == Fitted(None, "too_long")


def test_system_text_inside_a_question_is_never_taken_out() -> None:
    turns = (("system", "S"), ("user", "1"), ("assistant", "x"), ("user", "2"), ("assistant", "y"))
    (tokens,) = Renderer(FAMILIES["gemma"].tokenizer()).encode([Conversation(tuple(Message(*turn) for turn in turns))])
    assert isinstance(tokens, Tokens)
    assert fit(tokens, len(tokens.input_ids) - 1, "truncate_prompt_left") == Fitted(None, "too_long")


@pytest.mark.parametrize(("room", "prompt"), [(5, "bc"), (4, "c")])
def test_the_prompt_of_a_completion_is_shortened_from_the_left_after_bos(room: int, prompt: str) -> None:
    tokenizer = tiny_tokenizer(None, bos_by_tokenizer=True)
    (tokens,) = Renderer(tokenizer).encode([PlainText("abc", "d")])
    assert isinstance(tokens, Tokens)
    assert texts(fit(tokens, room, "truncate_prompt_left")) == (f"<s>{prompt}d<|im_end|>", "d<|im_end|>")
    assert fit(tokens, 3, "truncate_prompt_left") == Fitted(None, "too_long")


def test_ready_tokens_are_shortened_in_their_unlearned_beginning() -> None:
    tokens = row(TokenRow([1, 10, 11, 12, 4], [-100, -100, -100, 12, 4]))
    fitted = fit(tokens, 4, "truncate_prompt_left").tokens
    assert fitted is not None
    assert (fitted.input_ids, fitted.labels) == ([1, 11, 12, 4], [-100, -100, 12, 4])


def test_places_for_further_cuts_move_with_the_tokens() -> None:
    fitted = fit(conversation(), WHOLE - 1, "truncate_prompt_left").tokens
    assert fitted is not None
    assert (fitted.turn_ends, fitted.head, fitted.starts) == ((LENGTHS[0] + LENGTHS[2] - 1,), LENGTHS[0], (LENGTHS[0],))
