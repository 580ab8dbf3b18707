"""What a row is, once its layout no longer matters: a conversation, a plain text, or tokens.

Everything is checked on construction, so whoever holds one of these need not check again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Arguments of `apply_chat_template` itself: in a row they would swap the template, or stop it from being rendered.
_NO_TEMPLATE_ARGUMENTS = frozenset(
    {"chat_template", "messages", "tools", "add_generation_prompt", "continue_final_message", "conversation"}
    | {"tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict", "tokenizer_kwargs"}
    | {"return_assistant_tokens_mask"}
)

ROLES = ("system", "developer", "user", "assistant", "tool")
IGNORED = -100  # label of a position that is not learned, as in torch's cross-entropy


class RowError(ValueError):
    """A row that can't become an example.

    The message is the reason alone ("message 2: ..."); whoever knows the file and the row puts them before it.
    """


@dataclass(frozen=True)
class Message:
    """One turn.

    Args:
        role: one of `ROLES`.
        content: the text, to the byte. None only for an assistant that calls tools and says nothing.
        tool_calls: `[{"type": "function", "function": {"name": str, "arguments": dict}}, ...]`, assistants only.
        weight: factor on this turn's loss; 0 opts it out, None is 1.
        extra: whatever else a chat template may read (`name`, `tool_call_id`, `reasoning_content`, ...).

    Raises:
        RowError: unknown role, missing content, tool calls of a non-assistant, or a weight below 0.
    """

    role: str
    content: str | None
    tool_calls: list[dict[str, Any]] | None = None
    weight: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise RowError(f"unknown role {self.role!r}; accepted: {', '.join(ROLES)}")
        if self.tool_calls and self.role != "assistant":
            raise RowError(f"tool_calls belong to an assistant, not to role '{self.role}'")
        if self.content is None and not self.tool_calls:
            needed = 'text or tool_calls (an empty text is written "")' if self.role == "assistant" else "text"
            raise RowError(f"the {self.role} content is null or missing; expected {needed}")
        if self.weight is not None and not (math.isfinite(self.weight) and self.weight >= 0):
            raise RowError(f"weight is {self.weight}; expected a finite number of at least 0")

    def as_template_dict(self) -> dict[str, Any]:
        """The message as a chat template reads it: absent keys stay absent.

        A missing content becomes "": many templates print or concatenate it without a test, which would write
        the word None or fail.
        """
        message: dict[str, Any] = {"role": self.role, "content": self.content or "", **self.extra}
        if self.tool_calls:
            message["tool_calls"] = self.tool_calls
        return message


@dataclass(frozen=True)
class Conversation:
    """Messages to be rendered by the tokenizer's own chat template.

    Args:
        messages: at least one.
        tools: JSON schemas of the functions that the assistant may call.
        template_kwargs: further arguments of the template for this row, e.g. `{"enable_thinking": False}`.
        completion_from: index of the first message of the completion, for rows given as prompt and completion.

    Raises:
        RowError: no messages, `completion_from` leaves no completion, or a template argument that is none.
    """

    messages: tuple[Message, ...]
    tools: list[dict[str, Any]] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    completion_from: int | None = None

    def __post_init__(self) -> None:
        if not self.messages:
            raise RowError("the conversation has no messages")
        if self.completion_from is not None and not 0 <= self.completion_from < len(self.messages):
            raise RowError("the completion has no messages")
        if taken := sorted(_NO_TEMPLATE_ARGUMENTS & self.template_kwargs.keys()):
            raise RowError(f"chat_template_kwargs: {taken[0]!r} is no argument that a row can give its template")


@dataclass(frozen=True)
class PlainText:
    """Text without turns: `completion` is learned after `prompt`. A plain text has an empty prompt."""

    prompt: str
    completion: str


@dataclass(frozen=True)
class TokenRow:
    """A row that is tokens already. `labels[i]` is `input_ids[i]` where learned, -100 elsewhere; both shape (L,).

    `weights`, (L,) as well, are the factors of the tokens' losses; None is 1 for each.

    Raises:
        RowError: no tokens, unequal lengths, labels that were shifted by one already (the model shifts them), or a
            weight that is below 0 or not finite.
    """

    input_ids: list[int]
    labels: list[int]
    weights: list[float] | None = None

    def __post_init__(self) -> None:
        if not self.input_ids:
            raise RowError("input_ids is empty")
        if len(self.input_ids) != len(self.labels):
            raise RowError(f"input_ids has {len(self.input_ids)} tokens, labels has {len(self.labels)}")
        if self.weights is not None:
            if len(self.weights) != len(self.labels):
                raise RowError(f"input_ids has {len(self.input_ids)} tokens, loss_weights has {len(self.weights)}")
            if bad := [weight for weight in self.weights if not (math.isfinite(weight) and weight >= 0)]:
                raise RowError(f"loss_weights holds {bad[0]}; expected finite numbers of at least 0")
        if _shifted(self.input_ids, self.labels):
            raise RowError("labels are shifted by one; each label must stand at its own token, the model shifts them")


def _shifted(input_ids: Sequence[int], labels: Sequence[int]) -> bool:
    """True if some label differs from its own token, and all those of the first L-1 name the next token."""
    learned = [i for i in range(len(labels) - 1) if labels[i] != IGNORED]
    return any(labels[i] != input_ids[i] for i in learned) and all(labels[i] == input_ids[i + 1] for i in learned)


Example = Conversation | PlainText | TokenRow
