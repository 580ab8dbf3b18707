"""Messages, conversations and token rows check themselves."""

from __future__ import annotations

from typing import Any

import pytest

from sft_toolkit.data.conversation import Conversation, Message, RowError, TokenRow

CALL: dict[str, Any] = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def test_template_dict_holds_only_what_is_there() -> None:
    assert Message("user", "hi").as_template_dict() == {"role": "user", "content": "hi"}
    assert Message("tool", "4", weight=0.0, extra={"tool_call_id": "c1"}).as_template_dict() == {
        "role": "tool",
        "content": "4",
        "tool_call_id": "c1",
    }


def test_template_dict_of_a_silent_call_has_empty_content_and_never_none() -> None:
    assert Message("assistant", None, tool_calls=[CALL]).as_template_dict() == {
        "role": "assistant",
        "content": "",
        "tool_calls": [CALL],
    }


def test_empty_assistant_text_is_allowed() -> None:
    assert Message("assistant", "").content == ""


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (
            {"role": "narrator", "content": "x"},
            "unknown role 'narrator'; accepted: system, developer, user, assistant, tool",
        ),
        (
            {"role": "assistant", "content": None},
            'the assistant content is null or missing; expected text or tool_calls (an empty text is written "")',
        ),
        ({"role": "user", "content": None}, "the user content is null or missing; expected text"),
        (
            {"role": "user", "content": "x", "tool_calls": [CALL]},
            "tool_calls belong to an assistant, not to role 'user'",
        ),
        ({"role": "user", "content": "x", "weight": -1.0}, "weight is -1.0; expected a finite number of at least 0"),
        (
            {"role": "user", "content": "x", "weight": float("nan")},
            "weight is nan; expected a finite number of at least 0",
        ),
    ],
)
def test_wrong_messages_say_why(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        Message(**message)
    assert str(caught.value) == reason


def test_a_conversation_needs_messages() -> None:
    with pytest.raises(RowError, match=r"^the conversation has no messages$"):
        Conversation(())


def test_a_completion_needs_messages() -> None:
    user = Message("user", "x")
    assert Conversation((user,), completion_from=0).completion_from == 0
    with pytest.raises(RowError, match=r"^the completion has no messages$"):
        Conversation((user,), completion_from=1)


@pytest.mark.parametrize(
    ("ids", "labels", "reason"),
    [
        ([], [], "input_ids is empty"),
        ([1, 2], [1], "input_ids has 2 tokens, labels has 1"),
        (
            [5, 6, 7, 8],
            [-100, 7, 8, -100],
            "labels are shifted by one; each label must stand at its own token, the model shifts them",
        ),
    ],
)
def test_wrong_token_rows_say_why(ids: list[int], labels: list[int], reason: str) -> None:
    with pytest.raises(RowError) as caught:
        TokenRow(ids, labels)
    assert str(caught.value) == reason


@pytest.mark.parametrize("labels", [[5, 5, 5], [-100, -100, 5], [-100, -100, -100], [-100, 5, 5]])
def test_labels_at_their_own_token_are_accepted(labels: list[int]) -> None:
    assert TokenRow([5, 5, 5], labels).labels == labels


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "add_generation_prompt"])
def test_a_row_can_not_swap_or_stop_its_template(name: str) -> None:
    with pytest.raises(RowError, match=f"chat_template_kwargs: '{name}' is no argument that a row can give"):
        Conversation((Message("user", "a"),), template_kwargs={name: "x"})
