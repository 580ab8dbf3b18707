"""One system, measured in a process of its own: `python -m benchmarks.worker SYSTEM LAYOUT SETTING RESULT [PROFILE]`.

Started by `benchmarks.train`. A peak of resident memory is a peak of the whole process, hence one process for each.
"""

from __future__ import annotations

import cProfile
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks import systems
from benchmarks.parts import StepClock, build_model, build_tokenizer, count, over_epochs, peak_mib
from benchmarks.setting import Contestant, Outcome, Setting, read_rows

Build = Callable[..., systems.Ready]


def measure(contestant: Contestant, setting: Setting, output_dir: str, profile: Path | None) -> Outcome:
    """Prepare, train and count.

    Preparation is built once on two rows and a small model before it is measured, so that imports and first uses do
    not count. Tokens are counted on the batches after training, so that counting costs the training nothing.
    """
    tokenizer, rows = build_tokenizer(setting), read_rows(setting)
    build = _builder(contestant, output_dir)
    small = replace(setting, layers=1, hidden=64, batch=1)
    build(small, build_model(small, tokenizer), tokenizer, rows[:2], contestant.packed)
    gc.collect()
    model = build_model(setting, tokenizer)
    torch.manual_seed(setting.seed)
    started = time.process_time()
    with profiled(profile, f"{contestant}.prepare"):
        ready = build(setting, model, tokenizer, rows, contestant.packed)
    prepare_cpu_s = time.process_time() - started
    before, clock = peak_mib(), StepClock(setting.warmup, setting.steps)
    with profiled(profile, f"{contestant}.train"):
        losses = ready.train(clock)
    peak = peak_mib()
    wall, cpu = clock.elapsed()
    tokens, supervised, slots = count(over_epochs(ready.batches, setting.warmup, setting.steps))
    return Outcome(prepare_cpu_s, wall, cpu, tokens, supervised, slots, peak, peak - before, losses)


def _builder(contestant: Contestant, output_dir: str) -> Build:
    if contestant.system == "bare":
        return systems.bare
    return partial(getattr(systems, contestant.system), output_dir=output_dir)


@contextmanager
def profiled(folder: Path | None, name: str) -> Iterator[None]:
    """Write a profile of the block for `python -m pstats`; costs some tokens per second itself."""
    if folder is None:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    profile = cProfile.Profile()
    with profile:
        yield
    profile.dump_stats(folder / f"{name.replace(' ', '-')}.pstats")


def main(arguments: list[str]) -> None:
    """Measure, and write the outcome as JSON into the file RESULT; stdout is left to the systems."""
    system, layout, setting, result, *profile = arguments
    logging.basicConfig(level=logging.WARNING)
    with tempfile.TemporaryDirectory() as output_dir:
        outcome = measure(
            Contestant(system, layout == "packed"),
            Setting.from_json(setting),
            output_dir,
            Path(profile[0]) if profile else None,
        )
    Path(result).write_text(outcome.to_json(), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
