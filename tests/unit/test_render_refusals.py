"""Rows and tokenizers that the renderer refuses, each with its reason, and rows beside them that stay untouched."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PythonBackend

from sft_toolkit.data.conversation import Conversation, Message
from sft_toolkit.data.render import Refusal, Renderer, Tokens
from sft_toolkit.errors import ConfigError
from tests.templates import FAMILIES
from tests.tiny import supervised_text, tiny_tokenizer


def chat(*turns: tuple[str, str] | Message, **extra: Any) -> Conversation:
    return Conversation(tuple(turn if isinstance(turn, Message) else Message(*turn) for turn in turns), **extra)
