"""Layouts `prompt_completion` and `text`: what is learned follows what is given, with or without turns."""

from __future__ import annotations

from collections.abc import Mapping

from sft_toolkit.data.conversation import Conversation, PlainText, RowError
from sft_toolkit.data.layouts.messages import read_message, read_turns, template_kwargs
from sft_toolkit.data.layouts.tools import tool_schemas
from sft_toolkit.data.layouts.values import Row, describe, located, text


def from_prompt_completion(row: Row, roles: Mapping[str, str]) -> PlainText | Conversation:
    """`prompt` and `completion`: both text, or both lists of messages (then `tools` may stand beside them)."""
    lists = [column for column in ("prompt", "completion") if isinstance(row.get(column), list)]
    if not lists:
        return PlainText(text(row, "prompt"), text(row, "completion"))
    if len(lists) == 1:
        other = "completion" if lists == ["prompt"] else "prompt"
        state = describe(row[other]) if other in row else "missing"
        raise RowError(f"{lists[0]!r} is a list of messages, {other!r} is {state}; both must be of one kind")
    sides = []
    for column in ("prompt", "completion"):
        with located(column):
            sides.append(read_turns(row[column], column, lambda entry: read_message(entry, roles)))
    prompt, completion = sides
    return Conversation(prompt + completion, tool_schemas(row.get("tools")), template_kwargs(row), len(prompt))


def from_text(row: Row) -> PlainText:
    """`text`, all of which is learned."""
    return PlainText("", text(row, "text"))
