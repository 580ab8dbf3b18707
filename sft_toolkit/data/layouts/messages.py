"""Layout `messages`: OpenAI chat messages. Its parts also serve the other layouts that hold turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sft_toolkit.data.conversation import ROLES, Conversation, Message, RowError
from sft_toolkit.data.layouts.tools import tool_calls, tool_schemas
from sft_toolkit.data.layouts.values import Row, as_text, describe, list_of, located, mapping, required, text

_OWN_ROLES = {role: role for role in ROLES}
_TRAIN = ("train", "training")


def from_messages(row: Row, roles: Mapping[str, str]) -> Conversation:
    """`messages` with `role`, `content`, `tool_calls`, `weight`; beside it `tools` and `chat_template_kwargs`."""
    turns = read_turns(required(row, "messages"), "messages", lambda entry: read_message(entry, roles))
    return Conversation(turns, tool_schemas(row.get("tools")), template_kwargs(row))


def read_turns(value: Any, column: str, read: Callable[[dict[str, Any]], Message]) -> tuple[Message, ...]:
    """Applies `read` to each entry of a list; an error says which message, counted from 1."""
    turns = []
    for number, entry in enumerate(list_of(value, column), 1):
        with located(f"message {number}"):
            if not isinstance(entry, dict):
                raise RowError(f"it is {describe(entry)}, not an object with role and content")
            turns.append(read(entry))
    return tuple(turns)


def read_message(entry: dict[str, Any], roles: Mapping[str, str]) -> Message:
    """An entry with `role` and `content`."""
    if "role" not in entry:
        hint = " (from/value is the layout sharegpt)" if "from" in entry else ""
        raise RowError(f"'role' is missing; it has {', '.join(map(repr, entry)) or 'no keys'}{hint}")
    return build_message(entry, resolve_role(entry["role"], roles, _OWN_ROLES), "role", "content")


def build_message(entry: dict[str, Any], role: str, role_key: str, content_key: str) -> Message:
    """A message of this role; keys beside role, content, tool_calls, weight, train go to the template, nulls don't."""
    own = {role_key, content_key, "tool_calls", "weight", *_TRAIN}
    return Message(
        role=role,
        content=read_content(entry.get(content_key), content_key),
        tool_calls=tool_calls(entry.get("tool_calls")),
        weight=read_weight(entry),
        extra={key: value for key, value in entry.items() if key not in own and value is not None},
    )


def resolve_role(name: Any, roles: Mapping[str, str], accepted: Mapping[str, str]) -> str:
    """Our name of a role: first the user's map {theirs: ours}, then the layout's own names.

    Raises:
        RowError: unknown; names the role and all that are accepted.
    """
    if not isinstance(name, str):
        raise RowError(f"the role is {describe(name)}, not text")
    ours = roles.get(name, name)
    if ours in accepted:
        return accepted[ours]
    mapped = f" (by `roles` from {name!r})" if ours != name else ""
    known = ", ".join([*accepted, *(theirs for theirs in roles if theirs not in accepted)])
    raise RowError(f"unknown role {ours!r}{mapped}; accepted: {known}. Others are mapped by `roles: {{theirs: ours}}`")


def read_content(value: Any, name: str) -> str | None:
    """Text, None, or a list of text parts, which are joined with nothing between them.

    Raises:
        RowError: any other value, or a part that is no text (an image, say).
    """
    if value is None:
        return None
    if not isinstance(value, list):
        return as_text(value, name)
    return "".join(_part(part, number) for number, part in enumerate(value, 1))


def read_weight(entry: Mapping[str, Any]) -> float | None:
    """The loss weight of a message, or None: its `weight`, or 0 by `train: false`, as axolotl writes it."""
    value = entry.get("weight")
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise RowError(f"'weight' is {describe(value)}, not a number")
    flags = {key: entry[key] for key in _TRAIN if entry.get(key) is not None}
    for key, flag in flags.items():
        if not isinstance(flag, bool):
            raise RowError(f"{key!r} is {describe(flag)}, not true or false")
        if value is not None and flag is not bool(value):
            raise RowError(f"{key!r} is {describe(flag)}, but 'weight' is {value}: leave one of them out")
    return 0.0 if False in flags.values() else None if value is None else float(value)


def template_kwargs(row: Row) -> dict[str, Any]:
    """`chat_template_kwargs` of a row."""
    return mapping(row.get("chat_template_kwargs"), "chat_template_kwargs")


def _part(part: Any, number: int) -> str:
    if isinstance(part, str):
        return as_text(part, f"part {number}")
    if not isinstance(part, dict) or part.get("type", "text") != "text":
        kind = f"of type {part['type']!r}" if isinstance(part, dict) else describe(part)
        raise RowError(f"content part {number} is {kind}; only text parts can be trained")
    return text(part, "text")
