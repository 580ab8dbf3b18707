"""Plain conversations through the tokenizer's compiled chat template, without the copies that surround each call.

`apply_chat_template` copies and checks every message several times before the template sees it, which is a third of its
time; messages that hold a role and a text and nothing else need none of that. What is called is the very template that
transformers compiled and keeps, and the first conversation of every call is rendered both ways and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers.utils import chat_template_utils

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class PlainRenderer:
    """Renders conversations whose messages hold `role` and `content`, both text, and nothing else."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._direct = _compiled(tokenizer)

    def __call__(self, conversations: Sequence[Messages]) -> list[str]:
        """The texts of `apply_chat_template`, in order; raises what the template raises."""
        if not conversations:
            return []
        if self._direct is not None:
            sample = self._tokenizer.apply_chat_template(conversations[0], tokenize=False)
            if self._direct(conversations[0]) == sample:
                return [self._direct(messages) for messages in conversations]
        return [str(text) for text in self._tokenizer.apply_chat_template([*conversations], tokenize=False)]


def _compiled(tokenizer: PreTrainedTokenizerBase) -> Callable[[Messages], str] | None:
    """The template as a function of messages; None where transformers does not compile it as it did in release 5."""
    compile_template = getattr(chat_template_utils, "_compile_jinja_template", None)
    if compile_template is None:
        return None
    template = compile_template(tokenizer.get_chat_template())
    given = {"tools": None, "documents": None, "add_generation_prompt": False, **tokenizer.special_tokens_map}
    return lambda messages: str(template.render(messages=messages, **given))
