"""The snippets of docs/guides/data.md run: every YAML block is prepared, every Python block does what it says."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sft_toolkit import SFTArguments, load_config, registry
from sft_toolkit.data.facts import RowFacts
from sft_toolkit.data.loading import for_training
from sft_toolkit.data.prepare import prepare
from sft_toolkit.data.streaming import stream_sources
from sft_toolkit.registry import lookup
from tests.docs.test_documents import ROOT, blocks
from tests.tiny import chat, tiny_tokenizer
from tests.unit.token_rows import token_rows

GUIDE = (ROOT / "docs" / "guides" / "data.md").read_text(encoding="utf-8")
RUN = "model: {name_or_path: org/name}\ntraining: {output_dir: out}\n"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The two files of the guide and its module, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    chats = [
        {
            "messages": chat(f"q{i}", f"a{i}"),
            "dialog": [{"role": "user", "content": f"q{i}"}, {"role": "bot", "content": f"a{i}"}],
            "customer": f"c{i % 7}",
            "difficulty": i,
        }
        for i in range(40)
    ]
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in chats))
    Path("alpaca.json").write_text(json.dumps([{"instruction": f"i{i}", "output": f"o{i}"} for i in range(20)]))
    (function,) = (block for block in blocks(GUIDE, "python") if "def forget_some" in block)
    Path("my_module.py").write_text(function)
    yield tmp_path
    sys.modules.pop("my_module", None)


@pytest.mark.parametrize("written", blocks(GUIDE, "yaml"), ids=lambda text: text.splitlines()[-1].strip())
def test_every_configuration_prepares_its_data(folder: Path, written: str) -> None:
    path = folder / "run.yaml"
    path.write_text(RUN + written)
    config = load_config(path, [f"data.cache_dir={folder / 'cache'}"])
    prepared = prepare(config.data, tiny_tokenizer())
    if config.data.streaming:
        dataset: Any = stream_sources(
            config.data, tiny_tokenizer(), SFTArguments(str(folder), max_steps=3, packing=True)
        )
    else:
        assert prepared.train is not None
        dataset = for_training(prepared.train, config.data, seed=1, plan=prepared.plan)
    assert len(dataset) > 0
    assert dataset[0]


def test_the_named_losses_are_those_of_the_guide(folder: Path) -> None:
    written = next(block for block in blocks(GUIDE, "yaml") if "val_split" in block)
    (folder / "run.yaml").write_text(RUN + written)
    config = load_config(folder / "run.yaml", [f"data.cache_dir={folder / 'cache'}"])
    (parts,) = prepare(config.data, tiny_tokenizer()).eval_parts.values()
    assert [name for name, _ in parts] == ["chats", "alpaca"]
    assert "`eval_chats_loss`" in GUIDE


def test_the_python_snippets_do_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    # The snippets register names; other tests list the known ones.
    monkeypatch.setattr(registry, "_registered", {kind: dict(known) for kind, known in registry._registered.items()})
    names: dict[str, Any] = {"__name__": "guide"}
    for snippet in blocks(GUIDE, "python"):
        exec(compile(snippet, "docs/guides/data.md", "exec"), names)
    read = lookup("format", "questions")
    assert read({"question": "q", "answer": "a"}) == {"messages": chat("q", "a")}
    order = lookup("sampler", "longest_first")().order(RowFacts(token_rows(3, 5, 4)), 0, 0)
    assert order == [1, 2, 0]
    row = {"input_ids": [1] * 1000, "labels": [1] * 1000}
    kept = names["forget_some"](row, np.random.default_rng(0), share=0.2)["labels"].count(1)
    assert 750 < kept < 850
