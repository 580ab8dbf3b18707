"""The tree of a configuration to its typed sections; every problem goes to `Findings`, what is wrong is left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import yaml

from sft_toolkit.args import (
    CallbackArguments,
    DataArguments,
    DistributedArguments,
    LoraArguments,
    SourceArguments,
)
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.config_file.names import explain_unknown
from sft_toolkit.config_file.schema import LORA_ALIASES, SECTIONS, SET_BY_US, Key, keys_of, section_keys
from sft_toolkit.config_file.tree import is_null, shown
from sft_toolkit.config_file.values import Refused, read_value, untyped
from sft_toolkit.hints import did_you_mean

Section = TypeVar("Section")
_SOURCES_EXPECTED = "expected a path, a list of paths, or a list of {path: ..., ...}"


def split_sections(tree: yaml.MappingNode, findings: Findings) -> dict[str, yaml.Node]:
    """The nodes of the known sections; an unknown section, or an unknown key of one, is a problem."""
    found: dict[str, yaml.Node] = {}
    for name, node in tree.value:
        findings.seen(name.value, name)
        if name.value in SECTIONS:
            found[name.value] = node
            if name.value != "callbacks":
                _refuse_unknown_keys(node, name.value, findings)
        else:
            findings.add(name.value, explain_unknown("", name.value), name)
    return found


def _refuse_unknown_keys(node: yaml.Node, section: str, findings: Findings) -> None:
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            if section == "lora" and untyped(value) in SET_BY_US.get(name.value, ()):
                continue
            if name.value not in section_keys(section):
                findings.add(f"{section}.{name.value}", explain_unknown(section, name.value), name)
    elif not is_null(node):
        findings.add(section, f"expected a mapping of keys, not {shown(node)}", node)


def read_plain(node: yaml.Node | None, section: str, cls: type[Section], findings: Findings) -> Section:
    """A section whose keys are the fields of one dataclass."""
    return cls(**read_keys(node, section, section_keys(section), findings))


def read_optional(node: yaml.Node | None, section: str, cls: type[Section], findings: Findings) -> Section | None:
    """As `read_plain`; None where the section is null or absent."""
    return None if node is None or is_null(node) else read_plain(node, section, cls, findings)


def read_keys(node: yaml.Node | None, section: str, keys: Mapping[str, Key], findings: Findings) -> dict[str, Any]:
    """The typed values of the keys that the user wrote."""
    values = {}
    for name, value in _pairs(node).items():
        if name not in keys:
            continue
        try:
            values[name] = read_value(value, f"{section}.{name}", keys[name], findings)
        except Refused:
            continue
    return values


def read_data(node: yaml.Node | None, findings: Findings) -> DataArguments:
    """Section `data`; a source that names no format takes that of the section."""
    keys = {name: key for name, key in section_keys("data").items() if name not in ("train", "eval")}
    values = read_keys(node, "data", keys, findings)
    written = _pairs(node)
    if "train" in written:
        findings.seen("data.train", written["train"])
        values["train"] = _sources(written["train"], "data.train", findings)
    if "eval" in written:
        findings.seen("data.eval", written["eval"])
        values["eval"] = _named_sources(written["eval"], findings)
    data = DataArguments(**values)
    for source in [*data.train, *(source for named in data.eval.values() for source in named)]:
        source.format = data.format if source.format == "auto" else source.format
    return data


def read_training(node: yaml.Node | None, distributed: DistributedArguments, findings: Findings) -> dict[str, Any]:
    """Section `training`: what the user wrote. Fields of TrainingArguments that are ours by another name move."""
    training = read_keys(node, "training", section_keys("training"), findings)
    if "resume_from_checkpoint" in training and "resume" not in training:
        folder = training.pop("resume_from_checkpoint")
        if folder not in (None, "false"):
            training["resume"] = "auto" if folder == "true" else folder
    if isinstance(training.get("deepspeed"), str) and distributed.deepspeed is None:
        distributed.deepspeed = training.pop("deepspeed")
    if training.get("ddp_backend") is not None and distributed.backend in ("auto", training["ddp_backend"]):
        distributed.backend = training.pop("ddp_backend")
    if "fsdp" in training and distributed.strategy in ("auto", "fsdp"):
        asked = training["fsdp"]
        if asked is True or (isinstance(asked, str) and asked):
            distributed.strategy = "fsdp"  # so that the start is checked as for any other strategy
        else:
            training.pop("fsdp")
    return training


def read_lora(node: yaml.Node | None, findings: Findings) -> LoraArguments | None:
    """Section `lora`: null or absent trains all weights; the fields of peft that aren't ours go to `extra`."""
    if node is None or is_null(node):
        return None
    values = read_keys(node, "lora", section_keys("lora"), findings)
    for theirs, ours in LORA_ALIASES.items():
        if theirs in values and ours in values:
            findings.add(f"lora.{theirs}", f"the same as lora.{ours}; keep one of them")
        elif theirs in values:
            values[ours] = values.pop(theirs)
    own = {name for name in keys_of(LoraArguments) if name != "extra"}
    extra = {name: value for name, value in values.items() if name not in own and name not in LORA_ALIASES}
    return LoraArguments(**{name: value for name, value in values.items() if name in own}, extra=extra)


def read_callbacks(node: yaml.Node | None, findings: Findings) -> list[CallbackArguments]:
    """Section `callbacks`: a list of `name` or `name: {option: value}`."""
    if node is None or is_null(node):
        return []
    if not isinstance(node, yaml.SequenceNode):
        findings.add("callbacks", f"expected a list of names, or of {{name: {{option: value}}}}, not {shown(node)}")
        return []
    read = [_callback(entry, f"callbacks.{index}", findings) for index, entry in enumerate(node.value)]
    return [callback for callback in read if callback is not None]


def _callback(entry: yaml.Node, key: str, findings: Findings) -> CallbackArguments | None:
    name, options = entry, None
    if isinstance(entry, yaml.MappingNode):
        if len(entry.value) != 1:
            names = ", ".join(pair[0].value for pair in entry.value)
            findings.add(
                key, f"expected one name, with its options below it: {{name: {{option: value}}}}, not {names}", entry
            )
            return None
        name, options = entry.value[0]
    try:
        known_name = read_value(name, key, keys_of(CallbackArguments)["name"], findings)
    except Refused:
        return None
    if options is None or is_null(options):
        return CallbackArguments(known_name)
    if not isinstance(options, yaml.MappingNode):
        findings.add(f"{key}.{known_name}", f"expected a mapping of options, not {shown(options)}", options)
        return None
    return CallbackArguments(known_name, untyped(options))


def _named_sources(node: yaml.Node, findings: Findings) -> dict[str, list[SourceArguments]]:
    if is_null(node):
        return {}
    source_keys = keys_of(SourceArguments)
    if isinstance(node, yaml.MappingNode) and not any(name.value in source_keys for name, _ in node.value):
        return {name.value: _sources(value, f"data.eval.{name.value}", findings) for name, value in node.value}
    return {"eval": _sources(node, "data.eval", findings)}


def _sources(node: yaml.Node, key: str, findings: Findings) -> list[SourceArguments]:
    entries = node.value if isinstance(node, yaml.SequenceNode) else [node]
    if not entries:
        findings.add(key, f"an empty list; {_SOURCES_EXPECTED}", node)
    is_list = isinstance(node, yaml.SequenceNode)
    keys = [f"{key}.{index}" if is_list else key for index in range(len(entries))]
    return [_source(entry, path, findings) for entry, path in zip(entries, keys, strict=True)]


def _source(node: yaml.Node, key: str, findings: Findings) -> SourceArguments:
    findings.seen(key, node)
    keys = keys_of(SourceArguments)
    if isinstance(node, yaml.MappingNode):
        for name, _ in node.value:
            if name.value not in keys:
                hint = did_you_mean(name.value, keys) or f" (keys: {', '.join(keys)})"
                findings.add(f"{key}.{name.value}", f"unknown key{hint}", name)
        source = SourceArguments(**read_keys(node, key, keys, findings))
        findings.sources[key] = source
        if not source.path and not findings.wrote(f"{key}.path"):
            findings.add(f"{key}.path", "required: a file, a glob or a hub id", node)
        return source
    if isinstance(node, yaml.ScalarNode) and not is_null(node) and node.value:
        return SourceArguments(path=node.value)
    findings.add(key, f"{_SOURCES_EXPECTED}, not {shown(node)}", node)
    return SourceArguments()


def _pairs(node: yaml.Node | None) -> dict[str, yaml.Node]:
    return {name.value: value for name, value in node.value} if isinstance(node, yaml.MappingNode) else {}
