"""With a plain `TrainingArguments`, SFTTrainer is Trainer: the same script leaves the same logs, weights and files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from transformers import Trainer

from sft_toolkit import SFTTrainer
from tests.dropin.setups import SETUPS

TIMES = re.compile("runtime|per_second|preparation_time|total_flos_per")


def untimed(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in entry.items() if not TIMES.search(key)} for entry in history]


def content(path: Path) -> Any:
    """What a file says, without times and the name of the folder it lies in."""
    if path.suffix == ".safetensors":
        return {name: tensor.tolist() for name, tensor in load_file(path).items()}
    if path.name == "trainer_state.json":
        state = json.loads(path.read_text())
        kept = {key: value for key, value in state.items() if key != "stateful_callbacks"}
        kept["best_model_checkpoint"] = Path(state["best_model_checkpoint"] or "").name
        return {**kept, "log_history": untimed(state["log_history"])}
    if path.suffix in (".json", ".jinja", ".md"):
        return path.read_text()
    return None  # pickles of torch: they hold the output folder's name; what is in them shows in what is resumed


def result(cls: Any, name: str, folder: Path) -> dict[str, Any]:
    trainer = SETUPS[name](cls, folder)
    return {
        "history": untimed(trainer.state.log_history),
        "weights": {key: tensor.tolist() for key, tensor in trainer.model.state_dict().items()},
        "files": {p.relative_to(folder).as_posix(): content(p) for p in sorted(folder.rglob("*")) if p.is_file()},
        "step": trainer.state.global_step,
        "callbacks": [type(callback).__name__ for callback in trainer.callback_handler.callbacks],
    }


@pytest.mark.parametrize("name", SETUPS)
def test_the_same_script_leaves_the_same(name: str, tmp_path: Path) -> None:
    stock = result(Trainer, name, tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "stock") if (tmp_path / "out").exists() else None
    ours = result(SFTTrainer, name, tmp_path / "out")
    assert stock["history"], "nothing was done"
    for part, found in stock.items():
        assert ours[part] == found, part


def test_there_are_more_than_a_dozen() -> None:
    assert len(SETUPS) >= 20
