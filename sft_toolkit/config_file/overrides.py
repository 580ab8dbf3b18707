"""`section.key=value` from the command line into the tree, to be checked like the file itself."""

from __future__ import annotations

import yaml

from sft_toolkit.config_file.findings import Findings, override_mark
from sft_toolkit.config_file.tree import clean, is_null, shown

_MAP, _SEQ, _STR = (f"tag:yaml.org,2002:{kind}" for kind in ("map", "seq", "str"))


def apply_override(tree: yaml.MappingNode, text: str, findings: Findings) -> None:
    """Set one value: `training.max_steps=10`, `data.train.0.path=x`, `lora=null`, `lora.targets=[q_proj, v_proj]`.

    A value that starts with a bracket or a quote is YAML; any other is taken as it stands, so `*.jsonl` and `a: b`
    need no quotes beyond those of the shell.
    """
    mark = override_mark(text)
    dotted, equals, written = text.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys) or text.startswith("-"):
        hint = f"; write {text.lstrip('-')}" if text.startswith("-") and equals else ""
        findings.add_text(f"{mark.name}: expected section.key=value{hint}")
        return
    node: yaml.Node = tree
    for depth, key in enumerate(keys):
        below = keys[depth + 1 :]
        child = _child(node, key) if below else clean(_value(written.strip(), mark), dotted.strip(), findings)
        if child is None or (below and is_null(child)):
            child = (
                yaml.SequenceNode(_SEQ, [], mark, mark) if below[0] == "0" else yaml.MappingNode(_MAP, [], mark, mark)
            )
        if not _put(node, key, child, mark):
            held = f"a list of {len(node.value)}" if isinstance(node, yaml.SequenceNode) else shown(node)
            findings.add_text(f"{mark.name}: {'.'.join(keys[:depth])} is {held}, which has no '{key}'")
            return
        node = child


def _value(written: str, mark: yaml.Mark) -> yaml.Node:
    if written.startswith(("[", "{", "'", '"')):
        try:
            node = yaml.compose(written, Loader=yaml.BaseLoader)
        except yaml.YAMLError:
            # A regular expression such as [qv]_proj.* starts like a list; it is text.
            node = None
        if node is not None:
            return _moved(node, mark)
    return yaml.ScalarNode(_STR, written, mark, mark)


def _moved(node: yaml.Node, mark: yaml.Mark) -> yaml.Node:
    node.start_mark = mark
    if isinstance(node, yaml.SequenceNode):
        node.value = [_moved(item, mark) for item in node.value]
    elif isinstance(node, yaml.MappingNode):
        node.value = [(_moved(name, mark), _moved(value, mark)) for name, value in node.value]
    return node


def _child(node: yaml.Node, key: str) -> yaml.Node | None:
    if isinstance(node, yaml.MappingNode):
        return next((value for name, value in node.value if name.value == key), None)
    if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) < len(node.value):
        item: yaml.Node = node.value[int(key)]
        return item
    return None


def _put(node: yaml.Node, key: str, value: yaml.Node, mark: yaml.Mark) -> bool:
    """Set a child; a list takes an index up to its length. False where the node can't hold the key."""
    if isinstance(node, yaml.MappingNode):
        pairs = {name.value: (name, old) for name, old in node.value}
        if key not in pairs or pairs[key][1] is not value:
            pairs[key] = (yaml.ScalarNode(_STR, key, mark, mark), value)
        node.value = list(pairs.values())
        return True
    if isinstance(node, yaml.SequenceNode) and key.isdecimal() and int(key) <= len(node.value):
        node.value = [*node.value[: int(key)], value, *node.value[int(key) + 1 :]]
        return True
    return False
