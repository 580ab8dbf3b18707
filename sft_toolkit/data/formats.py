"""Which layout a file has, and a raw row -> an example. The layouts themselves are in `layouts/`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sft_toolkit.data.conversation import Conversation, Example, PlainText, RowError, TokenRow
from sft_toolkit.data.layouts.alpaca import from_alpaca
from sft_toolkit.data.layouts.messages import from_messages
from sft_toolkit.data.layouts.plain import from_prompt_completion, from_text
from sft_toolkit.data.layouts.sharegpt import from_sharegpt
from sft_toolkit.data.layouts.tokenized import MASKS, from_tokenized
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.registry import lookup

RENAMING = "`columns: {ours: theirs}`"
"""How a user of a YAML gives columns the names of a layout."""


@dataclass(frozen=True)
class Layout:
    """A row layout: the columns it must and may have, and how a row of it is read."""

    required: tuple[str, ...]
    optional: tuple[str, ...]
    read: Callable[[Mapping[str, Any], Mapping[str, str]], Example]

    def __str__(self) -> str:
        also = f" (may also have {', '.join(self.optional)})" if self.optional else ""
        return ", ".join(self.required) + also


LAYOUTS: dict[str, Layout] = {
    "messages": Layout(("messages",), ("tools", "chat_template_kwargs"), from_messages),
    "sharegpt": Layout(("conversations",), ("system", "tools", "chat_template_kwargs"), from_sharegpt),
    "alpaca": Layout(
        ("instruction", "output"),
        ("input", "system", "history", "tools", "chat_template_kwargs"),
        lambda row, roles: from_alpaca(row),
    ),
    "prompt_completion": Layout(("prompt", "completion"), ("tools", "chat_template_kwargs"), from_prompt_completion),
    "text": Layout(("text",), (), lambda row, roles: from_text(row)),
    "tokenized": Layout(
        ("input_ids",), ("labels", *MASKS, "attention_mask", "loss_weights"), lambda row, roles: from_tokenized(row)
    ),
}


def detect_format(
    columns: Iterable[str],
    first_rows: Sequence[Mapping[str, Any]] = (),
    mapping: Mapping[str, str] | None = None,
) -> str:
    """The layout whose required columns are there.

    Args:
        columns: the names found over ALL rows of the source, never of the first row alone.
        first_rows: some rows, only to word a better hint.
        mapping: the source's `columns: {ours: theirs}`.

    A column `text` beside another complete layout is that layout's extra (Alpaca's own file has one).

    Raises:
        DataError: no layout fits, or several do; lists the columns found and what each layout expects.
    """
    found = set(columns)
    ours = _renamed(dict.fromkeys(found), mapping or {}).keys()
    fitting = [name for name, layout in LAYOUTS.items() if ours >= set(layout.required)]
    if len(fitting) > 1 and "text" in fitting:
        fitting.remove("text")
    if len(fitting) == 1:
        return fitting[0]
    listed = ", ".join(sorted(found)) or "none"
    if fitting:
        raise DataError(f"the columns ({listed}) fit several formats: {', '.join(fitting)}; name one by `format:`")
    expected = "\n".join(f"  {name}: {layout}" for name, layout in LAYOUTS.items())
    raise DataError(
        f"no format fits the columns found: {listed}{_hint(first_rows)}\nformats and their columns:\n{expected}\n"
        f"other names are mapped by {RENAMING}"
    )


def converter(
    format: str, columns: Mapping[str, str] | None = None, roles: Mapping[str, str] | None = None
) -> Callable[[RawRow], Example]:
    """A function from a raw row (one that could be read) to an example; the format is looked up once.

    Args:
        format: a name of `LAYOUTS`, or of a registered format: a callable that takes the row (columns renamed) and
            returns an example, or a row in the layout `messages`.
        columns: column names {ours: theirs}.
        roles: role names {theirs: ours}.

    The function raises `RowError` with the reason; its caller puts `raw.place` before it.

    Raises:
        ConfigError: no such format is known, or `columns` names a column that the format doesn't have.
    """
    columns, roles = columns or {}, roles or {}
    layout = LAYOUTS.get(format)
    if layout is None:
        plugin = lookup("format", format)
        return lambda raw: _by_plugin(plugin, _renamed(raw.row, columns), roles)
    _check_mapping(format, layout, columns)
    needed = {ours: theirs for ours, theirs in columns.items() if ours in layout.required}

    def convert(raw: RawRow) -> Example:
        for ours, theirs in needed.items():
            if theirs not in raw.row:
                found = ", ".join(map(repr, raw.row)) or "no columns"
                raise RowError(f"{theirs!r}, which `columns` maps to {ours!r}, is missing; the row has {found}")
        return layout.read(_renamed(raw.row, columns), roles)

    return convert


def to_example(
    raw: RawRow, format: str, columns: Mapping[str, str] | None = None, roles: Mapping[str, str] | None = None
) -> Example:
    """One row as an example; see `converter`, which is faster for many."""
    return converter(format, columns, roles)(raw)


def _by_plugin(read: Callable[[dict[str, Any]], Any], row: dict[str, Any], roles: Mapping[str, str]) -> Example:
    try:
        result = read(row)
    except RowError:
        raise
    except ValueError as error:
        raise RowError(str(error)) from error
    if isinstance(result, (Conversation, PlainText, TokenRow)):
        return result
    if isinstance(result, Mapping):
        return from_messages(result, roles)
    raise TypeError(f"a format returns an example or a row with 'messages', not {type(result).__name__}")


def _renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    if not columns:
        return dict(row)
    taken = {*columns, *columns.values()}
    kept = {name: value for name, value in row.items() if name not in taken}
    return {**kept, **{ours: row[theirs] for ours, theirs in columns.items() if theirs in row}}


def _check_mapping(format: str, layout: Layout, columns: Mapping[str, str]) -> None:
    known = (*layout.required, *layout.optional)
    problems = [
        f"columns: {ours!r} is no column of format {format}{did_you_mean(ours, known)} (it has {', '.join(known)})"
        for ours in columns
        if ours not in known
    ]
    if problems:
        raise ConfigError(problems)


def _hint(first_rows: Sequence[Mapping[str, Any]]) -> str:
    """A column that holds turns under another name is worth pointing out."""
    for name, value in (item for row in first_rows for item in row.items()):
        entry = value[0] if isinstance(value, list) and value else None
        if isinstance(entry, Mapping):
            for column, keys in (("messages", {"role", "content"}), ("conversations", {"from", "value"})):
                if keys <= entry.keys():
                    return f"; {name!r} looks like {column}: set `columns: {{{column}: {name}}}`"
    return ""
