"""OpenAI messages: text, parts, calls, weights; whatever is no text is an error with the message's number."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sft_toolkit.data.conversation import Conversation, Message
from tests.unit.layout_rows import example, reason

NO_JSON = "tool call 1: 'arguments' is text that is not valid JSON: "
ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None]}}}
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
ROLES = "system, developer, user, assistant, tool"


def chat(row: dict[str, Any] | list[dict[str, Any]], **maps: dict[str, str]) -> Conversation:
    result = example("messages", {"messages": row} if isinstance(row, list) else row, **maps)
    assert isinstance(result, Conversation)
    return result


class TestMessages:
    def test_plain_turns(self) -> None:
        turns = [
            {"role": "system", "content": "s"},
            {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"},
        ]
        assert chat(turns) == Conversation((Message("system", "s"), Message("user", "u"), Message("assistant", "a")))

    def test_text_parts_equal_the_plain_string(self) -> None:
        parts = [{"type": "text", "text": "a"}, {"text": "\nb"}, "c"]
        assert chat([{"role": "user", "content": parts}]) == chat([{"role": "user", "content": "a\nbc"}])

    @pytest.mark.parametrize(
        ("part", "message"),
        [
            (
                {"type": "image_url", "image_url": "x"},
                "content part 2 is of type 'image_url'; only text parts can be trained",
            ),
            (7, "content part 2 is the number 7; only text parts can be trained"),
            ({"type": "text"}, "'text' is missing; the row has 'type'"),
            ({"type": "text", "text": None}, "'text' is null, not text"),
        ],
    )
    def test_parts_that_are_no_text(self, part: Any, message: str) -> None:
        row = {"messages": [{"role": "user", "content": ["x", part]}]}
        assert reason("messages", row) == f"message 1: {message}"

    @pytest.mark.parametrize("arguments", [{"a": 1, "b": [2.5, None]}, '{"a": 1, "b": [2.5, null]}'])
    def test_a_silent_call_keeps_its_call_and_never_says_none(self, arguments: Any) -> None:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        for turn in ({"content": None}, {}, {"content": ""}):
            (message,) = chat([{"role": "assistant", "tool_calls": [call], **turn}]).messages
            assert message.tool_calls == [ADD]
            assert message.as_template_dict() == {"role": "assistant", "content": "", "tool_calls": [ADD]}

    def test_a_call_keeps_its_id_and_may_lack_the_envelope(self) -> None:
        calls = [{"id": "c1", "index": None, **ADD}, {"name": "now"}, {"name": "now", "arguments": ""}]
        now = {"type": "function", "function": {"name": "now", "arguments": {}}}
        message = chat([{"role": "assistant", "content": "", "tool_calls": calls}]).messages[0]
        assert message.tool_calls == [{"id": "c1", **ADD}, now, now]

    @pytest.mark.parametrize(
        ("calls", "message"),
        [
            ("{", "'tool_calls' is text that is not valid JSON: "),
            ({"name": "add"}, "'tool_calls' is an object, not a list"),
            ([7], "tool call 1: it is the number 7, not an object with name and arguments"),
            ([ADD, {"function": {"arguments": {}}}], "tool call 2: 'name' is null, not text"),
            ([{"name": "add", "arguments": "[1]"}], "tool call 1: 'arguments' is a list, not an object"),
            ([{"name": "add", "arguments": "{a: 1}"}], NO_JSON),
            ([{"name": "add", "arguments": '{"a": 1, "a": 2}'}], f"{NO_JSON}the key 'a' appears twice in one object"),
        ],
    )
    def test_wrong_calls(self, calls: Any, message: str) -> None:
        row = {"messages": [{"role": "assistant", "content": None, "tool_calls": calls}]}
        assert reason("messages", row).startswith(f"message 1: {message}")

    @pytest.mark.parametrize("calls", [{}, {"tool_calls": None}, {"tool_calls": []}])
    def test_an_assistant_who_says_and_calls_nothing_is_an_error(self, calls: dict[str, Any]) -> None:
        row = {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": None, **calls}]}
        assert reason("messages", row) == (
            "message 2: the assistant content is null or missing; "
            'expected text or tool_calls (an empty text is written "")'
        )

    @pytest.mark.parametrize(
        ("content", "what"), [(42, "the number 42"), (1.5, "the number 1.5"), (True, "true"), ({"a": 1}, "an object")]
    )
    def test_content_that_is_no_text(self, content: Any, what: str) -> None:
        row = {"messages": [{"role": "user", "content": content}]}
        assert reason("messages", row) == f"message 1: 'content' is {what}, not text"

    def test_other_keys_reach_the_template_and_nulls_do_not(self) -> None:
        turn = {"role": "tool", "content": "4", "tool_call_id": "c1", "name": None, "weight": 0}
        assert chat([turn]).messages == (Message("tool", "4", weight=0.0, extra={"tool_call_id": "c1"}),)

    def test_train_false_is_a_weight_of_zero_and_no_text_for_the_template(self) -> None:
        said = {"role": "assistant", "content": "x"}
        for key in ("train", "training"):
            assert chat([{**said, key: False}]).messages == (Message("assistant", "x", weight=0.0),)
            assert chat([{**said, key: True}]).messages == (Message("assistant", "x"),)
            assert chat([{**said, key: True, "weight": 0.5}]).messages == (Message("assistant", "x", weight=0.5),)
        for wrong, message in (
            ({"train": 0}, "message 1: 'train' is the number 0, not true or false"),
            ({"train": False, "weight": 1}, "message 1: 'train' is false, but 'weight' is 1: leave one of them out"),
        ):
            assert reason("messages", {"messages": [{**said, **wrong}]}) == message

    @pytest.mark.parametrize(
        ("weight", "message"),
        [
            (True, "'weight' is true, not a number"),
            ("0", "'weight' is text, not a number"),
            (-1, "weight is -1.0; expected a finite number of at least 0"),
        ],
    )
    def test_wrong_weights(self, weight: Any, message: str) -> None:
        row = {"messages": [{"role": "user", "content": "x", "weight": weight}]}
        assert reason("messages", row) == f"message 1: {message}"

    @pytest.mark.parametrize("stored", [json.dumps, lambda value: value])
    def test_tools_and_template_arguments_may_be_json_text(self, stored: Any) -> None:
        row = {
            "messages": stored([{"role": "user", "content": "2020-01-01"}]),
            "tools": stored([SCHEMA]),
            "chat_template_kwargs": stored({"enable_thinking": False}),
        }
        assert chat(row) == Conversation((Message("user", "2020-01-01"),), [SCHEMA], {"enable_thinking": False})

    @pytest.mark.parametrize("empty", [None, "", "[]", []])
    def test_no_tools_are_none(self, empty: Any) -> None:
        assert chat({"messages": [{"role": "user", "content": "x"}], "tools": empty}).tools is None

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({}, "'messages' is missing; the row has no columns"),
            ({"text": "x"}, "'messages' is missing; the row has 'text'"),
            ({"messages": None}, "the conversation has no messages"),
            ({"messages": []}, "the conversation has no messages"),
            ({"messages": {"role": "user"}}, "'messages' is an object, not a list"),
            ({"messages": ["hi"]}, "message 1: it is text, not an object with role and content"),
            ({"messages": [{"content": "x"}]}, "message 1: 'role' is missing; it has 'content'"),
            (
                {"messages": [{"from": "human", "value": "x"}]},
                "message 1: 'role' is missing; it has 'from', 'value' (from/value is the layout sharegpt)",
            ),
            ({"messages": [{"role": 1, "content": "x"}]}, "message 1: the role is the number 1, not text"),
            (
                {"messages": [{"role": "narrator", "content": "x"}]},
                f"message 1: unknown role 'narrator'; accepted: {ROLES}. "
                "Others are mapped by `roles: {theirs: ours}`",
            ),
            ({"messages": [{"role": "user", "content": "x"}], "tools": [1]}, "tool 1 is the number 1, not an object"),
            (
                {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": [1]},
                "'chat_template_kwargs' is a list, not an object",
            ),
            (
                {"messages": [{"role": "user", "content": "\ud83d"}]},
                "message 1: 'content' holds a lone surrogate (\\ud83d), which is no character",
            ),
        ],
    )
    def test_wrong_rows(self, row: dict[str, Any], message: str) -> None:
        assert reason("messages", row) == message

    def test_roles_are_mapped(self) -> None:
        turns = [{"role": "bot", "content": "x"}]
        assert chat(turns, roles={"bot": "assistant"}).messages == (Message("assistant", "x"),)
        assert reason("messages", {"messages": turns}, roles={"bot": "robot", "me": "user"}) == (
            f"message 1: unknown role 'robot' (by `roles` from 'bot'); accepted: {ROLES}, bot, me. "
            "Others are mapped by `roles: {theirs: ours}`"
        )
