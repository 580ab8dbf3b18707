"""A conversation as chat templates read it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sft_toolkit.data.conversation import Conversation, Message

CALLS_AS_TEXT = "tool calls written as JSON text, because the chat template has no place for them"

Key = tuple[str, bool]
"""Template arguments as JSON, and whether there are tools."""


@dataclass(frozen=True)
class Chat:
    """A conversation as the template reads it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, conversation: Conversation) -> Chat:
        """With tool calls where the conversation has them."""
        messages = [message.as_template_dict() for message in conversation.messages]
        return cls(messages, conversation.tools, conversation.template_kwargs)

    @classmethod
    def with_calls_as_text(cls, conversation: Conversation) -> Chat:
        """With each tool call as one JSON object on a line of the assistant's text, noted."""
        messages = [_calls_as_text(message).as_template_dict() for message in conversation.messages]
        return cls(messages, conversation.tools, conversation.template_kwargs, (CALLS_AS_TEXT,))

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(message["role"] for message in self.messages)

    @property
    def key(self) -> Key:
        """What the template's grammar depends on."""
        kwargs = json.dumps(self.kwargs, sort_keys=True, default=repr) if self.kwargs else ""
        return kwargs, self.tools is not None

    @property
    def has_calls(self) -> bool:
        return any("tool_calls" in message for message in self.messages)

    @property
    def is_plain(self) -> bool:
        """Nothing but roles and texts."""
        return self.tools is None and all(message.keys() == {"role", "content"} for message in self.messages)

    def where(self, *roles: str) -> list[int]:
        """Indices of the messages of these roles."""
        return [index for index, message in enumerate(self.messages) if message["role"] in roles]


def _calls_as_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]
    content = "\n".join([*([message.content] if message.content else []), *calls])
    return Message(message.role, content, weight=message.weight, extra=message.extra)
