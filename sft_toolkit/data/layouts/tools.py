"""Function calls and function schemas, brought into the one shape that chat templates read."""

from __future__ import annotations

from typing import Any

from sft_toolkit.data.conversation import RowError
from sft_toolkit.data.layouts.values import as_text, describe, list_of, located, mapping


def tool_calls(value: Any) -> list[dict[str, Any]] | None:
    """Calls as `{"type": "function", "function": {"name", "arguments"}, "id"?}`; None for null and for no calls.

    Arguments may be JSON text, as OpenAI sends them; templates expect the object, and would quote text twice.

    Raises:
        RowError: no list of objects, no name, or arguments that are no object.
    """
    return [_numbered(call, number) for number, call in enumerate(list_of(value, "tool_calls"), 1)] or None


def function_call(name_and_arguments: Any) -> dict[str, Any]:
    """A call in that shape, from `{"name", "arguments"}`."""
    if not isinstance(name_and_arguments, dict):
        raise RowError(f"it is {describe(name_and_arguments)}, not an object with name and arguments")
    function = {
        **name_and_arguments,
        "name": as_text(name_and_arguments.get("name"), "name"),
        "arguments": mapping(name_and_arguments.get("arguments"), "arguments"),
    }
    return {"type": "function", "function": function}


def tool_schemas(value: Any, *, wrap: bool = False) -> list[dict[str, Any]] | None:
    """The schemas of `tools`: a list or its JSON text; None for null and for no tools.

    Args:
        wrap: give a bare `{"name", "parameters", ...}` the envelope `{"type": "function", "function": ...}`.

    Raises:
        RowError: no list of objects.
    """
    tools = list_of(value, "tools")
    for number, tool in enumerate(tools, 1):
        if not isinstance(tool, dict):
            raise RowError(f"tool {number} is {describe(tool)}, not an object")
    if wrap:
        tools = [t if "function" in t or "type" in t else {"type": "function", "function": t} for t in tools]
    return tools or None


def _numbered(call: Any, number: int) -> dict[str, Any]:
    with located(f"tool call {number}"):
        if isinstance(call, dict) and "function" in call:
            rest = {key: value for key, value in call.items() if value is not None}
            return {**rest, **function_call(call["function"])}
        return function_call(call)
