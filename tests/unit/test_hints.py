"""What the user most likely meant."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_toolkit.hints import did_you_mean, missing, near


@pytest.mark.parametrize(
    ("name", "names", "found"),
    [
        ("learning_rat", ["weight_decay", "learning_rate"], "learning_rate"),
        ("Num-Epochs", ["num_epochs"], "num_epochs"),
        ("adam", ["adalomo", "adamw_torch", "adamw_torch_fused"], "adamw_torch"),
        ("epochs", ["no", "steps", "epoch"], "epoch"),
        ("xyzzy", ["learning_rate"], None),
        ("lr", ["lrx_scheduler"], None),
        ("x", [], None),
    ],
)
def test_near(name: str, names: list[str], found: str | None) -> None:
    assert near(name, names) == found
    assert did_you_mean(name, names) == (f"; did you mean '{found}'?" if found else "")


def test_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("train.jsonl", "train.csv", "run.yaml"):
        (tmp_path / name).write_text("")
    assert missing("trian.csv") == "no such file or folder; did you mean 'train.csv'?"
    assert missing("run.yml") == "no such file or folder; did you mean 'run.yaml'?"
    assert missing("dev.jsonl") == "no such file or folder"
    assert missing("here/x.csv") == "no such file or folder; the folder 'here' does not exist"
    assert missing(f"{tmp_path}/trian.jsonl") == f"no such file or folder; did you mean '{tmp_path}/train.jsonl'?"
