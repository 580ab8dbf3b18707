"""Which layout a file has, renamed columns, and formats of users."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sft_toolkit.data.conversation import Conversation, Message, PlainText, RowError
from sft_toolkit.data.formats import LAYOUTS, converter, detect_format
from sft_toolkit.data.sources import RawRow
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.registry import known
from tests.unit.layout_rows import example, reason


class TestDetection:
    @pytest.mark.parametrize(
        ("columns", "format"),
        [
            ({"messages"}, "messages"),
            ({"messages", "tools", "prompt", "prompt_id"}, "messages"),
            ({"conversations", "system", "tools"}, "sharegpt"),
            ({"instruction", "input", "output"}, "alpaca"),
            ({"instruction", "input", "output", "text"}, "alpaca"),
            ({"prompt", "completion"}, "prompt_completion"),
            ({"text", "id"}, "text"),
            ({"input_ids", "labels"}, "tokenized"),
            ({"input_ids", "attention_mask", "loss_mask", "text"}, "tokenized"),
        ],
    )
    def test_by_columns(self, columns: set[str], format: str) -> None:
        assert detect_format(columns) == format

    def test_renamed_columns_count_under_our_name(self) -> None:
        mapping = {"prompt": "question", "completion": "answer"}
        assert detect_format({"question", "answer"}, mapping=mapping) == "prompt_completion"
        assert detect_format({"text", "question", "answer"}, mapping=mapping) == "prompt_completion"

    def test_nothing_fits(self) -> None:
        with pytest.raises(DataError) as caught:
            detect_format({"question", "answer"}, [{"question": "x", "answer": "y"}])
        assert str(caught.value) == (
            "no format fits the columns found: answer, question\n"
            "formats and their columns:\n"
            "  messages: messages (may also have tools, chat_template_kwargs)\n"
            "  sharegpt: conversations (may also have system, tools, chat_template_kwargs)\n"
            "  alpaca: instruction, output (may also have input, system, history, tools, chat_template_kwargs)\n"
            "  prompt_completion: prompt, completion (may also have tools, chat_template_kwargs)\n"
            "  text: text\n"
            "  tokenized: input_ids (may also have labels, loss_mask, assistant_masks, assistant_mask, "
            "completion_mask, attention_mask, loss_weights)\n"
            "other names are mapped by `columns: {ours: theirs}`"
        )

    @pytest.mark.parametrize(
        ("turn", "advice"),
        [({"role": "user", "content": "x"}, "messages"), ({"from": "human", "value": "x"}, "conversations")],
    )
    def test_a_column_that_holds_turns_is_pointed_out(self, turn: dict[str, str], advice: str) -> None:
        with pytest.raises(DataError) as caught:
            detect_format({"dialog", "id"}, [{"id": 1}, {"dialog": [turn]}])
        first = str(caught.value).split("\n")[0]
        assert first == (
            f"no format fits the columns found: dialog, id; 'dialog' looks like {advice}: "
            f"set `columns: {{{advice}: dialog}}`"
        )

    def test_several_fit(self) -> None:
        with pytest.raises(DataError) as caught:
            detect_format({"messages", "prompt", "completion"})
        assert str(caught.value) == (
            "the columns (completion, messages, prompt) fit several formats: messages, prompt_completion; "
            "name one by `format:`"
        )


class TestColumnMap:
    def test_columns_are_renamed_before_anything_else(self) -> None:
        row = {"q": "x", "a": "y", "completion": "not this"}
        assert example("prompt_completion", row, columns={"prompt": "q", "completion": "a"}) == PlainText("x", "y")

    def test_columns_may_swap(self) -> None:
        row = {"prompt": "x", "completion": "y"}
        swap = {"prompt": "completion", "completion": "prompt"}
        assert example("prompt_completion", row, columns=swap) == PlainText("y", "x")

    def test_an_optional_column_that_this_row_lacks_is_absent(self) -> None:
        row = {"instruction": "x", "output": "y", "input": "of another meaning"}
        assert example("alpaca", row, columns={"input": "context"}).messages[0] == Message("user", "x")

    def test_a_required_column_that_this_row_lacks_is_named(self) -> None:
        assert reason("text", {"txt": "x"}, columns={"text": "body"}) == (
            "'body', which `columns` maps to 'text', is missing; the row has 'txt'"
        )

    def test_a_name_that_the_format_does_not_know(self) -> None:
        with pytest.raises(ConfigError) as caught:
            converter("prompt_completion", {"promt": "q"})
        assert str(caught.value) == (
            "columns: 'promt' is no column of format prompt_completion; did you mean 'prompt'? "
            "(it has prompt, completion, tools, chat_template_kwargs)"
        )


def pair(row: Mapping[str, Any]) -> Any:
    """A format of a user's own."""
    if "text" in row:
        return PlainText("", row["text"])
    if "q" not in row:
        raise ValueError("neither text nor q")
    return {"messages": [{"role": "user", "content": row["q"]}, {"role": "bot", "content": row["a"]}]}


def rows(row: Mapping[str, Any]) -> Any:
    """A format that returns what a format must not."""
    return [row]


class TestFormatsOfUsers:
    def test_may_return_an_example_or_messages(self) -> None:
        read = converter(f"{__name__}.pair", {"a": "answer"}, {"bot": "assistant"})
        assert read(RawRow("f", 1, {"text": "x"})) == PlainText("", "x")
        assert read(RawRow("f", 2, {"q": "x", "answer": "y"})) == Conversation(
            (Message("user", "x"), Message("assistant", "y"))
        )
        with pytest.raises(RowError, match=r"^neither text nor q$"):
            read(RawRow("f", 3, {}))

    def test_anything_else_is_the_formats_mistake(self) -> None:
        with pytest.raises(TypeError, match=r"^a format returns an example or a row with 'messages', not list$"):
            example(f"{__name__}.rows", {})

    def test_an_unknown_name_is_a_configuration_error(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'messages'"):
            converter("mesages")

    def test_every_format_that_the_registry_names_has_a_layout(self) -> None:
        assert set(LAYOUTS) <= set(known("format"))
