"""Layout `alpaca`: `instruction`, `input`, `output`, with `system` and `history`."""

from __future__ import annotations

from typing import Any

from sft_toolkit.data.conversation import Conversation, Message, RowError
from sft_toolkit.data.layouts.messages import template_kwargs
from sft_toolkit.data.layouts.tools import tool_schemas
from sft_toolkit.data.layouts.values import Row, as_text, describe, list_of, optional_text, text


def from_alpaca(row: Row) -> Conversation:
    """The user says the instruction and, on a new line, the input if there is one; the assistant says the output.

    `history` holds earlier turns as `[user, assistant]` pairs.
    """
    system = optional_text(row, "system")
    asked = [part for part in (text(row, "instruction"), optional_text(row, "input")) if part]
    messages = [
        *([Message("system", system)] if system is not None else []),
        *_history(row.get("history")),
        Message("user", "\n".join(asked)),
        Message("assistant", text(row, "output")),
    ]
    return Conversation(tuple(messages), tool_schemas(row.get("tools")), template_kwargs(row))


def _history(value: Any) -> list[Message]:
    messages = []
    for number, pair in enumerate(list_of(value, "history"), 1):
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            shape = f"a list of {len(pair)}" if isinstance(pair, (list, tuple)) else describe(pair)
            raise RowError(f"history pair {number} is {shape}, not [user, assistant]")
        said = f"history pair {number}"
        messages += [Message("user", as_text(pair[0], said)), Message("assistant", as_text(pair[1], said))]
    return messages
