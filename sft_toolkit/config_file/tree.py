"""A YAML or JSON file to a tree of nodes that remember where they were written.

Scalars stay text here: `values` reads them by the type of their field, so that YAML 1.1 never turns `no` into false
or `5e-5` into a string.
"""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from sft_toolkit.config_file.findings import NO_LINE, Findings
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing

Pair = tuple[yaml.Node, yaml.Node]
SECTIONS_EXPECTED = "expected the sections model, data and training"
_UNTAGGED = {f"tag:yaml.org,2002:{kind}" for kind in ("str", "seq", "map")}
_NULLS = ("", "~", "null", "Null", "NULL")


def read_tree(path: str, findings: Findings) -> yaml.MappingNode:
    """The file's root mapping; duplicate keys, tags and cycles go to `findings`.

    Raises:
        ConfigError: the file is missing, a folder, not text, not YAML or JSON, empty, or not a mapping.
    """
    text = _read_text(path)
    if Path(path).suffix.lower() == ".json" and text.strip():
        text = _checked_json(text, path)
    root = _compose(text, path)
    if root is None:
        raise ConfigError(f"{path}: the file is empty; {SECTIONS_EXPECTED}")
    tree = clean(root, "", findings)
    if not isinstance(tree, yaml.MappingNode):
        raise ConfigError(f"{path}: not a mapping but {shown(root)}; {SECTIONS_EXPECTED}")
    return tree


def shown(node: yaml.Node) -> str:
    """What the user wrote, for an error message: a value, `the text "true"`, a list, a mapping."""
    if isinstance(node, yaml.ScalarNode):
        if is_null(node):
            return "null"
        return str(node.value) if node.style is None else f'the text "{node.value}"'
    return "a list" if isinstance(node, yaml.SequenceNode) else "a mapping"


def is_null(node: yaml.Node) -> bool:
    """Whether a node is the null of YAML 1.2: nothing, `~` or `null`, unquoted."""
    return isinstance(node, yaml.ScalarNode) and node.style is None and node.value in _NULLS


def _read_text(path: str) -> str:
    file = Path(path)
    try:
        if file.is_dir():
            held = sorted(entry.name for entry in file.iterdir() if entry.suffix in (".yaml", ".yml", ".json"))
            hint = f"; it holds {', '.join(held[:5])}" if held else ""
            raise ConfigError(f"{path}: a folder; expected a YAML or JSON file{hint}")
        return file.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"{path}: {missing(path)}") from None
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text (byte 0x{error.object[error.start]:02x})") from error
    except OSError as error:
        raise ConfigError(f"{path}: can't be read: {error.strerror}") from error


def _checked_json(text: str, path: str) -> str:
    """Valid JSON as YAML: it has tabs between tokens only, where YAML refuses them."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}:{error.lineno}: not valid JSON: {error.msg}") from error
    return text.replace("\t", " ")


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        loader = yaml.BaseLoader(text)
        loader.name = name
        node: yaml.Node | None = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{name}:{mark.line + 1 if mark else 1}: not valid YAML: {_in_words(error)}") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        raise ConfigError(f"{name}:{line}: not valid YAML: the character U+{ord(text[error.position]):04X}") from error
    return node


def _in_words(error: yaml.MarkedYAMLError) -> str:
    problem = error.problem or "unreadable"
    if "'\\t'" in problem:
        return "a tab where only spaces are allowed; indent with spaces"
    if "mapping values are not allowed" in problem:
        return "a second ': ' in this line, or a wrong indentation; quote a text that holds ': '"
    if "but found another document" in problem:
        return "a second document ('---'); expected one"
    if "scanning an alias" in (error.context or ""):
        return "a text that starts with '*' or '&' needs quotes"
    return " ".join(part for part in (error.context, problem) if part)


def clean(node: yaml.Node, key: str, findings: Findings, above: tuple[yaml.Node, ...] = ()) -> yaml.Node:
    """A copy without duplicates, merge keys and tags; an alias becomes a copy, so that an override stays local."""
    start, end = node.start_mark, node.end_mark
    if any(node is parent for parent in above):
        findings.add(key, "an alias that contains itself", node)
        return yaml.ScalarNode(node.tag, "", start, end)
    if node.tag not in _UNTAGGED:
        findings.add(key, f"tags are not supported, here {node.tag}; write the plain value", node)
    if isinstance(node, yaml.SequenceNode):
        items = [clean(item, f"{key}.{index}", findings, (*above, node)) for index, item in enumerate(node.value)]
        return yaml.SequenceNode(node.tag, items, start, end)
    if isinstance(node, yaml.MappingNode):
        return yaml.MappingNode(node.tag, _clean_pairs(node, key, findings, (*above, node)), start, end)
    assert isinstance(node, yaml.ScalarNode)
    return yaml.ScalarNode(node.tag, _joined_surrogates(node.value), start, end, node.style)


def _clean_pairs(node: yaml.MappingNode, key: str, findings: Findings, above: tuple[yaml.Node, ...]) -> list[Pair]:
    own: dict[str, Pair] = {}
    merged: dict[str, Pair] = {}
    for name, value in node.value:
        if not isinstance(name, yaml.ScalarNode):
            findings.add(key or "top level", f"a key must be plain text, not {shown(name)}", name)
            continue
        path = f"{key}.{name.value}" if key else str(name.value)
        if name.value == "<<" and name.style is None:
            _merge(value, path, merged, findings, above)
        elif name.value in own:
            line = own[name.value][0].start_mark.line
            where = "" if line == NO_LINE else f"; first written in line {line + 1}"
            findings.add(path, f"duplicate key{where}", name)
        else:
            own[name.value] = (name, clean(value, path, findings, above))
    return list({**merged, **own}.values())


def _merge(
    value: yaml.Node, path: str, merged: dict[str, Pair], findings: Findings, above: tuple[yaml.Node, ...]
) -> None:
    """YAML's merge key: `<<: *base` or a list of those; the first one that has a key wins."""
    for source in value.value if isinstance(value, yaml.SequenceNode) else [value]:
        copy = clean(source, path.removesuffix(".<<"), findings, above)
        if not isinstance(copy, yaml.MappingNode):
            findings.add(path, f"expected an alias of a mapping, not {shown(source)}", source)
            continue
        for pair in copy.value:
            merged.setdefault(pair[0].value, pair)


def _joined_surrogates(text: str) -> str:
    """JSON spells characters beyond U+FFFF as two escapes, which YAML reads as two halves."""
    if not any("\ud800" <= character <= "\udfff" for character in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
