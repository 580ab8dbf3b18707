"""How a section of the configuration declares a key: its default, its documentation, its limits."""

from __future__ import annotations

from collections.abc import KeysView
from dataclasses import field
from typing import Any

from sft_toolkit.errors import ConfigError
from sft_toolkit.keywords import KnownKeywords
from sft_toolkit.limits import problems_in


class Documentation(dict[str, Any]):
    """Metadata of a field: limits are found by name, but only the help is listed.

    HfArgumentParser hands every listed entry to argparse, which knows no limits.
    """

    def keys(self) -> KeysView[str]:  # type: ignore[override]
        """The entries that argparse understands."""
        return {"help": self["help"]}.keys()


def knob(default: Any, help: str, **limits: Any) -> Any:
    """A dataclass field with its documentation and limits in the metadata.

    Limits are `minimum` and `maximum`, both inclusive; `below`, exclusive; `required`; and `kind`: the value is a name
    known to `registry` under that kind, so a registered name or a dotted path stands beside the choices of the type.
    """
    metadata = Documentation(help=help, **limits)
    if callable(default):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


class Checked(KnownKeywords):
    """Refuses values of a wrong type or outside their limits when it is made; only then, so that a field may be set."""

    def __post_init__(self) -> None:
        problems = problems_in(self)
        if problems:
            raise ConfigError([f"{type(self).__name__}.{problem}" for problem in problems])
