"""Tokens on disk: found again by everything that could change them, built once, never half there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LAYOUT = 1
"""Version of what an entry holds; a change of the columns or of `entry.json` raises it."""

TOKENS = "tokens.arrow"
FACTS = "entry.json"


@dataclass(frozen=True)
class Entry:
    """A complete cache entry: the Arrow file of token rows and the facts stored with it (counts, notes)."""

    tokens: Path
    facts: dict[str, Any]


class TokenCache:
    """A folder of entries, one sub-folder per key.

    An entry is written beside its place and renamed into it, so that it is there whole or not at all; a file lock
    makes processes that start together build it once. What a killed build left behind is removed by the next one.

    Args:
        root: made on first use. On a folder that several nodes share, its file system must support locks.
    """

    def __init__(self, root: Path) -> None:
        self.root = root

    def build_once(self, key: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        """The entry of `key`; where there is none, `build(tokens_file)` writes the tokens and returns the facts.

        Raises:
            OSError: the disk is full or read-only; nothing usable is left behind.
            Whatever `build` raises, likewise.
        """
        found = self._read(key)
        if found is not None:
            logger.info("tokens of %s read from the cache", key[:12])
            return found
        self.root.mkdir(parents=True, exist_ok=True)
        with _locked(self.root / f"{key}.lock"):
            return self._read(key) or self._build(key, build)

    def _build(self, key: str, build: Callable[[Path], dict[str, Any]]) -> Entry:
        folder = self.root / key
        for leftover in [folder, *self.root.glob(f"{key}.building-*")]:
            shutil.rmtree(leftover, ignore_errors=True)
        building = self.root / f"{key}.building-{os.getpid()}"
        building.mkdir()
        try:
            facts = build(building / TOKENS)
            stored = {"bytes": (building / TOKENS).stat().st_size, "facts": facts}
            (building / FACTS).write_text(json.dumps(stored, ensure_ascii=False), encoding="utf-8")
            building.rename(folder)
        finally:
            shutil.rmtree(building, ignore_errors=True)
        return Entry(folder / TOKENS, facts)

    def _read(self, key: str) -> Entry | None:
        """The entry of `key`, or None where it is absent or not what was written (a copy or a disk cut it short)."""
        folder = self.root / key
        try:
            stored = json.loads((folder / FACTS).read_text(encoding="utf-8"))
            intact = stored["bytes"] == (folder / TOKENS).stat().st_size
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            intact = False
        if not intact:
            logger.warning("the cache entry %s is damaged and is built anew", folder)
            return None
        return Entry(folder / TOKENS, stored["facts"])


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        logger.info("another process prepares the same rows; waiting for it (lock file %s)", path)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def cache_key(parts: dict[str, Any]) -> str:
    """sha256 over plain data, 64 hexadecimal digits; equal data gives equal keys whatever the order of dict keys."""
    text = json.dumps(parts, sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def code_fingerprint() -> dict[str, str | int]:
    """What turns rows into tokens beside the data: this folder's source text and the libraries that render.

    Read once per process: files that are edited while it runs are not the code that it runs.
    """
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for file in sorted(here.rglob("*.py")):
        digest.update(file.relative_to(here).as_posix().encode())
        digest.update(file.read_bytes())
    libraries = {name: version(name) for name in ("transformers", "tokenizers", "jinja2")}
    return {"layout": LAYOUT, "source": digest.hexdigest(), **libraries}


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 of everything in a tokenizer that can change ids or text: vocabulary, pipeline, specials, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        state: Any = tokenizer.get_vocab()
    else:
        # The last call's padding and truncation stay in the backend, before everything that says something about the
        # next call. The rest is hashed as it is: sorting a large vocabulary takes ten times as long.
        _, _, state = backend.to_str().partition('"added_tokens"')
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    return cache_key(
        {
            "class": type(tokenizer).__qualname__,
            "state": state,
            "template": tokenizer.chat_template,
            "specials": {name: [getattr(tokenizer, name), getattr(tokenizer, f"{name}_id")] for name in names},
            "special_ids": tokenizer.all_special_ids,
            "split_special_tokens": bool(getattr(tokenizer, "split_special_tokens", False)),
        }
    )


def template_text(tokenizer: PreTrainedTokenizerBase) -> str:
    """The chat template as one text (several named ones as JSON); empty where there is none."""
    template: Any = tokenizer.chat_template
    if template is None or isinstance(template, str):
        return template or ""
    return json.dumps(template, sort_keys=True)
