"""A configuration back to text, in full: reading that text again gives the same configuration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from sft_toolkit.args import CallbackArguments, LoraArguments
from sft_toolkit.config_file.values import plain

_SECRET = re.compile(
    r"(?i)(.*[_-])?(password|passwd|passphrase|secret|credentials?|api[_-]?key|(access|auth|bearer|hub|hf|api|secret)[_-]token)"
    r"|token"
)


class _Dumper(yaml.SafeDumper):
    """Quotes every text that YAML 1.2 would read as something else (`5e-5` is a text to YAML 1.1), and no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        """Equal lists are written out, not referred to."""
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # PyYAML reads back some line ends as others unless they are escaped.
    ambiguous = not isinstance(plain(text), str) or any(end in text for end in "\n\r\x85\u2028\u2029")
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if ambiguous else None)


_Dumper.add_representer(str, _text)


def to_yaml(sections: Mapping[str, Any]) -> str:
    """A YAML document of plain values: mappings, lists, texts, numbers, booleans, null."""
    return yaml.dump(dict(sections), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=1_000_000)


def lora_as_written(lora: LoraArguments | None) -> dict[str, Any] | None:
    """Section `lora` with the fields of peft beside ours, as the user writes them."""
    if lora is None:
        return None
    own = asdict(lora)
    extra = own.pop("extra")
    return {**own, **extra}


def callbacks_as_written(callbacks: Sequence[CallbackArguments]) -> list[Any]:
    """Section `callbacks`: `name`, or `name: {option: value}`; options that are named like a secret are left out."""
    written: list[Any] = []
    for callback in callbacks:
        options = without_secrets(callback.options)
        written.append({callback.name: options} if options else callback.name)
    return written


def without_secrets(value: Any) -> Any:
    """Mappings, at any depth, without the entries that a password or an access token would stand under."""
    if isinstance(value, Mapping):
        return {key: without_secrets(item) for key, item in value.items() if not _SECRET.fullmatch(str(key))}
    return [without_secrets(item) for item in value] if isinstance(value, list) else value
