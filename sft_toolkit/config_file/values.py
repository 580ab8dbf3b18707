"""One YAML node to one typed value, by the type of its field and the rules of YAML 1.2.

Only true and false are booleans, `5e-5` is a number, `no` is a text. A quoted scalar is a text and nothing else. A
text field takes an unquoted scalar as it stands: `revision: 1234567` stays the text "1234567".
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml

from sft_toolkit import registry
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.config_file.schema import Key
from sft_toolkit.config_file.tree import is_null, shown
from sft_toolkit.hints import did_you_mean
from sft_toolkit.limits import beyond, choices, expected, in_yaml, is_optional, members

_BOOLEANS = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_ONE_PRECISION = ({"fp32", "float32"}, {"bf16", "bfloat16"}, {"fp16", "float16"})  # as two sections spell it
_YAML11_BOOLEANS = {"yes": "true", "y": "true", "on": "true", "no": "false", "n": "false", "off": "false"}
_INT = re.compile(r"[-+]?[0-9]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_DECIMAL_COMMA = re.compile(r"[-+]?[0-9]+,([0-9]{1,2}|[0-9]{4,})([eE][-+]?[0-9]+)?")  # 1,000 is a thousand
_SPECIAL_FLOATS = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class Refused(Exception):
    """A node is no value of its field; the message says what was expected."""


def read_value(node: yaml.Node, key: str, wanted: Key, findings: Findings) -> Any:
    """The typed value of a node.

    Raises:
        Refused: the problem has been added to `findings`; the caller leaves the key out.
    """
    findings.seen(key, node)
    try:
        value = _named(node, wanted) if "kind" in wanted.limits else convert(node, wanted.hint)
        if wanted.limits.get("required") and not value:
            raise Refused("required, but empty")
        reason = beyond(value, wanted.limits)
        if reason:
            raise Refused(reason)
    except Refused as refusal:
        findings.add(key, str(refusal), node)
        raise
    return value


def convert(node: yaml.Node, hint: Any) -> Any:
    """A node as a value of a `typing` hint; raises Refused with the reason."""
    for member in sorted(members(hint), key=_precedence):
        found, value = _as_member(node, member)
        if found:
            return value
    raise Refused(f"expected {expected(hint)}, not {shown(node)}{_advice(node, hint)}")


def untyped(node: yaml.Node) -> Any:
    """A node of unknown type (the options of a callback, a nested dictionary) by the core schema of YAML 1.2."""
    if isinstance(node, yaml.SequenceNode):
        return [untyped(item) for item in node.value]
    if isinstance(node, yaml.MappingNode):
        return {name.value: untyped(value) for name, value in node.value}
    assert isinstance(node, yaml.ScalarNode)
    return str(node.value) if node.style else plain(node.value)


def plain(text: str) -> Any:
    """An unquoted scalar by the core schema of YAML 1.2: null, boolean, number, else text."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in _BOOLEANS:
        return _BOOLEANS[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _SPECIAL_FLOATS.fullmatch(text):
        return float(text.replace(".", ""))
    return text


def _precedence(hint: Any) -> int:
    """Text last: `str | bool` reads true as a boolean, `str | None` reads null as null."""
    order = (NoneType, bool, int, float)
    return order.index(hint) if hint in order else 9 if hint is str else 5


def _as_member(node: yaml.Node, hint: Any) -> tuple[bool, Any]:
    """Whether the node is a value of one type that is no union, and that value."""
    if hint is Any:
        return True, untyped(node)
    kind, inner = get_origin(hint), get_args(hint)
    if kind is list and isinstance(node, yaml.SequenceNode):
        return True, [convert(item, inner[0]) for item in node.value]
    if kind is dict and isinstance(node, yaml.MappingNode):
        return True, {name.value: convert(value, inner[1]) for name, value in node.value}
    if not isinstance(node, yaml.ScalarNode):
        return False, None
    if kind is Literal:
        return _as_choice(node, inner)
    if hint is str:
        return (True, str(node.value)) if node.style or not is_null(node) else (False, None)
    value = untyped(node)
    if hint is float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        return is_number and bool(_FLOAT.fullmatch(node.value)), value
    return type(value) is hint, value


def _as_choice(node: yaml.ScalarNode, values: tuple[Any, ...]) -> tuple[bool, Any]:
    for value in values:
        written = str(node.value) if isinstance(value, str) else untyped(node)
        if type(written) is type(value) and written == value:
            return True, value
    return False, None


def _named(node: yaml.Node, wanted: Key) -> Any:
    """A name of the registry, a list of names, or `{name: {option: value}}`, beside the choices of the type."""
    names = choices(wanted.hint)
    value = convert(node, str if names else wanted.hint)
    if isinstance(value, dict):
        _check_one_name(value)
    for name in value if isinstance(value, list | dict) else [] if value is None else [value]:
        reason = None if name in names else registry.unknown(wanted.limits["kind"], name)
        if reason:
            raise Refused(reason)
    return value


def _check_one_name(value: dict[str, Any]) -> None:
    options = next(iter(value.values()), None)
    if len(value) != 1:
        names = ", ".join(value) or "none"
        raise Refused(f"expected one name, with its options below it: {{name: {{option: value}}}}, not {names}")
    if not isinstance(options, dict):
        raise Refused(f"expected a mapping of options under '{next(iter(value))}', not {options!r}")


def _advice(node: yaml.Node, hint: Any) -> str:
    """What to write instead, where that is clear."""
    names = choices(hint)
    if is_null(node):
        if "none" in names:
            return "; write none"
        return "" if is_optional(hint) else "; leave the key out to get the default"
    if not isinstance(node, yaml.ScalarNode):
        return ""
    if bool in members(hint) and node.style is None and node.value.lower() in _YAML11_BOOLEANS:
        return f"; write {_YAML11_BOOLEANS[node.value.lower()]}"
    if names:
        twin = next((name for name in names if {name, node.value} in _ONE_PRECISION), None)
        return f"; did you mean '{twin}'?" if twin else did_you_mean(node.value, [in_yaml(name) for name in names])
    if node.style and any(_as_member(yaml.ScalarNode(node.tag, node.value), member)[0] for member in members(hint)):
        return "; remove the quotes"
    return _number_advice(node.value, hint)


def _number_advice(text: str, hint: Any) -> str:
    if not {int, float} & set(members(hint)):
        return ""
    if _DECIMAL_COMMA.fullmatch(text):
        return f"; write {text.replace(',', '.')}" if float in members(hint) else ""
    without_marks = re.sub(r"[_,\s]", "", text)
    if float not in members(hint) and _FLOAT.fullmatch(without_marks) and float(without_marks).is_integer():
        return f"; write {int(float(without_marks))}"
    return f"; write {without_marks}" if _FLOAT.fullmatch(without_marks) and without_marks != text else ""
