from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest
from transformers import TrainerControl

from sft_toolkit.callbacks import curve
from sft_toolkit.callbacks.curve import CurveCallback, Line, curves_of, draw, smoothed
from tests.unit.callback_runs import arguments, state

HISTORY = [
    {"loss": 3.0, "step": 1, "grad_norm": 1.0},
    {"loss": float("nan"), "step": 2},
    {"eval_loss": 2.5, "eval_runtime": 1.0, "step": 2},
    {"eval_code_loss": 2.0, "step": 2},
    {"loss": 1.0, "step": 3},
    {"train_loss": 2.0, "step": 3},
]


def test_curves_are_read_from_the_log_history() -> None:
    assert curves_of(HISTORY) == {
        "train": Line(steps=[1, 3], losses=[3.0, 1.0], broken=[2]),
        "eval": Line(steps=[2], losses=[2.5]),
        "eval code": Line(steps=[2], losses=[2.0]),
    }


def test_the_figure_shows_every_curve_and_where_it_broke() -> None:
    axes = draw(curves_of(HISTORY), max_steps=10).axes[0]
    drawn = [(line.get_label(), list(map(float, line.get_xdata()))) for line in axes.lines]  # type: ignore[arg-type]
    assert drawn == [
        ("train  1.000", [1.0, 3.0]),
        ("not finite", [2.0, 2.0]),
        ("eval  2.500", [2.0]),
        ("eval code  2.000", [2.0]),
    ]
    assert axes.get_xlabel() == "step of 10"
    assert len({line.get_color() for line in axes.lines}) == 4


def test_a_long_training_curve_is_smoothed_over_the_raw_one() -> None:
    line = Line(steps=list(range(60)), losses=[1.0, 2.0] * 30)
    axes = draw({"train": line}).axes[0]
    raw, smooth = (list(map(float, drawn.get_ydata())) for drawn in axes.lines)  # type: ignore[arg-type]
    assert raw == line.losses
    assert smooth == smoothed(line.losses, 1.2)
    assert max(smooth[-10:]) - min(smooth[-10:]) < 0.3


def test_smoothing_has_no_bias_to_the_first_value() -> None:
    assert smoothed([4.0, 4.0, 4.0], 1.0) == [4.0, 4.0, 4.0]
    assert smoothed([0.0, 3.0], 1.0) == [0.0, 2.0]  # weights 1/2 and 1


def test_it_draws_at_once_then_every_few_seconds_and_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(curve, "monotonic", lambda: now)
    args, control, picture = arguments(tmp_path), TrainerControl(), tmp_path / "loss.png"
    callback = CurveCallback(every_seconds=5.0)
    running = state(1, log_history=HISTORY[:1])
    callback.on_train_begin(args, running, control)

    callback.on_log(args, running, control)
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    picture.unlink()
    running.log_history = HISTORY
    now = 104.0
    callback.on_log(args, running, control)
    assert not picture.exists()
    now = 105.0
    callback.on_log(args, running, control)
    assert picture.exists()
    picture.unlink()
    callback.on_train_end(args, running, control)
    assert not picture.exists(), "nothing new to draw"
    running.log_history = [*HISTORY, {"loss": 0.5, "step": 4}]
    callback.on_train_end(args, running, control)
    assert picture.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png"]


def test_a_picture_that_can_not_be_written_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "loss.png").mkdir()
    with caplog.at_level(logging.WARNING, logger="sft_toolkit"):
        CurveCallback().on_log(arguments(tmp_path), state(1, log_history=HISTORY), TrainerControl())
    assert [record.message.split(":")[0] for record in caplog.records] == ["The loss curve could not be written"]
    assert [path.name for path in tmp_path.iterdir()] == ["loss.png"]


def test_pyplot_stays_out_of_the_process() -> None:
    before = set(sys.modules)
    draw(curves_of(HISTORY))
    assert not {"matplotlib.pyplot", "pylab"} & (set(sys.modules) - before)
