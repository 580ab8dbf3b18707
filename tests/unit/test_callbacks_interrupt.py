from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed
from torch.multiprocessing.spawn import spawn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks import interrupt
from sft_toolkit.callbacks.interrupt import InterruptCallback
from sft_toolkit.engines.early_warning import early_warning_noted
from tests.unit.callback_runs import arguments, state, stock_trainer


class SignalAt(TrainerCallback):
    """Sends this process a signal when a step begins."""

    def __init__(self, step: int, number: int) -> None:
        self.step, self.number = step, number

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step == self.step - 1:
            signal.raise_signal(self.number)


class Events(TrainerCallback):
    """Counts evaluations and saves."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))


@pytest.fixture(autouse=True)
def handlers() -> Iterator[dict[int, Any]]:
    """Known handlers before each test, and the same ones after it."""

    def earlier(number: int, frame: Any) -> None:
        calls.append(number)

    calls: list[int] = []
    saved = {number: signal.signal(number, earlier) for number in interrupt.SIGNALS}
    yield {"calls": calls, "earlier": earlier}  # type: ignore[dict-item]
    after = [signal.getsignal(number) for number in interrupt.SIGNALS]
    for number, handler in saved.items():
        signal.signal(number, handler)
    assert after == [earlier] * len(interrupt.SIGNALS)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_one_checkpoint_at_the_step_end_and_stops(
    tmp_path: Path, number: int, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    callback, events = InterruptCallback(), Events()
    trainer = stock_trainer(
        tmp_path,
        [SignalAt(3, number), callback, events],
        max_steps=20,
        eval_strategy="epoch",
        save_strategy="epoch",
    )
    with caplog.at_level(logging.WARNING, logger="sft_toolkit"):
        trainer.train()
    name = signal.Signals(number).name
    assert trainer.state.global_step == 3
    assert callback.signal_received == number
    assert events.seen == [("save", 3)]
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-3"]
    assert [record.message for record in caplog.records] == [
        f"{name} received: saving a checkpoint at step 3 and stopping"
    ]
    assert f"{name}: saving after this step, then stopping." in capfd.readouterr().err

    resumed = stock_trainer(tmp_path, [InterruptCallback()], max_steps=5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert resumed.state.global_step == 5


def test_a_second_signal_goes_to_the_earlier_handler_at_once(tmp_path: Path, handlers: dict[Any, Any]) -> None:
    callback = InterruptCallback()
    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    signal.raise_signal(signal.SIGTERM)
    assert handlers["calls"] == []
    signal.raise_signal(signal.SIGTERM)
    assert handlers["calls"] == [signal.SIGTERM]


def test_an_early_warning_is_the_signal_that_it_announces(
    tmp_path: Path, handlers: dict[Any, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    callback = InterruptCallback()
    trainer = stock_trainer(tmp_path, [SignalAt(3, signal.SIGUSR1), callback], max_steps=20)
    trainer.train()
    assert (trainer.state.global_step, callback.signal_received) == (3, signal.SIGTERM)
    assert "SIGUSR1: saving after this step, then stopping.\n" in capfd.readouterr().err

    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        signal.raise_signal(number)
    assert handlers["calls"] == []
    signal.raise_signal(signal.SIGTERM)
    assert handlers["calls"] == [signal.SIGTERM]


def test_an_early_warning_before_the_training_stops_it_at_its_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    callback = InterruptCallback()
    trainer = stock_trainer(tmp_path, [callback], max_steps=20)
    earlier = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    with early_warning_noted():
        signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
        trainer.train()
        assert (trainer.state.global_step, callback.signal_received) == (1, signal.SIGTERM)
        signal.raise_signal(signal.SIGUSR1)  # the final weights are being written
    said = "SIGUSR1: nothing is trained at the moment, so there is nothing to save; going on until SIGTERM.\n"
    assert capfd.readouterr().err.count(said) == 1
    assert signal.signal(signal.SIGUSR1, earlier) is signal.SIG_DFL


def test_a_handler_of_somebody_else_hears_the_early_warning(handlers: dict[Any, Any]) -> None:
    with early_warning_noted():
        signal.raise_signal(signal.SIGUSR1)
    assert handlers["calls"] == [signal.SIGUSR1]


def test_without_its_launcher_a_run_ends_as_at_a_sigterm(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    callback = InterruptCallback(launcher=os.getppid())
    trainer = stock_trainer(tmp_path, [callback], max_steps=2)
    trainer.train()
    assert callback.signal_received is None
    gone = InterruptCallback(launcher=999_999_999)
    trainer = stock_trainer(tmp_path, [gone], max_steps=20)
    with caplog.at_level(logging.WARNING, logger="sft_toolkit"):
        trainer.train()
    assert (trainer.state.global_step, gone.signal_received) == (1, signal.SIGTERM)
    assert caplog.messages == [
        "the launcher (process 999999999) is gone: this run ends as at a SIGTERM",
        "SIGTERM received: saving a checkpoint at step 1 and stopping",
    ]
    assert (tmp_path / "checkpoint-1").is_dir()


def test_only_a_launcher_is_watched() -> None:
    """A shell may go: `nohup` and `disown` leave a run behind on purpose."""
    ask = "from sft_toolkit.engines.parent import launcher; print(launcher() is not None)"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {ask!r}])"
    for name, watched in (("bash", False), ("/usr/bin/torchrun", True), ("accelerate", True)):
        done = subprocess.run([sys.executable, "-c", start, name], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == str(watched)


def test_with_several_processes_an_echo_within_half_a_second_is_no_second_signal(
    tmp_path: Path, handlers: dict[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [10.0]
    monkeypatch.setattr(interrupt, "monotonic", lambda: now[0])
    monkeypatch.setattr(TrainingArguments, "world_size", 2)
    callback = InterruptCallback()
    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    signal.raise_signal(signal.SIGINT)
    now[0] = 10.4
    signal.raise_signal(signal.SIGTERM)
    assert handlers["calls"] == []
    now[0] = 10.6
    signal.raise_signal(signal.SIGTERM)
    assert handlers["calls"] == [signal.SIGTERM]


def test_without_a_signal_the_earlier_handlers_come_back_and_nothing_stops(tmp_path: Path) -> None:
    callback = InterruptCallback()
    trainer = stock_trainer(tmp_path, [callback])
    trainer.train()
    assert (trainer.state.global_step, callback.signal_received) == (3, None)


def test_a_signal_after_the_last_step_counts_too(tmp_path: Path) -> None:
    callback, control = InterruptCallback(), TrainerControl()
    args = arguments(tmp_path)
    callback.on_train_begin(args, state(0), control)
    callback.on_step_end(args, state(10), control)
    signal.raise_signal(signal.SIGTERM)
    callback.on_train_end(args, state(10), control)
    assert callback.signal_received == signal.SIGTERM
    callback.on_train_begin(args, state(0), control)
    assert callback.signal_received is None
    callback.close()


def test_a_failed_run_is_cleaned_up_by_close(tmp_path: Path, handlers: dict[Any, Any]) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise RuntimeError("disk on fire")

    callback = InterruptCallback()
    with pytest.raises(RuntimeError, match="disk on fire"):
        stock_trainer(tmp_path, [callback, Failing()]).train()
    assert signal.getsignal(signal.SIGTERM) == callback._note
    callback.close()
    callback.close()
    assert signal.getsignal(signal.SIGTERM) is handlers["earlier"]


def test_in_another_thread_it_leaves_the_handlers_alone(tmp_path: Path) -> None:
    callback = InterruptCallback()
    seen: list[Any] = []

    def train() -> None:
        callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
        seen.append(signal.getsignal(signal.SIGTERM) == callback._note)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert seen == [False]


def test_an_ignored_interrupt_stays_ignored(tmp_path: Path, handlers: dict[Any, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    callback = InterruptCallback()
    callback.on_train_begin(arguments(tmp_path), state(0), TrainerControl())
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert signal.getsignal(signal.SIGTERM) == callback._note
    callback.close()
    signal.signal(signal.SIGINT, handlers["earlier"])


@pytest.mark.slow
def test_a_second_sigterm_ends_the_process_in_the_middle_of_a_step(tmp_path: Path) -> None:
    script = """
        import os, signal, time
        from pathlib import Path
        from transformers import TrainerControl
        from sft_toolkit.callbacks import InterruptCallback
        from tests.unit.callback_runs import arguments, state
        InterruptCallback().on_train_begin(arguments(Path("out")), state(0), TrainerControl())
        os.kill(os.getpid(), signal.SIGTERM)
        print("still here", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("never", flush=True)
    """
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.stdout, ended.returncode) == ("still here\n", -signal.SIGTERM)


def _rank(rank: int, folder: str) -> None:
    """Steps through training; only rank 1 gets a signal, at its second step."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    callback, control = InterruptCallback(), TrainerControl()
    args = arguments(Path(folder))
    callback.on_train_begin(args, state(0, is_world_process_zero=rank == 0), control)
    step = 0
    while not control.should_training_stop and step < 5:
        step += 1
        if rank == 1 and step == 2:
            signal.raise_signal(signal.SIGTERM)
        callback.on_step_end(args, state(step, is_world_process_zero=rank == 0), control)
    callback.on_train_end(args, state(step, is_world_process_zero=rank == 0), control)
    found = [step, control.should_save, callback.signal_received]
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


@pytest.mark.slow
def test_the_ranks_agree_on_the_step_although_one_alone_got_the_signal(tmp_path: Path) -> None:
    spawn(_rank, args=(str(tmp_path),), nprocs=2)
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2)]
    assert found == [[2, True, signal.SIGTERM], [2, True, signal.SIGTERM]]
