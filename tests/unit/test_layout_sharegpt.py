"""ShareGPT: its roles become ours, its function calls become tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sft_toolkit.data.conversation import Conversation, Message
from tests.unit.layout_rows import example, reason

ADD = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2.5, None]}}}
SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


class TestShareGpt:
    def test_every_role(self) -> None:
        said = {
            "system": "s",
            "human": "h",
            "function_call": '{"name": "add", "arguments": {"a": 1, "b": [2.5, null]}}',
            "observation": '{"sum": 3}',
            "gpt": "g",
            "user": "u",
            "tool": "t",
            "assistant": "a",
            "developer": "d",
        }
        row = {"conversations": [{"from": role, "value": value} for role, value in said.items()]}
        assert example("sharegpt", row).messages == (
            Message("system", "s"),
            Message("user", "h"),
            Message("assistant", None, [ADD]),
            Message("tool", '{"sum": 3}'),
            Message("assistant", "g"),
            Message("user", "u"),
            Message("tool", "t"),
            Message("assistant", "a"),
            Message("developer", "d"),
        )

    def test_role_and_content_keys_work_too(self) -> None:
        row = {"conversations": [{"role": "human", "content": "x"}, {"role": "gpt", "content": "y", "weight": 0.5}]}
        assert example("sharegpt", row).messages == (Message("user", "x"), Message("assistant", "y", weight=0.5))

    def test_system_and_tools_beside_the_turns(self) -> None:
        row = {
            "system": "s",
            "tools": json.dumps([SCHEMA, {"type": "function", "function": SCHEMA}]),
            "conversations": [{"from": "human", "value": "x"}],
        }
        enveloped = {"type": "function", "function": SCHEMA}
        assert example("sharegpt", row) == Conversation(
            (Message("system", "s"), Message("user", "x")), [enveloped, enveloped]
        )

    @pytest.mark.parametrize("empty", [None, ""])
    def test_an_empty_system_text_is_none(self, empty: str | None) -> None:
        row = {"system": empty, "conversations": [{"from": "human", "value": "x"}]}
        assert example("sharegpt", row).messages == (Message("user", "x"),)

    def test_one_function_call_turn_may_hold_several_calls(self) -> None:
        calls = json.dumps([ADD["function"], {"name": "now"}])
        row = {"conversations": [{"from": "function_call", "value": calls, "weight": 0}]}
        now = {"type": "function", "function": {"name": "now", "arguments": {}}}
        assert example("sharegpt", row).messages == (Message("assistant", None, [ADD, now], weight=0.0),)

    @pytest.mark.parametrize(
        ("turn", "message"),
        [
            (
                {"from": "narrator", "value": "x"},
                "unknown role 'narrator'; accepted: human, user, gpt, assistant, system, developer, tool, observation, "
                "function_call. Others are mapped by `roles: {theirs: ours}`",
            ),
            ({"value": "x"}, "'from' is missing; it has 'value'"),
            ({"from": "human"}, "the user content is null or missing; expected text"),
            ({"from": "human", "value": 7}, "'value' is the number 7, not text"),
            ({"from": "function_call", "value": "{"}, "the function_call is not valid JSON: "),
            (
                {"from": "function_call", "value": '{"name": "f", "name": "g"}'},
                "the function_call is not valid JSON: the key 'name' appears twice",
            ),
            (
                {"from": "function_call", "value": None},
                "the function_call: it is null, not an object with name and arguments",
            ),
            (
                {"from": "function_call", "value": '{"name": "f", "arguments": [1]}'},
                "the function_call: 'arguments' is a list, not an object",
            ),
            (
                {"from": "function_call", "value": "[]"},
                "the assistant content is null or missing; expected text or tool_calls",
            ),
        ],
    )
    def test_wrong_turns(self, turn: dict[str, Any], message: str) -> None:
        row = {"conversations": [{"from": "human", "value": "x"}, turn]}
        assert reason("sharegpt", row).startswith(f"message 2: {message}")

    def test_two_system_texts_are_an_error(self) -> None:
        row = {"system": "s", "conversations": [{"from": "system", "value": "t"}, {"from": "human", "value": "x"}]}
        assert reason("sharegpt", row) == "there is a system text twice: in 'system' and in the first message"

    def test_roles_may_be_mapped_to_the_layouts_own_names(self) -> None:
        row = {"conversations": [{"from": "tool_call", "value": '{"name": "now"}'}, {"from": "bot", "value": "x"}]}
        now = {"type": "function", "function": {"name": "now", "arguments": {}}}
        assert example("sharegpt", row, roles={"tool_call": "function_call", "bot": "gpt"}).messages == (
            Message("assistant", None, [now]),
            Message("assistant", "x"),
        )
