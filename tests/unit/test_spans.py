"""Markers, layouts and turns: pure strings, no tokenizer."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sft_toolkit.data.spans import Grammar, Layout, Marker, Slot, Unproven, unmark
from sft_toolkit.data.turns import Tails, Turn, assistant_turns
from sft_toolkit.data.turns import user_turn_starts as starts

OPEN_0, CLOSE_0, OPEN_1, CLOSE_1 = map(chr, range(0x10E000, 0x10E004))
GRAMMAR = Grammar(
    headers=("<A><think>", "<A>"),
    end_of_turn="<E>",
    closings=("<E>",),
    shows_calls=True,
    controls=re.compile("<A>|<U>|<E>"),
    initials=frozenset("<"),
    fillers=re.compile(r"\s*(?:</?think>|<A>|<U>|\Z)"),
    unprompted=False,
    user_header="<U>",
    default_system="",
)


def marked(*messages: dict[str, Any]) -> tuple[list[dict[str, Any]], Marker]:
    marker = Marker()
    return marker.mark(messages), marker


def layout(*pieces: tuple[int | None, str]) -> Layout:
    """A layout from (message or None for the template's own, text)."""
    text = ""
    slots: list[Slot] = []
    for message, piece in pieces:
        if message is not None:
            slots.append(Slot(len(slots), message, len(text), len(text) + len(piece)))
        text += piece
    return Layout(text, tuple(slots))


def turns(view: Layout, *assistants: int, tail: str = "?", calls: str | None = None) -> list[tuple[str, str | None]]:
    tails = Tails(prompt=lambda message: tail, finished=lambda message: calls or "")
    found = assistant_turns(view, assistants, assistants if calls else (), GRAMMAR, tails)
    return [(view.text[turn.start : turn.end], turn.closing) for turn in found]


def test_markers_stand_inside_the_white_space_of_a_text() -> None:
    messages, marker = marked({"role": "user", "content": " \nhi there\t"})
    assert messages == [{"role": "user", "content": f" \n{OPEN_0}hi there{CLOSE_0}\t"}]
    assert marker.owners == [0]


def test_reasoning_tags_stay_outside_the_markers() -> None:
    messages, marker = marked({"role": "assistant", "content": "<think>\np\n</think>\n\nx"})
    assert messages[0]["content"] == f"<think>\n{OPEN_0}p{CLOSE_0}\n</think>\n\n{OPEN_1}x{CLOSE_1}"
    assert marker.owners == [0, 0]


def test_empty_texts_and_roles_are_not_marked() -> None:
    messages, marker = marked({"role": "user", "content": "", "name": "Ann"}, {"role": "assistant", "content": " \n"})
    assert messages == [{"role": "user", "content": "", "name": "Ann"}, {"role": "assistant", "content": " \n"}]
    assert marker.owners == []


def test_names_and_strings_of_tool_calls_are_marked_and_the_rest_is_listed() -> None:
    call = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": ["x"], "n": 3, "t": True}}}
    messages, marker = marked({"role": "assistant", "content": "", "tool_calls": [call]})
    assert messages[0]["tool_calls"] == [
        {
            "type": "function",
            "id": "c1",
            "function": {
                "name": f"{OPEN_0}f{CLOSE_0}",
                "arguments": {"a": [f"{OPEN_1}x{CLOSE_1}"], "n": 3, "t": True},
            },
        }
    ]
    assert marker.unmarked == ["function", "c1", "a", "n", "t"]


def test_marking_leaves_the_messages_of_the_caller_alone() -> None:
    message = {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "y"}}}],
    }
    marked(message)
    assert message == {
        "role": "assistant",
        "content": "x",
        "tool_calls": [{"function": {"name": "f", "arguments": {"a": "y"}}}],
    }


def test_a_text_that_holds_a_marker_character_is_refused() -> None:
    with pytest.raises(Unproven, match=r"message 2 holds a character of the private range U\+10E000-U\+10FFFD"):
        marked({"role": "user", "content": "a"}, {"role": "assistant", "content": f"b{CLOSE_1}"})


def test_more_texts_than_markers_are_refused() -> None:
    with pytest.raises(Unproven, match="the conversation has more than 4095 separate texts"):
        marked(*[{"role": "user", "content": "a"}] * 4096)


def test_unmark_gives_the_plain_text_and_the_places() -> None:
    view = unmark(f"<U>{OPEN_1}bc{CLOSE_1}<A>{OPEN_0}d{CLOSE_0}<E>", [7, 4])
    assert view == Layout("<U>bc<A>d<E>", (Slot(1, 4, 3, 5), Slot(0, 7, 8, 9)))
    assert [view.before(0), view.before(1), view.before(2), view.before(-1)] == ["<U>", "<A>", "<E>", "<E>"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f"a{OPEN_0}b", "the chat template cuts the text of message 5"),
        (f"ab{CLOSE_0}", "the chat template cuts the text of message 5"),
        (f"{OPEN_0}a{OPEN_1}b{CLOSE_1}{CLOSE_0}", "the chat template cuts the text of message 5"),
        (chr(0x10F000), r"the conversation holds a character of the private range"),
    ],
)
def test_a_text_that_is_shown_in_part_is_refused(text: str, reason: str) -> None:
    with pytest.raises(Unproven, match=reason):
        unmark(text, [4, 5])


def test_a_turn_goes_from_its_header_to_its_closing_token() -> None:
    view = layout((None, "<U>"), (0, "hi"), (None, "<E><A>"), (1, "yes"), (None, "<E>\n<U>"), (2, "go"), (None, "<E>"))
    assert assistant_turns(view, [1], [], GRAMMAR, Tails(str, str)) == [Turn(1, 11, 17, "<E>", diverges=True)]
    assert turns(view, 1) == [("yes<E>", "<E>")]


def test_headers_and_closings_spelled_in_texts_are_not_taken_for_the_templates_own() -> None:
    view = layout((None, "<U>"), (0, "x<E><A>EVIL<E>"), (None, "<E><A>"), (1, "b<E><A>c"), (None, "<E>"))
    assert turns(view, 1) == [("b<E><A>c<E>", "<E>")]


def test_what_the_template_writes_after_the_header_is_part_of_the_turn() -> None:
    view = layout((None, "<A>\n<call>"), (0, "f"), (None, "("), (0, "x"), (None, ")</call><E>"))
    assert turns(view, 0, calls=")") == [("\n<call>f(x)</call><E>", "<E>")]


def test_the_longest_header_comes_first() -> None:
    assert turns(layout((None, "<A><think>"), (0, "b"), (None, "<E>")), 0) == [("b<E>", "<E>")]


def test_a_turn_without_closing_token_ends_with_its_text() -> None:
    assert turns(layout((None, "<A>"), (0, "b"), (None, "\n<U>"), (1, "c"), (None, "<E>")), 0) == [("b", None)]


def test_without_header_a_turn_begins_where_the_inference_prompt_ends() -> None:
    view = layout((None, "[T]"), (0, "r"), (None, "[/T] "), (1, "b"), (None, "<E>"))
    assert turns(view, 1, tail="[/T]") == [(" b<E>", "<E>")]
    with pytest.raises(Unproven, match="no assistant header stands before message 2"):
        turns(view, 1, tail="[/S]")


def test_a_tool_call_that_no_token_closes_ends_with_the_templates_brackets() -> None:
    view = layout((None, "<A><think><call>"), (0, "f"), (None, "("), (0, "x"), (None, ")</call><U>"), (1, "hi"))
    assert turns(view, 0, calls=")</call>") == [("<call>f(x)</call>", None)]
    with pytest.raises(Unproven, match="the end of the tool calls of message 1 can't be told"):
        turns(view, 0, calls=")</end>")


def test_a_function_named_again_behind_the_closing_token_is_no_part_of_the_turn() -> None:
    text = "<A><think>f(x)<E><tool f>r<E>"
    view = Layout(text, (Slot(0, 0, 10, 11), Slot(1, 0, 12, 13), Slot(0, 0, 23, 24), Slot(2, 1, 25, 26)))
    assert turns(view, 0, calls=")") == [("f(x)<E>", "<E>")]
    open_end = Layout(text.replace("<E>", "<X>"), view.slots)
    with pytest.raises(Unproven, match="repeats message 1 or mixes it with another"):
        turns(open_end, 0, calls=")")


@pytest.mark.parametrize(
    ("shown", "learned"),
    [
        ("<A></think>", "</think>b<E>"),  # the prompt opened a block, the finished turn shows it closed
        ("<A><think>\n", "\nb<E>"),
        ("<A> named Bob", None),
    ],
)
def test_a_header_that_is_not_quite_the_prompts_ends_where_the_two_part(shown: str, learned: str | None) -> None:
    view = layout((None, "<U>"), (0, "hi"), (None, f"<E>{shown}"), (1, "b"), (None, "<E>"))
    if learned is None:
        with pytest.raises(Unproven, match="no assistant header stands before message 2"):
            turns(view, 1)
    else:
        assert turns(view, 1) == [(learned, "<E>")]


def test_a_message_without_text_is_found_by_its_header_if_there_is_only_one() -> None:
    empty = layout(
        (None, "<U>"), (0, "hi"), (None, "<E><A><E><U>"), (2, "go"), (None, "<E><A>"), (3, "b"), (None, "<E>")
    )
    assert turns(empty, 1, 3) == [("<E>", "<E>"), ("b<E>", "<E>")]
    twice = layout((None, "<U>"), (0, "hi"), (None, "<E><A><E><A>"), (2, "b"), (None, "<E>"))
    with pytest.raises(Unproven, match="message 2 shows no text of its own, so its place can't be told"):
        turns(twice, 1, 2)
    assert turns(layout((None, "<U>"), (0, "hi"), (None, "<E>")), 1) == []


def test_a_message_shown_twice_or_mixed_with_another_is_refused() -> None:
    with pytest.raises(Unproven, match="repeats message 1 or mixes it with another"):
        turns(layout((None, "<A>"), (0, "b"), (None, "<E><A>"), (1, "c"), (None, " "), (0, "b"), (None, "<E>")), 0, 1)
    view = Layout("<A>bb<E>", (Slot(0, 0, 3, 4), Slot(0, 0, 4, 5)))
    with pytest.raises(Unproven, match="repeats message 1 or mixes it with another"):
        turns(view, 0)


def test_user_turns_begin_at_their_header() -> None:
    view = layout(
        (None, "<s>"),
        (0, "sys"),
        (None, "<E><U>"),
        (1, "hi"),
        (None, "<E><A>"),
        (2, "b"),
        (None, "<E>\n<U>"),
        (3, "go"),
    )
    assert [view.text[at : at + 5] for at in starts(view, {1, 3}, {0}, "<U>")] == ["<U>hi", "<U>go"]


@pytest.mark.parametrize(
    "view",
    [
        layout((None, "<A>"), (2, "b"), (None, "<E><U>"), (1, "hi")),  # an answer before the first question
        layout(
            (None, "<U>"), (0, "sys"), (None, "\n"), (1, "hi"), (None, "<E><U>"), (3, "go")
        ),  # system in a user turn
        layout((None, "<U>"), (1, "hi"), (None, "<E>"), (0, "sys"), (None, "<U>"), (3, "go")),  # system in the middle
    ],
)
def test_user_turns_that_can_not_be_taken_out_cleanly_are_none(view: Layout) -> None:
    assert starts(view, {1, 3}, {0}, "<U>") == []


def test_control_tokens_are_seen_in_a_text() -> None:
    assert [GRAMMAR.spells_control(text) for text in ("plain", "a < b", "a<E>b")] == [False, False, True]
