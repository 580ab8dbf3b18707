"""examples/notebook.ipynb runs from the first cell to the last, here on a tiny model and in this process (K01)."""

from __future__ import annotations

import ast
import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from sft_toolkit import registry
from tests.dropin.test_behaviours import process_state
from tests.tiny import chat, tiny_model, tiny_tokenizer

NOTEBOOK = Path(__file__).parents[2] / "examples" / "notebook.ipynb"
CELLS = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


class Screen:
    """Stands in for IPython.display: keeps what a cell shows."""

    def __init__(self) -> None:
        self.shown: list[Any] = []
        self.updates = 0

    def module(self) -> types.ModuleType:
        made = types.ModuleType("IPython.display")
        vars(made).update(
            display=self.display, HTML=lambda text: ("html", text), Image=lambda **given: ("image", given)
        )
        return made

    def display(self, thing: Any, display_id: bool = False) -> Any:
        self.shown.append(thing)
        return self if display_id else None

    def update(self, thing: Any) -> None:
        self.updates += 1


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last expression, as a notebook shows it."""
    tree = ast.parse(source)
    last = tree.body[-1] if isinstance(tree.body[-1], ast.Expr) else None
    tree.body = tree.body if last is None else tree.body[:-1]
    exec(compile(tree, "notebook", "exec"), names)
    return None if last is None else eval(compile(ast.Expression(last.value), "notebook", "eval"), names)


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    found = Screen()
    monkeypatch.setitem(sys.modules, "IPython.display", found.module())
    monkeypatch.setattr(registry, "_registered", {kind: dict(known) for kind, known in registry._registered.items()})
    return found


def test_the_notebook_holds_no_outputs() -> None:
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in CELLS if cell["cell_type"] == "code")


def test_the_notebook_runs(tmp_path: Path, screen: Screen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(NOTEBOOK.parent)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    for name in ("train", "held"):
        rows = [{"messages": chat(f"say {name} {i}", "x")} for i in range(8)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    before = process_state()
    names: dict[str, Any] = {"__name__": "__main__"}
    values = []
    for cell in CELLS:
        if cell["cell_type"] != "code":
            continue
        values.append(run_cell("".join(cell["source"]), names))
        if "parameters" in cell["metadata"].get("tags", ()):
            names |= {"MODEL": str(tmp_path / "model"), "OUT": str(tmp_path / "out")}
            names |= {"TRAIN": str(tmp_path / "train.jsonl"), "HELD_OUT": str(tmp_path / "held.jsonl")}
            names |= {"STEPS": 40, "ROWS": 8, "LENGTH": 64, "ANSWERS": 2, "RATE": 0.05}

    kind, html = values[2]
    assert (kind, "x&lt;|im_end|&gt;" in html or "im_end" in html) == ("html", True)
    assert (names["stopped"].exit_code, names["stopped"].trainer.state.global_step) == (
        130,
        21,
    )  # the step in which the button was pressed is finished
    steps = [json.loads(line)["step"] for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, 41))
    assert [kind for kind, _ in screen.shown] == ["image", "image", "html"]  # a curve for each training, then answers
    assert screen.updates >= 2
    assert [list(scores) for scores in values[-2]] == [["exact_match", "token_f1"]] * 2  # before and after
    losses = [entry["loss"] for entry in names["result"].trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0] - 0.2
    merged, live = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "merged"),
        names["result"].trainer.model.eval(),
    )
    ids = torch.arange(5, 25)[None]
    torch.testing.assert_close(merged(ids).logits, live(ids).logits, rtol=0, atol=1e-4)
    assert process_state()["environment"] == before["environment"]
