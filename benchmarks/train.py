"""This toolkit beside a bare loop, stock `transformers.Trainer` and TRL, on the same rows, in one run.

    python -m benchmarks.train [--packing] [--lora] [--data FILE] [--rounds N] ...

Each system runs in a process of its own, the systems take turns, and the medians over the rounds are printed. Stays
light itself: on Linux a child's peak of memory starts at that of its parent.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from benchmarks.setting import BYTES, ROOT, SMOLLM2, TICKETS, Contestant, Outcome, Setting
from benchmarks.table import markdown

SYSTEMS = ("bare", "stock", "toolkit", "trl")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all rounds and print the tables; 1 where a system failed."""
    try:
        measure(parse(arguments))
    except subprocess.CalledProcessError as error:
        print(f"{error.cmd[3]} failed:\n{error.stderr[-3000:]}", file=sys.stderr)
        return 1
    return 0


def measure(options: argparse.Namespace) -> dict[Contestant, list[Outcome]]:
    """Run all rounds and print the tables; the outcome of each round.

    Raises:
        subprocess.CalledProcessError: a system failed; its stderr is in the error.
    """
    setting = setting_from(options)
    contestants = chosen(options.systems, options.packing, options.trl_python)
    print(heading(setting, options.threads))
    outcomes: dict[Contestant, list[Outcome]] = {contestant: [] for contestant in contestants}
    for number in range(options.rounds):
        # There and back: whoever comes first in one round comes last in the next.
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            python = options.trl_python if contestant.system == "trl" else sys.executable
            outcome = run(contestant, setting, options.threads, options.profile, python)
            outcomes[contestant].append(outcome)
            load = os.getloadavg()[0]
            speed = f"{outcome.tokens / outcome.train_s:,.0f} tokens/s"
            print(f"round {number + 1}: {contestant}: {speed}, load average {load:.1f}", file=sys.stderr)
    print(f"\n{markdown(outcomes)}\n\nload average at the end: {os.getloadavg()[0]:.1f}")
    return outcomes


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    summary = "This toolkit beside a bare loop, stock Trainer and TRL (where installed), on the same rows."
    parser = argparse.ArgumentParser("python -m benchmarks.train", description=summary)
    add = parser.add_argument
    add("--data", default=TICKETS, help="JSONL or JSON in the layout messages or alpaca")
    add("--rows", type=int, help="prepare only the first rows of it")
    add("--tokenizer", help=f"model folder, or '{BYTES}'; default {SMOLLM2} where it exists")
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--lora", action="store_true", help="rank 16 on all linear layers; otherwise all weights are trained")
    add("--packing", action="store_true", help="bins of --max-length tokens; stock Trainer runs padded as well")
    add("--batch", type=int, default=8, help="rows of an update where rows are padded")
    add("--max-length", type=int, default=1024, help="tokens of a bin; longer rows are dropped")
    add("--steps", type=int, default=20, help="updates, warm-up included")
    add("--warmup", type=int, default=3, help="updates that are not measured")
    add("--learning-rate", type=float, default=3e-4)
    add("--rounds", type=int, default=2)
    add("--threads", type=int, default=os.cpu_count() or 1, help="OMP_NUM_THREADS of every system")
    add("--trl-python", default=sys.executable, help="Python of an environment that has trl, if this one has not")
    add("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS)
    add("--profile", type=Path, help="folder for cProfile files of preparation and training")
    options = parser.parse_args(arguments)
    if not 1 <= options.warmup < options.steps:
        parser.error("--warmup must be at least 1 and less than --steps")
    if not (ROOT / options.data).is_file():
        parser.error(f"--data: '{options.data}' is no file")
    return options


def setting_from(options: argparse.Namespace) -> Setting:
    """The part of the command line that a subprocess must know."""
    tokenizer = options.tokenizer or (SMOLLM2 if (ROOT / SMOLLM2 / "tokenizer_config.json").exists() else BYTES)
    own = ("data", "rows", "layers", "hidden", "batch", "max_length", "steps", "warmup", "learning_rate", "lora")
    return Setting(tokenizer=tokenizer, **{name: getattr(options, name) for name in own})


def chosen(systems: Sequence[str], packing: bool, trl_python: str) -> list[Contestant]:
    """Who runs, the bare loop first. With packing, stock runs padded as well: that is what it does by itself."""
    contestants = []
    for system in SYSTEMS:
        if system not in systems:
            continue
        if system == "trl" and trl_python == sys.executable and find_spec("trl") is None:
            print("trl is not installed: left out", file=sys.stderr)
            continue
        if system == "stock" and packing:
            contestants.append(Contestant(system, packed=False))
        contestants.append(Contestant(system, packing))
    return contestants


def run(contestant: Contestant, setting: Setting, threads: int, profile: Path | None, python: str) -> Outcome:
    """Measure one system in a process of its own.

    Raises:
        subprocess.CalledProcessError: it failed; its stderr is in the error.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "RAYON_NUM_THREADS": str(threads),  # of the tokenizers
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "outcome.json"
        layout = "packed" if contestant.packed else "padded"
        command = [python, "-m", "benchmarks.worker", contestant.system, layout]
        command += [json.dumps(asdict(setting)), str(result), *([str(profile.resolve())] if profile else [])]
        subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        return Outcome.from_json(result.read_text(encoding="utf-8"))


def heading(setting: Setting, threads: int) -> str:
    """What was measured, and where."""
    versions = ", ".join(filter(None, map(_version, ("torch", "transformers", "peft", "trl"))))
    load = os.getloadavg()[0]
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {threads} threads, load average {load:.1f} at the start"
    model = f"Llama, {setting.layers} layers of {setting.hidden}, {'LoRA r 16' if setting.lora else 'all weights'}"
    work = f"{setting.steps} updates, the first {setting.warmup} not measured; fp32, no activation checkpointing"
    data = f"{setting.data}, tokenizer {setting.tokenizer}, batch {setting.batch}, max_length {setting.max_length}"
    return "\n".join([f"{model}; {work}", data, machine, f"Python {platform.python_version()}, {versions}"])


def _version(package: str) -> str:
    try:
        return f"{package} {version(package)}"
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
