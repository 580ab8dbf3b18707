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
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from sft_toolkit.data import grammar as grammars
from sft_toolkit.data import spans
from sft_toolkit.data.chat import CALLS_AS_TEXT, Chat, Key
from sft_toolkit.data.compiled import PlainRenderer
from sft_toolkit.data.conversation import Conversation, RowError
from sft_toolkit.data.skeleton import LEFT_OUT, Located, Skeleton
from sft_toolkit.data.spans import Grammar, Layout, Marker, Unproven
from sft_toolkit.data.turns import Tails, assistant_turns, user_turn_starts
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["CALLS_AS_TEXT", "LEFT_OUT", "TRIMMED", "Chat", "ChatTemplate", "Located"]

TRIMMED = "white space around a message that the chat template trims"

# What a template may raise on a row that it was not written for; anything else is a bug and passes through.
_REFUSED = (TemplateError, TypeError, ValueError, LookupError, AttributeError)

Messages = list[dict[str, Any]]
_PROBE = "\U0010dfff"  # a character of a private plane: no template writes it itself


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

    def grammar(self, key: Key = ("", False)) -> Grammar:
        """What the template writes around turns, for conversations with this `Chat.key`."""
        return self._grammar(key)

    def chat(self, conversation: Conversation) -> Chat:
        """The conversation as the template reads it; tool calls become text where it has no place for them."""
        chat = Chat.of(conversation)
        return Chat.with_calls_as_text(conversation) if chat.has_calls and not self._shows_calls(chat.key) else chat

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
            return self._render_plain([self._as_read(messages) for messages in conversations])
        except _REFUSED:
            return []  # which row it is and why comes out when each is rendered alone

    def locate(self, chat: Chat, text: str) -> Located:
        """Where turns stand in `text`, the rendered `chat`.

        Raises:
            Unproven: it can't be told with certainty.
        """
        if chat.is_plain and (skeleton := self._skeleton(chat.roles, chat.key[0])):
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
        if any(map(self.grammar(chat.key).spells_control, marker.unmarked)):
            raise Unproven("a control token is spelled in the id or in an argument name of a tool call")
        located = self._located(chat, layout)
        notes = [LEFT_OUT] if len({slot.number for slot in layout.slots}) < len(marker.owners) else []
        contents = (message["content"] for message in chat.messages)
        notes += [TRIMMED] if any(_padded(content) and content not in text for content in contents) else []
        return replace(located, notes=tuple(notes))

    def _located(self, chat: Chat, layout: Layout) -> Located:
        grammar = self.grammar(chat.key)
        tails = Tails(
            prompt=lambda message: self._tail(chat, message, prompt=True) if message else "",
            finished=lambda message: self._tail(chat, message + 1, prompt=False),
        )
        with_calls = {index for index, message in enumerate(chat.messages) if "tool_calls" in message}
        turns = assistant_turns(layout, chat.where("assistant"), with_calls, grammar, tails)
        starts = user_turn_starts(layout, chat.where("user"), chat.where("system", "developer"), grammar.user_header)
        return Located(turns, starts)

    def _tail(self, chat: Chat, messages: int, prompt: bool) -> str:
        """The template's text at the end of the first so many messages, or of their inference prompt."""
        marker = Marker()
        text = self._render_marked(marker.mark(chat.messages[:messages]), chat, prompt)
        return spans.unmark(text, marker.owners).before(-1)

    def _build_skeleton(self, roles: tuple[str, ...], kwargs_key: str) -> Skeleton | None:
        """None where the template shows an assistant's text more or less than once, or refuses letters."""
        messages = [{"role": role, "content": "x"} for role in roles]
        chat = Chat(messages, None, json.loads(kwargs_key) if kwargs_key else {})
        marker = Marker()
        try:
            layout = spans.unmark(self._render_marked(marker.mark(messages), chat), marker.owners)
            located = self._located(chat, layout)
        except Unproven:
            return None
        shown = [slot.message for slot in layout.slots]
        if any(shown.count(message) != 1 for message in chat.where("assistant")):
            return None
        return Skeleton.of(layout, located, len(roles))

    def _shows_calls(self, key: Key) -> bool:
        try:
            return self.grammar(key).shows_calls
        except Unproven:
            return True  # said when the conversation is located

    def _learn_grammar(self, key: Key) -> Grammar:
        # With tools, transformers takes another template where a tokenizer has several. And some templates are for
        # conversations with tools alone: those are learned with an empty list of them.
        kwargs, with_tools = key
        named = self._tokenizer.chat_template
        if with_tools and isinstance(named, dict) and "tool_use" in named:
            return self._learned(kwargs, [])
        try:
            return self._learned(kwargs, None)
        except Unproven:
            if not with_tools:
                raise
            return self._learned(kwargs, [])

    def _learned(self, kwargs_key: str, tools: list[dict[str, Any]] | None) -> Grammar:
        kwargs = json.loads(kwargs_key) if kwargs_key else {}
        return grammars.learn(
            lambda messages, prompt: self._render(Chat([*messages], tools, kwargs), prompt), self._specials, self._added
        )

    def _render_marked(self, messages: Messages, chat: Chat, prompt: bool = False) -> str:
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
        return self._apply(self._as_read(chat.messages), chat.tools, chat.kwargs, prompt)

    def _apply(
        self,
        messages: Messages,
        tools: Messages | None = None,
        kwargs: dict[str, Any] | None = None,
        prompt: bool = False,
    ) -> str:
        functions: list[dict[str, Any] | Callable[..., Any]] | None = None if tools is None else [*tools]
        try:
            text = self._tokenizer.apply_chat_template(
                messages, tools=functions, add_generation_prompt=prompt, tokenize=False, **(kwargs or {})
            )
        except _REFUSED as error:
            raise RowError(f"the chat template refuses the conversation: {error}") from error
        return str(text)

    def _as_read(self, messages: Messages) -> Messages:
        """The messages with each content as the template wants it: as text or, where it shows no text, in parts."""
        if not self._wants_parts:
            return messages
        return [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in messages]

    @cached_property
    def _wants_parts(self) -> bool:
        """True if the template shows content only as a list of parts, as those of image models do."""
        return not self._shows(_PROBE) and self._shows([{"type": "text", "text": _PROBE}])

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        try:
            text = self._apply([{"role": role, "content": content} for role in ("user", "assistant")])
        except RowError:
            return False
        return text.count(_PROBE) == 2


def _padded(text: str) -> bool:
    return text[:1].isspace() or text[-1:].isspace()
