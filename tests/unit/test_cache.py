"""The token cache: whole or absent, built once, keyed by everything that could change a token."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit.data.cache import TokenCache, cache_key, code_fingerprint, tokenizer_fingerprint
from tests.tiny import CHATML, tiny_tokenizer

KEY = "k" * 64


def writes(text: str, calls: list[str] | None = None) -> Callable[[Path], dict[str, Any]]:
    def build(path: Path) -> dict[str, Any]:
        path.write_text(text)
        if calls is not None:
            calls.append(text)
        return {"text": text}

    return build


def test_an_entry_is_built_once_and_then_read(tmp_path: Path) -> None:
    cache, calls = TokenCache(tmp_path / "new" / "cache"), list[str]()
    first = cache.build_once(KEY, writes("abc", calls))
    second = cache.build_once(KEY, writes("other", calls))
    assert calls == ["abc"]
    assert first == second
    assert second.tokens.read_text() == "abc"
    assert second.facts == {"text": "abc"}
    assert sorted(p.name for p in cache.root.iterdir()) == [KEY, f"{KEY}.lock"]


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(path: Path) -> dict[str, Any]:
        path.write_text("half")
        raise OSError("disk full")

    cache = TokenCache(tmp_path)
    with pytest.raises(OSError, match="disk full"):
        cache.build_once(KEY, fails)
    assert [p.name for p in tmp_path.iterdir()] == [f"{KEY}.lock"]
    assert cache.build_once(KEY, writes("abc")).tokens.read_text() == "abc"


@pytest.mark.parametrize("damage", ["tokens cut short", "facts cut short", "facts of another kind"])
def test_a_damaged_entry_is_built_anew(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    cache = TokenCache(tmp_path)
    entry = cache.build_once(KEY, writes("abc"))
    facts = entry.tokens.parent / "entry.json"
    if damage == "tokens cut short":
        entry.tokens.write_text("ab")
    else:
        facts.write_text('{"byt' if damage == "facts cut short" else "[]")
    assert cache.build_once(KEY, writes("xyz")).tokens.read_text() == "xyz"
    assert "is damaged and is built anew" in caplog.text


def _build_slowly(root: Path) -> None:
    def build(path: Path) -> dict[str, Any]:
        path.write_text("half")
        (root / "started").touch()
        time.sleep(60)
        return {}

    TokenCache(root).build_once(KEY, build)


def test_a_killed_build_leaves_nothing_usable_and_no_lock_held(tmp_path: Path) -> None:
    process = multiprocessing.get_context("fork").Process(target=_build_slowly, args=(tmp_path,))
    process.start()
    while not (tmp_path / "started").exists():
        time.sleep(0.01)
    os.kill(int(process.pid or 0), signal.SIGKILL)
    process.join()
    assert not (tmp_path / KEY).exists()
    assert len(list(tmp_path.glob(f"{KEY}.building-*"))) == 1
    entry = TokenCache(tmp_path).build_once(KEY, writes("whole"))
    assert entry.tokens.read_text() == "whole"
    assert list(tmp_path.glob(f"{KEY}.building-*")) == []


def _build_and_note(root: Path) -> None:
    def build(path: Path) -> dict[str, Any]:
        with (root / "builds").open("a") as notes:
            notes.write(f"{os.getpid()}\n")
        time.sleep(0.3)
        path.write_text("abc")
        return {}

    entry = TokenCache(root).build_once(KEY, build)
    (root / f"read-{os.getpid()}").write_text(entry.tokens.read_text())


def test_processes_that_start_together_build_once(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    processes = [fork.Process(target=_build_and_note, args=(tmp_path,)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert len((tmp_path / "builds").read_text().splitlines()) == 1
    assert [path.read_text() for path in tmp_path.glob("read-*")] == ["abc", "abc", "abc"]


def test_keys_do_not_depend_on_the_order_of_names() -> None:
    assert cache_key({"a": 1, "b": 2}) == cache_key({"b": 2, "a": 1})
    assert cache_key({"a": 1}) != cache_key({"a": 2})


def test_the_code_and_the_libraries_are_part_of_the_key() -> None:
    assert set(code_fingerprint()) == {"layout", "source", "transformers", "tokenizers", "jinja2"}


def test_whatever_changes_tokens_changes_the_fingerprint_of_the_tokenizer() -> None:
    tokenizers = [
        tiny_tokenizer(),
        tiny_tokenizer(pad="<|im_end|>"),
        tiny_tokenizer(CHATML + " "),
        tiny_tokenizer(None),
        tiny_tokenizer(bos_by_tokenizer=True),
        tiny_tokenizer(merges=[("a", "b")]),
        tiny_tokenizer(extra_specials=["<think>"]),
    ]
    assert len({tokenizer_fingerprint(tokenizer) for tokenizer in tokenizers}) == len(tokenizers)
    assert tokenizer_fingerprint(tiny_tokenizer()) == tokenizer_fingerprint(tokenizers[0])


def test_having_padded_before_does_not_change_the_fingerprint() -> None:
    tokenizer = tiny_tokenizer()
    fresh = tokenizer_fingerprint(tokenizer)
    tokenizer(["a", "bcd"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == fresh
