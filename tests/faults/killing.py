"""Ends trainings without warning at random moments and lets each go on: the final weights must be those of no kill.

    python -m tests.faults.killing FOLDER --moments 50 --seed 0

Every training runs in a fork of this process, which has imported everything: a kill costs a second. Half of the moments
are times; the other half are file operations (open for writing, mkdir, rename, delete) below the output folder, counted
by an audit hook, so that saves are hit between any two of them. Half of each write their checkpoints in a thread.
Prints its counts as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path
from pkgutil import walk_packages
from typing import Any

import yaml

import sft_toolkit
from sft_toolkit import run
from tests.tiny import chat, tiny_model, tiny_tokenizer

PRELOADED = [
    "peft",
    "accelerate",
    "deepspeed",
    "transformers.trainer",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
]
PRELOADED += [m.name for m in walk_packages(sft_toolkit.__path__, "sft_toolkit.") if not m.name.endswith("__main__")]
WRITES = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")
STEPS = 8


def configuration(folder: Path) -> Path:
    """A LoRA with dropout, three checkpoints at most, one saved at every step."""
    tiny_model().save_pretrained(folder / "model")
    tiny_tokenizer().save_pretrained(folder / "model")
    rows = [{"messages": chat(f"say {i}", "abcdefgh"[: 1 + i % 8])} for i in range(12)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"name_or_path": str(folder / "model")},
        "data": {"train": str(folder / "train.jsonl"), "max_length": 64, "cache_dir": str(folder / "cache")},
        "lora": {"r": 4, "dropout": 0.1},
        "training": {
            "output_dir": str(folder / "whole"),
            "max_steps": STEPS,
            "per_device_train_batch_size": 2,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "save_steps": 1,
            "save_total_limit": 3,
            "disable_tqdm": True,
        },
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def forked(work: Callable[[], object], log: Path) -> int:
    """The exit status of a fork that does this work; negative where a signal ended it."""
    process = os.fork()
    if process:
        return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    code = 1
    try:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        work()
        code = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(code)
    raise AssertionError


def killed_after(seconds: float) -> None:
    """This process is killed in so many seconds, whatever it does then."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the kernel ends it: a handler would wait for a long C call
    signal.setitimer(signal.ITIMER_REAL, seconds)


def killed_at(operation: int, below: Path, count: list[int]) -> None:
    """This process is killed before its n-th write operation below a folder (0: never); `count` counts them."""

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event not in WRITES or not args or not str(args[0]).startswith(str(below)):
            return
        if event == "open" and not (isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)):
            return
        count[0] += 1
        if count[0] == operation:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def weights(folder: Path) -> bytes:
    return (folder / "final" / "adapter_model.safetensors").read_bytes()


def losses(folder: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def undisturbed(config: Path, folder: Path) -> tuple[float, int]:
    """Seconds and write operations of a run that nobody kills."""
    seen = folder / "operations"

    def work() -> None:
        count = [0]
        killed_at(0, folder / "whole", count)
        run(config)
        seen.write_text(str(count[0]))

    # Imported here and not by each fork. No tensor is touched: torch's threads would not live on in a fork.
    for module in PRELOADED:
        import_module(module)
    began = time.monotonic()
    assert forked(work, folder / "log") == 0, (folder / "log").read_text()
    return time.monotonic() - began, int(seen.read_text())


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder: Path = options.folder
    chance = random.Random(options.seed)
    config = configuration(folder)
    seconds, operations = undisturbed(config, folder)
    whole_weights, whole_losses = weights(folder / "whole"), losses(folder / "whole")
    counts = {"killed": 0, "inside a save": 0, "inside one in a thread": 0, "equal": 0}
    counts |= {"milliseconds": round(1000 * seconds), "operations": operations}
    for moment in range(options.moments):
        out = folder / "killed"
        shutil.rmtree(out, ignore_errors=True)
        # An operation or a time, in turn.
        strike = (
            partial(killed_at, chance.randint(1, operations), out, [0])
            if moment % 2
            else partial(killed_after, chance.uniform(0.05, 1.0) * seconds)
        )
        behind = bool((moment + 1) // 2 % 2)
        overrides = [f"training.output_dir={out}", f"training.async_save={str(behind).lower()}"]
        counts["killed"] += forked(partial(victim, strike, config, overrides), folder / "log") != 0
        is_inside = (out / "_unfinished").exists()
        counts["inside a save"] += is_inside
        counts["inside one in a thread"] += is_inside and behind
        ended = forked(partial(run, config, overrides), folder / "log")
        assert ended == 0, (folder / "log").read_text()
        assert not (out / "_unfinished").exists()
        assert weights(out) == whole_weights, f"moment {moment}: {strike}"
        assert losses(out) == whole_losses, f"moment {moment}: {strike}"
        counts["equal"] += 1
    sys.stdout.write(json.dumps(counts) + "\n")


def victim(strike: Callable[[], object], config: Path, overrides: list[str]) -> None:
    """A run that ends before its time."""
    strike()
    run(config, overrides)


if __name__ == "__main__":
    main()
