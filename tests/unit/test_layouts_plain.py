"""Alpaca, prompt and completion, text, tokens."""

from __future__ import annotations

from typing import Any

import pytest

from sft_toolkit.data.conversation import Conversation, Message, PlainText, TokenRow
from tests.unit.layout_rows import example, reason

SCHEMA = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


class TestAlpaca:
    @pytest.mark.parametrize(
        ("row", "user"),
        [
            ({"instruction": "Sum.", "input": "1 2"}, "Sum.\n1 2"),
            ({"instruction": "Sum.", "input": ""}, "Sum."),
            ({"instruction": "Sum.", "input": None}, "Sum."),
            ({"instruction": "Sum."}, "Sum."),
            ({"instruction": "", "input": "1 2"}, "1 2"),
            ({"instruction": " Sum.\n", "input": " 1"}, " Sum.\n\n 1"),
        ],
    )
    def test_instruction_and_input(self, row: dict[str, Any], user: str) -> None:
        assert example("alpaca", {**row, "output": "3"}) == Conversation(
            (Message("user", user), Message("assistant", "3"))
        )

    @pytest.mark.parametrize("history", [[["u1", "a1"], ["u2", "a2"]], '[["u1", "a1"], ["u2", "a2"]]'])
    def test_system_and_history_come_first(self, history: Any) -> None:
        row = {"instruction": "u3", "output": "a3", "system": "s", "history": history}
        assert example("alpaca", row).messages == (
            Message("system", "s"),
            Message("user", "u1"),
            Message("assistant", "a1"),
            Message("user", "u2"),
            Message("assistant", "a2"),
            Message("user", "u3"),
            Message("assistant", "a3"),
        )

    def test_empty_system_and_history_are_none(self) -> None:
        row = {"instruction": "u", "output": "", "system": "", "history": ""}
        assert example("alpaca", row).messages == (Message("user", "u"), Message("assistant", ""))

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"instruction": "u"}, "'output' is missing; the row has 'instruction'"),
            ({"instruction": "u", "output": None}, "'output' is null, not text"),
            ({"instruction": "u", "output": 42}, "'output' is the number 42, not text"),
            ({"instruction": "u", "output": float("nan")}, "'output' is the number nan, not text"),
            ({"instruction": ["u"], "output": "a"}, "'instruction' is a list, not text"),
            ({"instruction": "u", "output": "a", "input": 0}, "'input' is the number 0, not text"),
            ({"instruction": "u", "output": "a", "history": 1}, "'history' is the number 1, not a list"),
            (
                {"instruction": "u", "output": "a", "history": [["u", "a"], ["u"]]},
                "history pair 2 is a list of 1, not [user, assistant]",
            ),
            (
                {"instruction": "u", "output": "a", "history": ["u"]},
                "history pair 1 is text, not [user, assistant]",
            ),
            ({"instruction": "u", "output": "a", "history": [["u", None]]}, "'history pair 1' is null, not text"),
        ],
    )
    def test_wrong_rows(self, row: dict[str, Any], message: str) -> None:
        assert reason("alpaca", row) == message


class TestPlain:
    def test_text_and_prompt_completion_keep_every_character(self) -> None:
        assert example("text", {"text": " NA\r\n"}) == PlainText("", " NA\r\n")
        assert example("prompt_completion", {"prompt": "A: ", "completion": " hi"}) == PlainText("A: ", " hi")

    def test_lists_of_messages_know_where_the_completion_begins(self) -> None:
        row = {
            "prompt": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}],
            "completion": [{"role": "assistant", "content": "a"}],
            "tools": [SCHEMA],
            "chat_template_kwargs": {"k": 1},
        }
        assert example("prompt_completion", row) == Conversation(
            (Message("system", "s"), Message("user", "u"), Message("assistant", "a")), [SCHEMA], {"k": 1}, 2
        )

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"prompt": "x"}, "'completion' is missing; the row has 'prompt'"),
            ({"prompt": 1, "completion": "x"}, "'prompt' is the number 1, not text"),
            (
                {"prompt": [], "completion": "x"},
                "'prompt' is a list of messages, 'completion' is text; both must be of one kind",
            ),
            (
                {"completion": []},
                "'completion' is a list of messages, 'prompt' is missing; both must be of one kind",
            ),
            ({"prompt": [{"role": "user", "content": "x"}], "completion": []}, "the completion has no messages"),
            (
                {"prompt": [{"role": "user", "content": "x"}], "completion": [{"role": "assistant"}]},
                "completion: message 1: the assistant content is null or missing; "
                'expected text or tool_calls (an empty text is written "")',
            ),
        ],
    )
    def test_wrong_prompt_completion_rows(self, row: dict[str, Any], message: str) -> None:
        assert reason("prompt_completion", row) == message

    def test_text_must_be_text(self) -> None:
        assert reason("text", {"text": None}) == "'text' is null, not text"
        assert reason("text", {"txt": "x"}) == "'text' is missing; the row has 'txt'"


class TestTokenized:
    @pytest.mark.parametrize(
        "learned",
        [
            {"labels": [-100, 6, 7]},
            {"labels": "[-100, 6, 7]"},
            {"loss_mask": [0, 1, 1]},
            {"loss_mask": [False, True, True], "attention_mask": [True, True, True]},
            {"assistant_masks": [0, 1, 1]},
            {"assistant_mask": [0, 1, 1]},
            {"completion_mask": [0, 1, 1]},
            {"labels": None, "loss_mask": [0, 1, 1]},
            {"labels": [-100, 6, 7], "loss_mask": [1, 0, 0]},
        ],
    )
    def test_labels_or_a_mask(self, learned: dict[str, Any]) -> None:
        assert example("tokenized", {"input_ids": [5, 6, 7], **learned}) == TokenRow([5, 6, 7], [-100, 6, 7])

    def test_padding_is_where_the_attention_mask_says_not_where_an_id_looks_like_it(self) -> None:
        row = {"input_ids": [0, 5, 0, 0], "labels": [-100, -100, 0, 0], "attention_mask": [0, 1, 1, 0]}
        assert example("tokenized", row) == TokenRow([5, 0], [-100, 0])

    @pytest.mark.parametrize(
        ("row", "message"),
        [
            ({"labels": [1]}, "'input_ids' is missing; the row has 'labels'"),
            (
                {"input_ids": [1]},
                "beside input_ids one of labels, loss_mask, assistant_masks, assistant_mask, completion_mask is "
                "needed; to learn every token, repeat input_ids as labels",
            ),
            ({"input_ids": [1, 2], "labels": [1]}, "input_ids has 2 tokens, labels has 1"),
            ({"input_ids": [1, 2], "loss_mask": [1]}, "input_ids has 2 tokens, loss_mask has 1"),
            (
                {"input_ids": [1, 2], "labels": [1, 2], "attention_mask": [1]},
                "input_ids has 2 tokens, attention_mask has 1",
            ),
            ({"input_ids": [1, 2.0], "labels": [1, 2]}, "input_ids[1] is the number 2.0, not an integer of at least 0"),
            ({"input_ids": [-1], "labels": [1]}, "input_ids[0] is the number -1, not an integer of at least 0"),
            ({"input_ids": [1], "labels": [-101]}, "labels[0] is the number -101, not an integer of at least -100"),
            ({"input_ids": [True], "labels": [1]}, "input_ids[0] is true, not an integer of at least 0"),
            ({"input_ids": 5, "labels": [1]}, "'input_ids' is the number 5, not a list"),
            ({"input_ids": [], "labels": []}, "input_ids is empty"),
        ],
    )
    def test_wrong_rows(self, row: dict[str, Any], message: str) -> None:
        assert reason("tokenized", row) == message
