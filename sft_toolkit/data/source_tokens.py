"""One source -> its token rows on disk, found again while nothing that could change them has changed."""

from __future__ import annotations

import datetime
import inspect
import logging
import uuid
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset
from transformers import PreTrainedTokenizerBase

from sft_toolkit.args import DataArguments, PreparationArguments, SourceArguments
from sft_toolkit.data.cache import TokenCache, cache_key, code_fingerprint, template_text, tokenizer_fingerprint
from sft_toolkit.data.carried import GROUP, NOTHING, Carried
from sft_toolkit.data.formats import LAYOUTS, detect_format
from sft_toolkit.data.maps import WatchedMaps
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer
from sft_toolkit.data.report import Tally
from sft_toolkit.data.sources import fingerprint, read_rows
from sft_toolkit.data.split import Keys
from sft_toolkit.data.tokenise import SourceTokenizer
from sft_toolkit.errors import DataError
from sft_toolkit.registry import lookup

logger = logging.getLogger(__name__)

# What arranges tokens, changes them at each reading or judges the counts makes no other tokens.
_AFTERWARDS = ("packing", "sampler", "transform", "max_refused")
HINT_ROWS = 3  # rows shown to detect_format, which only words a hint from them


@dataclass(frozen=True)
class SourceTokens:
    """The token rows of one source.

    Attributes:
        name: the path as the user wrote it.
        rows: columns `input_ids`, `labels`, `row`, `source`, `content`, and those of `Carried`; memory-mapped.
        tally: what happened to the source's rows.
        key: of the cache entry.
        weight: sampling weight.
    """

    name: str
    rows: Dataset
    tally: Tally
    key: str
    weight: float

    @property
    def content(self) -> Keys:
        """Content key per row, uint64 (N,)."""
        keys: Keys = self.rows.data.column("content").to_numpy()
        return keys.astype(np.uint64, copy=False)

    @property
    def groups(self) -> tuple[Keys, int]:
        """Group key per row, uint64 (N,), the content key where a row has no group; and how many have one."""
        column = self.rows.data.column(GROUP)
        filled = pc.coalesce(column, self.rows.data.column("content"))
        return filled.to_numpy().astype(np.uint64, copy=False), len(column) - column.null_count

    @property
    def tokens(self) -> Dataset:
        """The rows without what only the split needs."""
        return self.rows.remove_columns([name for name in ("content", GROUP) if name in self.rows.column_names])


class SourceReader:
    """Reads sources through the token cache; one tokenizer and one set of policies.

    Args:
        data: policies, the default format and the folder of the cache.
        tokenizer: with the chat template that is trained with.
    """

    def __init__(self, data: DataArguments, tokenizer: PreTrainedTokenizerBase) -> None:
        self.data = data
        self.renderer = Renderer(tokenizer, data.supervise, cuts=data.too_long not in ("drop", "error"))
        self.cache = TokenCache(Path(data.cache_dir or "~/.cache/sft_toolkit").expanduser() / "tokens")
        policies = {f.name: getattr(data, f.name) for f in fields(PreparationArguments) if f.name not in _AFTERWARDS}
        reads_clock = "strftime_now" in template_text(tokenizer)
        self._shared_key = {
            "code": code_fingerprint(),
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "policies": policies,
            "date": datetime.date.today().isoformat() if reads_clock else None,
        }

    def read(self, source: SourceArguments, carried: Carried = NOTHING) -> SourceTokens:
        """The tokens of a source: from the cache, or rendered now.

        Args:
            carried: columns of the files that are kept beside the tokens.

        Raises:
            DataError: a file or row that can't be used, by name and number.
            ConfigError: the rows are conversations and there is no chat template.
            OSError: the cache can't be written.
        """
        asked = source.format if source.format != "auto" else self.data.format
        key = cache_key({**self._shared_key, **_source_key(source, asked), "carried": asdict(carried)})

        def build(path: Path) -> dict[str, Any]:
            formats = _formats(source, asked, self.data.on_bad_row == "error")
            reader = WatchedMaps(source, formats)
            tokenizer = SourceTokenizer(self.data, self.renderer, reader, carried)
            with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, tokenizer.schema) as writer:
                for batch in tokenizer.batches(read_rows(source, self.data.on_bad_row)):
                    writer.write_batch(batch)
                    logger.debug("%s: %s rows read", source.path, f"{tokenizer.tally.rows_read:,}")
            reader.report(tokenizer.tally)
            return {"tally": tokenizer.tally.as_dict()}

        entry = self.cache.build_once(key, build)
        rows = Dataset.from_file(str(entry.tokens))
        return SourceTokens(source.path, rows, Tally(**entry.facts["tally"]), key, source.weight)


def formats_by_file(rows: Iterable[RawRow], columns: dict[str, str]) -> dict[str, str]:
    """The format of each file, from the columns of all its rows that can be read.

    Raises:
        DataError: a file whose columns fit no format, or several; names the file.
    """
    found: dict[str, set[str]] = {}
    samples: dict[str, list[dict[str, Any]]] = {}
    for raw in rows:
        if raw.error is None:
            found.setdefault(raw.source, set()).update(raw.row)
            some = samples.setdefault(raw.source, [])
            if len(some) < HINT_ROWS:
                some.append(raw.row)
    return {file: _format_of(file, names, samples[file], columns) for file, names in found.items()}


def _format_of(file: str, names: set[str], sample: list[dict[str, Any]], columns: dict[str, str]) -> str:
    try:
        return detect_format(names, sample, columns)
    except DataError as error:
        raise DataError(f"{file}: {error}") from None


def _formats(source: SourceArguments, asked: str, strict: bool) -> dict[str, str] | str:
    if asked != "auto":
        return asked
    return formats_by_file(read_rows(source, "error" if strict else "drop"), source.columns)


def _source_key(source: SourceArguments, asked: str) -> dict[str, Any]:
    # The path is stored with each row, so a renamed file is another entry; the weight is applied afterwards.
    options = {name: value for name, value in asdict(source).items() if name not in ("weight", "format")}
    plugin = None if asked == "auto" or asked in LAYOUTS else _source_text(lookup("format", asked))
    return {"source": options, "format": asked, "plugin": plugin, "content": fingerprint(source)}


def _source_text(plugin: Any) -> str:
    """The code of a registered format; text that never comes again where it can't be read, so that nothing is stale."""
    try:
        return inspect.getsource(inspect.getmodule(plugin) or plugin)
    except (OSError, TypeError):
        return uuid.uuid4().hex
