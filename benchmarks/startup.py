"""How long the command line takes to answer: `python -m benchmarks.startup [--rounds N]`. Prints; asserts nothing."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from benchmarks.setting import ROOT

MISTAKEN = (
    "model: {name_or_path: ./nowhere}\ndata: {train: missing.jsonl}\ntraining: {output_dir: out, learning_rat: 1}\n"
)
HEAVY = """\
import sys, sft_toolkit.cli
print(*(sorted({"torch", "transformers", "datasets"} & set(sys.modules)) or ["none"]))
"""


def commands(config: Path) -> dict[str, list[str]]:
    """What is timed, by its description."""
    program = [sys.executable, "-m", "sft_toolkit"]
    return {
        "python -c pass": [sys.executable, "-c", "pass"],
        "import sft_toolkit": [sys.executable, "-c", "import sft_toolkit"],
        "python -m sft_toolkit --version": [*program, "--version"],
        "python -m sft_toolkit --help": [*program, "--help"],
        "a config error (check)": [*program, "check", "--config", str(config)],
        "a config error (train)": [*program, "train", "--config", str(config)],
    }


def timed(command: list[str]) -> tuple[float, int]:
    """Wall seconds and exit status of a command."""
    started = time.perf_counter()
    status = subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode
    return time.perf_counter() - started, status


def main() -> None:
    """Print the fastest and the median run of every command, and which heavy packages the command line imports."""
    parser = argparse.ArgumentParser("python -m benchmarks.startup", description="Times the first answers.")
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "run.yaml"
        config.write_text(MISTAKEN, encoding="utf-8")
        print(f"{'seconds':32} fastest  median  exit status")
        for name, command in commands(config).items():
            runs = [timed(command) for _ in range(rounds)]
            seconds = [elapsed for elapsed, _ in runs]
            print(f"{name:32} {min(seconds):7.3f} {median(seconds):7.3f}  {runs[0][1]}")
    loaded = subprocess.run([sys.executable, "-c", HEAVY], cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"heavy packages imported with the command line: {(loaded.stdout or loaded.stderr).strip()}")


if __name__ == "__main__":
    main()
