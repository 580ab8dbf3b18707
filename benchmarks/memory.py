"""Peak resident memory of real trainings beside what `plan` predicts: `python -m benchmarks.memory [CASE ...]`.

A tiny training first pays for libraries and their pools; what the larger one adds to the peak is compared. On Linux
`ru_maxrss` is in KiB. Sharded strategies run on 2 ranks through torchrun.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12, "vocab_size": 16384}
TINY: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
LENGTH = 512
# glibc gives blocks below its moving threshold back late: the gaps it kept were up to 180 MiB in a run of 360 MiB.
# With a low, fixed threshold the resident set is the sum of the tensors.
EXACT = {"PYTHONPATH": ".", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
CASES: dict[str, dict[str, Any]] = {
    "none": {},
    "none, adapter": {"adapter": True},
    "none, no checkpointing": {"activation_checkpointing": False, "rows": 4},
    "ddp": {"ranks": 2},
    "zero1": {"ranks": 2, "zero_stage": 1},
    "zero2": {"ranks": 2, "zero_stage": 2},
}


def main() -> None:
    """Measure the cases named on the command line, or all."""
    print(f"{'case':26}{'predicted MiB':>14}{'measured MiB':>14}{'ratio':>8}")
    for name in sys.argv[1:] or CASES:
        found = measure(CASES[name])
        ratio = found["predicted"] / found["measured"]
        print(f"{name:26}{found['predicted'] / 2**20:14.0f}{found['measured'] / 2**20:14.0f}{ratio:8.2f}", flush=True)


def measure(case: dict[str, Any]) -> dict[str, int]:
    """Bytes predicted and measured on rank 0, in processes of their own."""
    ranks = case.get("ranks", 1)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder, "result.json")
        command = [sys.executable, *launcher, "-m", "benchmarks.memory_worker", json.dumps(case), str(result)]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **EXACT})
        if done.returncode:
            raise SystemExit(done.stderr[-3000:])
        sys.stderr.write("".join(line for line in done.stderr.splitlines(True) if line.startswith("{")))
        found: dict[str, int] = json.loads(result.read_text(encoding="utf-8"))
    return found


def peak() -> int:
    """Bytes of this process's largest resident set so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
