"""The project's targets for speed and memory, in one run of about five minutes on an idle machine of two cores.

    python -m benchmarks.targets --data ../shared/data/alpaca_en_demo.json [--trl-python ../trl/bin/python] [--cpu]

A Llama of 8 layers, hidden 256, vocabulary of SmolLM2; rows packed into bins of 2,048 tokens, or 12 rows padded.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from statistics import median

from benchmarks.setting import TICKETS, Contestant, Outcome
from benchmarks.train import measure, parse

MODEL = ["--layers", "8", "--hidden", "256", "--max-length", "2048", "--packing", "--batch", "12", "--warmup", "1"]
Outcomes = dict[Contestant, list[Outcome]]
Measure = Callable[[Outcome], float]


def main() -> int:
    """Print the tables of both trainings, the overhead, and each target with what was measured."""
    parser = argparse.ArgumentParser("python -m benchmarks.targets", description="Speed and memory beside the targets.")
    add = parser.add_argument
    add("--data", default=TICKETS)
    add("--trl-python", default=sys.executable, help="Python of an environment that has trl, if this one has not")
    add("--steps", default="5")
    add("--rounds", default="1")
    add("--threads", default="2")
    add("--cpu", action="store_true", help="compare tokens per CPU-second: on a machine that others use too")
    given = parser.parse_args()
    common = [*MODEL, "--data", given.data, "--threads", given.threads]
    common += ["--steps", given.steps, "--rounds", given.rounds]
    lora = measure(parse([*common, "--lora", "--trl-python", given.trl_python]))
    print()
    full = measure(parse([*common, "--systems", "bare", "toolkit"]))
    print()
    subprocess.run([sys.executable, "-m", "benchmarks.overhead", "--rounds", "5"], check=True)
    print(f"\n| target | measured |\n|---|--:|\n{verdicts(lora, full, given.cpu)}")
    return 0


def verdicts(lora: Outcomes, full: Outcomes, by_cpu: bool) -> str:
    """Rows of a table: each target of the training runs, and the measured ratio."""

    def tokens(outcome: Outcome) -> float:
        return outcome.tokens / (outcome.train_cpu_s if by_cpu else outcome.train_s)

    def supervised(outcome: Outcome) -> float:
        return outcome.supervised / (outcome.train_cpu_s if by_cpu else outcome.train_s)

    def peak(outcome: Outcome) -> float:
        return outcome.peak_mib

    ours, bare, trl = (Contestant(system, True) for system in ("toolkit", "bare", "trl"))
    padded = Contestant("stock", False)
    rows = [
        ("LoRA: tokens/s at least 0.95 of the bare loop", ratio(lora, ours, bare, tokens)),
        ("all weights: tokens/s at least 0.95 of the bare loop", ratio(full, ours, bare, tokens)),
        ("tokens/s at least 2.7 times TRL packed", ratio(lora, ours, trl, tokens)),
        ("supervised tokens/s at least 3 times stock padded", ratio(lora, ours, padded, supervised)),
        ("LoRA: peak at most 1.1 times the bare loop", ratio(lora, ours, bare, peak)),
        ("all weights: peak at most 1.1 times the bare loop", ratio(full, ours, bare, peak)),
    ]
    return "\n".join(f"| {name} | {'not run' if value is None else f'{value:.2f}'} |" for name, value in rows)


def ratio(outcomes: Outcomes, one: Contestant, other: Contestant, of: Measure) -> float | None:
    """Median over the rounds; None where one of the two did not run."""
    pairs = list(zip(outcomes.get(one, []), outcomes.get(other, []), strict=False))
    return median(of(a) / of(b) for a, b in pairs) if pairs else None


if __name__ == "__main__":
    sys.exit(main())
