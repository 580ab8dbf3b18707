"""The tokenizer's own chat template: renders conversations and proves where each assistant's turn stands.

A conversation is rendered once, as a whole, with the texts as they are. Where its turns stand is found in one of two
ways, and both end in an equality of whole texts:

- most conversations: the template's own pieces are known from a conversation of the same roles whose texts are one
  letter long (cached). Pieces and texts put together must be the rendered text.
- all others (tool calls, reasoning, anything that a template rewrites): the conversation is rendered once more with
  each text between markers. Without the markers it must be the rendered text.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sft_toolkit.data import grammar as grammars
from sft_toolkit.data import spans
from sft_toolkit.data.compiled import PlainRenderer
from sft_toolkit.data.conversation import Conversation, Message, RowError
from sft_toolkit.data.spans import Grammar, Layout, Marker, Turn, Unproven
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRIMMED = "white space around a message that the chat template trims"
LEFT_OUT = "text that the chat template leaves out (earlier reasoning, a system message, text beside a tool call)"
CALLS_AS_TEXT = "tool calls written as JSON text, because the chat template has no place for them"

# What a template may raise on a row that it was not written for; anything else is a bug and passes through.
_REFUSED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)


@dataclass(frozen=True)
class Chat:
    """A conversation as the template reads it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    kwargs: dict[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(message["role"] for message in self.messages)

    @property
    def kwargs_key(self) -> str:
        return json.dumps(self.kwargs, sort_keys=True, default=repr) if self.kwargs else ""

    @property
    def is_plain(self) -> bool:
        """Nothing but roles and texts."""
        return self.tools is None and all(message.keys() == {"role", "content"} for message in self.messages)

    def where(self, *roles: str) -> list[int]:
        """Indices of the messages of these roles."""
        return [index for index, message in enumerate(self.messages) if message["role"] in roles]


@dataclass(frozen=True)
class Located:
    """Character positions in a rendered conversation: what assistants produce, and where user turns begin.

    `notes` say what the template did to the texts.
    """

    turns: list[Turn]
    user_starts: list[int]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Skeleton:
    """A located conversation of one-letter texts, from which others of the same roles are located by arithmetic.

    Attributes:
        parts: the template's pieces and, at the odd places, the texts.
        order: message index of each text.
        hidden: messages that the template leaves out.
        ends: end of each text in the skeleton's own text.
        located: turns in the skeleton's own text.
    """

    parts: list[str]
    order: list[int]
    hidden: list[int]
    ends: list[int]
    located: Located

    def locate(self, text: str, contents: Sequence[str], note: str = "") -> Located | None:
        """Positions in `text` if it is exactly the pieces around these contents, else None."""
        texts = [contents[message] for message in self.order]
        parts = self.parts.copy()
        parts[1::2] = texts
        if "".join(parts) != text:
            return None
        grown = list(accumulate((len(item) - 1 for item in texts), initial=0))

        def moved(position: int) -> int:
            return position + grown[bisect_right(self.ends, position)]

        turns = [Turn(t.message, moved(t.start), moved(t.end), t.closing) for t in self.located.turns]
        notes = [note] if note else []
        notes += [LEFT_OUT] if any(contents[message].strip() for message in self.hidden) else []
        return Located(turns, [moved(start) for start in self.located.user_starts], tuple(notes))


class ChatTemplate:
    """The template of one tokenizer.

    Args:
        tokenizer: its `chat_template` is rendered through `apply_chat_template`, nothing else.

    Raises:
        ConfigError: the tokenizer has no chat template.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        try:
            tokenizer.get_chat_template()
        except ValueError as error:
            raise ConfigError(
                f"the tokenizer '{tokenizer.name_or_path}' has no default chat template, which rows of messages need; "
                "model.chat_template: FILE gives it one"
            ) from error
        self._tokenizer = tokenizer
        self._render_plain = PlainRenderer(tokenizer)
        added = [str(token) for token in tokenizer.added_tokens_decoder.values()]
        special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
        self._specials = [*special, *map(str, tokenizer.all_special_tokens)]
        self._added = [*added, *self._specials]
        self._grammar = lru_cache(maxsize=64)(self._learn_grammar)
        self._skeleton = lru_cache(maxsize=1024)(self._build_skeleton)

    def grammar(self, kwargs_key: str = "") -> Grammar:
        """What the template writes around turns, for template arguments given as JSON."""
        return self._grammar(kwargs_key)

    def chat(self, conversation: Conversation) -> Chat:
        """The conversation as the template reads it.

        Where the template has no place for tool calls they become the assistant's text (noted), as
        one JSON object a line: `{"name": ..., "arguments": {...}}`.
        """
        messages = [message.as_template_dict() for message in conversation.messages]
        chat = Chat(messages, conversation.tools, conversation.template_kwargs)
        if any("tool_calls" in message for message in messages) and not self._shows_calls(chat.kwargs_key):
            messages = [_calls_as_text(message).as_template_dict() for message in conversation.messages]
            return Chat(messages, chat.tools, chat.kwargs, (CALLS_AS_TEXT,))
        return chat

    def render(self, chats: Sequence[Chat]) -> list[str | RowError]:
        """The rendered texts, in order; a RowError where the template refuses a conversation."""
        plain = [i for i, chat in enumerate(chats) if chat.is_plain and not chat.kwargs]
        together = dict(zip(plain, self._render_together([chats[i].messages for i in plain]), strict=False))
        return [together[i] if i in together else self._try_render(chat) for i, chat in enumerate(chats)]

    def _render_together(self, conversations: list[list[dict[str, Any]]]) -> list[str]:
        """All of these plain conversations; none if one of them is refused."""
        if not conversations:
            return []
        try:
            return self._render_plain(conversations)
        except _REFUSED:
            return []  # which row it is and why comes out when each is rendered alone

    def locate(self, chat: Chat, text: str) -> Located:
        """Where turns stand in `text`, the rendered `chat`.

        Raises:
            Unproven: it can't be told with certainty.
        """
        if chat.is_plain and (skeleton := self._skeleton(chat.roles, chat.kwargs_key)):
            contents = [message["content"] for message in chat.messages]
            located = skeleton.locate(text, contents)
            if located is None and any(map(_padded, contents)):
                located = skeleton.locate(text, [content.strip() for content in contents], TRIMMED)
            if located is not None:
                return located
        return self._locate_marked(chat, text)

    def _locate_marked(self, chat: Chat, text: str) -> Located:
        marker = Marker()
        layout = spans.unmark(self._render_marked(marker.mark(chat.messages), chat), marker.owners)
        if layout.text != text:
            raise Unproven("the chat template treats a text differently once its ends are marked")
        if any(map(self.grammar(chat.kwargs_key).spells_control, marker.unmarked)):
            raise Unproven("a control token is spelled in the id or in an argument name of a tool call")
        located = self._located(chat, layout)
        with_calls = {index for index, message in enumerate(chat.messages) if "tool_calls" in message}
        for turn in located.turns:
            if turn.closing is None and turn.message in with_calls:
                raise Unproven(f"the end of the tool calls of message {turn.message + 1} can't be told")
        notes = [LEFT_OUT] if len({slot.number for slot in layout.slots}) < len(marker.owners) else []
        contents = (message["content"] for message in chat.messages)
        notes += [TRIMMED] if any(_padded(content) and content not in text for content in contents) else []
        return replace(located, notes=tuple(notes))

    def _located(self, chat: Chat, layout: Layout) -> Located:
        grammar = self.grammar(chat.kwargs_key)
        turns = spans.assistant_turns(
            layout, chat.where("assistant"), grammar, lambda message: self._prompt_tail(chat, message)
        )
        starts = spans.user_turn_starts(
            layout, chat.where("user"), chat.where("system", "developer"), grammar.user_header
        )
        return Located(turns, starts)

    def _prompt_tail(self, chat: Chat, message: int) -> str:
        """The template's text at the end of the prompt that this message answers."""
        if message == 0:
            return ""
        marker = Marker()
        prompt = self._render_marked(marker.mark(chat.messages[:message]), chat, prompt=True)
        return spans.unmark(prompt, marker.owners).before(-1)

    def _build_skeleton(self, roles: tuple[str, ...], kwargs_key: str) -> _Skeleton | None:
        """None where the template shows an assistant's text more or less than once, or refuses letters."""
        messages = [{"role": role, "content": "x"} for role in roles]
        chat = Chat(messages, None, json.loads(kwargs_key) if kwargs_key else {})
        marker = Marker()
        try:
            layout = spans.unmark(self._render_marked(marker.mark(messages), chat), marker.owners)
            located = self._located(chat, layout)
        except Unproven:
            return None
        order = [slot.message for slot in layout.slots]
        if any(order.count(message) != 1 for message in chat.where("assistant")):
            return None
        parts = [part for i in range(len(order)) for part in (layout.before(i), "")]
        hidden = [message for message in range(len(roles)) if message not in order]
        return _Skeleton([*parts, layout.before(-1)], order, hidden, [slot.end for slot in layout.slots], located)

    def _shows_calls(self, kwargs_key: str) -> bool:
        try:
            return self.grammar(kwargs_key).shows_calls
        except Unproven:
            return True  # said when the conversation is located

    def _learn_grammar(self, kwargs_key: str) -> Grammar:
        return grammars.learn(self._renderer(kwargs_key), self._specials, self._added)

    def _renderer(self, kwargs_key: str) -> grammars.Render:
        kwargs = json.loads(kwargs_key) if kwargs_key else {}
        return lambda messages, prompt: self._render(Chat([*messages], None, kwargs), prompt)

    def _render_marked(self, messages: list[dict[str, Any]], chat: Chat, prompt: bool = False) -> str:
        try:
            return self._render(Chat(messages, chat.tools, chat.kwargs), prompt)
        except RowError as error:
            raise Unproven(f"the chat template refuses the conversation once its texts are marked: {error}") from error

    def _try_render(self, chat: Chat) -> str | RowError:
        try:
            return self._render(chat)
        except RowError as error:
            return error

    def _render(self, chat: Chat, prompt: bool = False) -> str:
        tools: list[dict[str, Any] | Callable[..., Any]] | None = None if chat.tools is None else [*chat.tools]
        try:
            text = self._tokenizer.apply_chat_template(
                chat.messages, tools=tools, add_generation_prompt=prompt, tokenize=False, **chat.kwargs
            )
        except _REFUSED as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        return str(text)


def _padded(text: str) -> bool:
    return text[:1].isspace() or text[-1:].isspace()


def _calls_as_text(message: Message) -> Message:
    if not message.tool_calls:
        return message
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.tool_calls]
    content = "\n".join([*([message.content] if message.content else []), *calls])
    return Message(message.role, content, weight=message.weight, extra=message.extra)
