from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerControl

from sft_toolkit.callbacks.stall import StallWatch
from tests.unit.callback_runs import arguments, state, stock_trainer


def a_loader_that_hangs(until: threading.Event) -> None:
    until.wait(20)


def test_a_run_that_stands_still_says_in_which_phase_and_where(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    said = threading.Event()
    trainer = stock_trainer(tmp_path, [StallWatch(seconds=1.0)])
    handler = logging.Handler()
    handler.emit = lambda record: said.set()  # type: ignore[method-assign]
    logging.getLogger("sft_toolkit.callbacks.stall").addHandler(handler)
    collate = trainer.data_collator
    batches = []

    def slow(rows: Any) -> Any:
        batches.append(rows)
        if len(batches) == 3:  # one batch is fetched ahead
            a_loader_that_hangs(said)
        return collate(rows)

    trainer.data_collator = slow
    try:
        trainer.train()
    finally:
        logging.getLogger("sft_toolkit.callbacks.stall").removeHandler(handler)
    assert said.is_set()
    assert trainer.state.global_step == 3
    (message,) = [m for m in caplog.messages if "has been" in m]
    assert message.startswith("rank 0 has been waiting for the next batch for ")
    assert "its threads stand here:\n  MainThread:\n" in message
    assert "in a_loader_that_hangs" in message


def test_it_is_quiet_where_events_come_and_ends_its_thread(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback, control, args = StallWatch(seconds=0.5), TrainerControl(), arguments(tmp_path)
    callback.on_train_begin(args, state(0), control)
    for step in range(1, 8):
        time.sleep(0.1)
        callback.on_step_begin(args, state(step), control)
    assert "stall-watch" in {thread.name for thread in threading.enumerate()}
    callback.on_train_end(args, state(8), control)
    time.sleep(0.2)
    assert "stall-watch" not in {thread.name for thread in threading.enumerate()}
    assert caplog.messages == []


def test_no_time_at_all_is_refused() -> None:
    with pytest.raises(ValueError, match="seconds must be above 0, but is 0"):
        StallWatch(0)
