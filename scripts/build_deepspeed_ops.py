"""Build DeepSpeed's CPU operators once, in one process, before any test starts two ranks.

    python scripts/build_deepspeed_ops.py [--directory .cache/torch_extensions]

DeepSpeed compiles an operator at its first use. Two ranks that meet an empty cache wait for one another for minutes,
and a rank killed meanwhile leaves a lock file for which every later run waits for ever (torch/utils/file_baton.py).
Here the operators are compiled into a folder of the project's own; `tests/distributed/launch.py` points every launched
process there. When the folder is up to date this script answers in well under a second and imports neither torch nor
deepspeed. A lock that nobody holds is removed, a held one is waited for. Exit codes: 0 built (or nothing to build:
DeepSpeed is not installed), 1 the compile failed or a lock stayed.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import sys
import time
from pathlib import Path

from sft_toolkit.engines.files_of_system import processes_using

ROOT = Path(__file__).resolve().parent.parent
DEFAULT_DIRECTORY = ROOT / ".cache" / "torch_extensions"
# The communication operator is loaded by every start on CPU, the Adam operator by every start with optimizer offload.
BUILDERS = {"deepspeed_shm_comm": "ShareMemCommBuilder", "cpu_adam": "CPUAdamBuilder"}
STAMP = "built.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="Build DeepSpeed's CPU operators into a folder of the project's own.")
    parser.add_argument("--directory", type=Path, default=DEFAULT_DIRECTORY, help="the future TORCH_EXTENSIONS_DIR")
    directory = parser.parse_args().directory.resolve()
    wanted = fingerprint()
    if wanted is None:
        print("DeepSpeed is not installed: no operator to build.")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "build.flock").open("w") as guard:
        # flock ends with its process, so a second `make test` waits here and never meets a lock without an owner.
        fcntl.flock(guard, fcntl.LOCK_EX)
        problems = [problem for lock in sorted(directory.glob("*/lock")) if (problem := clear_lock(lock))]
        if problems:
            print("\n".join(problems), file=sys.stderr)
            return 1
        if is_built(directory, wanted):
            return 0
        return build(directory, wanted)


def fingerprint() -> dict[str, str] | None:
    """What the compiled files depend on; None without DeepSpeed. `-march=native` makes the CPU a part of it."""
    try:
        versions = {name: importlib.metadata.version(name) for name in ("deepspeed", "torch")}
    except importlib.metadata.PackageNotFoundError:
        return None
    return {**versions, "python": platform.python_version(), "cpu": cpu_features()}


def cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()}-{hashlib.sha256(flags.encode()).hexdigest()[:12]}"


def is_built(directory: Path, wanted: dict[str, str]) -> bool:
    stamp = directory / STAMP
    if not stamp.exists() or json.loads(stamp.read_text(encoding="utf-8")) != wanted:
        return False
    return all((directory / name / f"{name}.so").exists() for name in BUILDERS)


def clear_lock(lock: Path, patience: float = 1200.0) -> str | None:
    """Wait up to `patience` seconds for the owner of a lock, and remove a lock without one; else say what is wrong."""
    if lock.exists() and lock.stat().st_uid != os.getuid():
        return f"{lock}: belongs to another user, whose processes can't be seen from here; ask before you remove it"
    give_up, announced, ownerless = time.monotonic() + patience, False, 0
    while lock.exists():
        holders = ", ".join(map(str, processes_using(lock)))
        # Looked at twice: between two looks at /proc a lock can change hands.
        ownerless = 0 if holders else ownerless + 1
        if ownerless == 2:
            print(f"{lock}: no process holds it (its owner was killed while compiling): removed")
            lock.unlink(missing_ok=True)
        elif holders and time.monotonic() > give_up:
            return f"{lock}: still held by process {holders}"
        elif holders and not announced:
            print(f"{lock}: held by process {holders}; waiting for its compile to end", flush=True)
            announced = True
        time.sleep(0.1)
    return None


def build(directory: Path, wanted: dict[str, str]) -> int:
    """Compile and load every operator; files of other versions or of another CPU are removed first."""
    if shutil.which("c++") is None and shutil.which("g++") is None:
        print("no C++ compiler found (Debian: apt install g++); DeepSpeed can't start without one", file=sys.stderr)
        return 1
    (directory / STAMP).unlink(missing_ok=True)
    for name in BUILDERS:
        shutil.rmtree(directory / name, ignore_errors=True)
    os.environ["TORCH_EXTENSIONS_DIR"] = str(directory)
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"  # ninja of the venv
    from deepspeed.accelerator import get_accelerator

    for name, builder in BUILDERS.items():
        started = time.monotonic()
        print(f"compiling {name} (a minute or more) ...", flush=True)
        get_accelerator().create_op_builder(builder).load(verbose=False)
        print(f"compiled {name} in {time.monotonic() - started:.0f} s", flush=True)
    (directory / STAMP).write_text(json.dumps(wanted, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
