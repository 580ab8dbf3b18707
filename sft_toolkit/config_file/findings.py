"""Everything wrong with a configuration, collected in one pass and raised together."""

from __future__ import annotations

import yaml

from sft_toolkit.args import SourceArguments
from sft_toolkit.errors import ConfigError

NO_LINE = -1


def override_mark(text: str) -> yaml.Mark:
    """The place of a node that was written on the command line: it has a name and no line."""
    return yaml.Mark(f"override '{text}'", 0, NO_LINE, 0, "", 0)


class Findings:
    """Problems and where each key was written.

    Args:
        source: the file as the user named it.
    """

    def __init__(self, source: str) -> None:
        self.source = source
        self._written: dict[str, yaml.Node] = {}
        self._problems: list[tuple[int, str]] = []
        self._blamed: list[str] = []
        self.warnings: list[str] = []
        self.sources: dict[str, SourceArguments] = {}  # each data source that is written as a mapping, by its key

    def seen(self, key: str, node: yaml.Node) -> None:
        """Remember where a dotted key was written."""
        self._written[key] = node

    def wrote(self, key: str) -> bool:
        """Whether the user wrote this dotted key."""
        return key in self._written

    def blames(self, key: str) -> bool:
        """Whether a problem of this dotted key, or of one below it, was added."""
        return any(found == key or found.startswith(f"{key}.") for found in self._blamed)

    def add(self, key: str, message: str, node: yaml.Node | None = None) -> None:
        """Add a problem of a dotted key; its place is that of `node`, else of the key or of its nearest parent."""
        self._blamed.append(key)
        nearest = key
        while node is None and nearest:
            node = self._written.get(nearest)
            nearest = nearest.rpartition(".")[0]
        if node is None:
            self._problems.append((NO_LINE, f"{self.source}: {key}: {message}"))
            return
        line = node.start_mark.line
        place = node.start_mark.name if line == NO_LINE else f"{node.start_mark.name}:{line + 1}"
        self._problems.append((line, f"{place}: {key}: {message}"))

    def warn(self, key: str, message: str) -> None:
        """Add a remark that stops nothing: a key that has no effect."""
        node = self._written.get(key)
        line = NO_LINE if node is None else node.start_mark.line
        place = self.source if node is None else node.start_mark.name
        self.warnings.append(f"{place}{'' if line == NO_LINE else f':{line + 1}'}: {key}: {message}")

    def add_text(self, text: str) -> None:
        """Add a problem that belongs to no key."""
        self._problems.append((NO_LINE, text))

    def texts(self) -> list[str]:
        """All problems so far, each with its place."""
        return [text for _, text in self._problems]

    def raise_any(self) -> None:
        """Raise one ConfigError with all problems: those with a line first, by line."""
        if self._problems:
            in_order = sorted(self._problems, key=lambda item: (item[0] == NO_LINE, item[0]))
            raise ConfigError(list(dict.fromkeys(text for _, text in in_order)))
