"""Layout `sharegpt`: `conversations` with `from` and `value`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sft_toolkit.data.conversation import Conversation, Message, RowError
from sft_toolkit.data.layouts.messages import (
    build_message,
    read_turns,
    read_weight,
    resolve_role,
    template_kwargs,
)
from sft_toolkit.data.layouts.tools import function_call, tool_schemas
from sft_toolkit.data.layouts.values import Row, located, optional_text, required
from sft_toolkit.data.readers.json_text import parse_value

_CALL = "function_call"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
    _CALL: _CALL,
}


def from_sharegpt(row: Row, roles: Mapping[str, str]) -> Conversation:
    """`conversations`, whose entries hold from/value or role/content; beside it `system` and `tools`.

    A `function_call` becomes an assistant turn with tool_calls, an `observation` a tool turn. Bare tool schemas get
    the envelope that chat templates read.
    """
    turns = read_turns(required(row, "conversations"), "conversations", lambda entry: _message(entry, roles))
    system = optional_text(row, "system")
    if system is not None:
        if turns and turns[0].role == "system":
            raise RowError("there is a system text twice: in 'system' and in the first message")
        turns = (Message("system", system), *turns)
    return Conversation(turns, tool_schemas(row.get("tools"), wrap=True), template_kwargs(row))


def _message(entry: dict[str, Any], roles: Mapping[str, str]) -> Message:
    role_key, content_key = ("from", "value") if "from" in entry else ("role", "content")
    if role_key not in entry:
        raise RowError(f"'from' is missing; it has {', '.join(map(repr, entry)) or 'no keys'}")
    role = resolve_role(entry[role_key], roles, _ROLES)
    if role == _CALL:
        calls = _calls(entry.get(content_key))
        return Message("assistant", None, calls, read_weight(entry))
    return build_message(entry, role, role_key, content_key)


def _calls(value: Any) -> list[dict[str, Any]]:
    """The call or calls of a `function_call`: `{"name", "arguments"}`, a list of these, or the JSON text of either."""
    if isinstance(value, str):
        try:
            value = parse_value(value)
        except (ValueError, RecursionError) as error:
            raise RowError(f"the function_call is not valid JSON: {error}") from None
    with located("the function_call"):
        return [function_call(call) for call in (value if isinstance(value, list) else [value])]
