"""Start real processes, wait for them with a watchdog, and leave none behind.

    results = run_ranks("tests.distributed.workers:train_tiny", {"strategy": "zero2"})   # what each rank returned
    finished = launch(accelerate("--multi_gpu", "--num_processes", "2", "train.py", "--config", path))
    assert finished.code == 2 and "num_processes" in finished.stderr

`run_ranks` runs this file as the module that every rank executes: it imports the worker, calls it with the keyword
arguments, and writes what it returns as JSON, so nothing has to be parsed out of an interleaved stdout.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from sft_toolkit.engines.distributed import leave_process_group
from sft_toolkit.engines.ending import run_program

ROOT = Path(__file__).resolve().parent.parent.parent
EXTENSIONS = ROOT / ".cache" / "torch_extensions"
MARK = "SFT_TEST_LAUNCH_ID"
RESULTS = "SFT_TEST_RESULTS"
# What an outer launcher or an accelerate configuration of the developer would leave to our processes.
FOREIGN = ("ACCELERATE_", "FSDP_", "TORCHELASTIC_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "DS_", "DEEPSPEED_")
FOREIGN_NAMES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"}


@dataclass(frozen=True)
class Finished:
    """A command that ended, by itself or by the watchdog (`timed_out`; `code` is then -SIGKILL)."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    timed_out: bool = False

    def tail(self, characters: int = 4000) -> str:
        """The end of both streams, for assertion messages."""
        ending = f"exit code {self.code} after {self.seconds:.0f} s"
        return "\n".join([ending, self.stdout[-characters:], self.stderr[-characters:]])


def launch(
    command: Sequence[str | Path], *, timeout: float = 120, env: Mapping[str, str] | None = None, cwd: Path = ROOT
) -> Finished:
    """Run a command with the environment of `clean_environment`; kill all that it started when `timeout` s are over."""
    mark = uuid.uuid4().hex
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        # Files and not pipes: an orphan that keeps a pipe open would block the reader for ever.
        out, err = Path(folder, "stdout"), Path(folder, "stderr")
        with out.open("wb") as out_file, err.open("wb") as err_file:
            process = subprocess.Popen(
                [str(part) for part in command],
                env={**clean_environment(), **(env or {}), MARK: mark},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out_file,
                stderr=err_file,
                start_new_session=True,
            )
            try:
                code, timed_out = process.wait(timeout), False
            except subprocess.TimeoutExpired:
                code, timed_out = -signal.SIGKILL, True
            finally:
                kill_marked(mark)
                process.wait()
        seconds = time.monotonic() - started
        stdout, stderr = (path.read_text(encoding="utf-8", errors="replace") for path in (out, err))
    return Finished(code, stdout, stderr, seconds, timed_out)


def run_ranks(
    worker: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    processes: int = 2,
    timeout: float = 120,
    env: Mapping[str, str] | None = None,
    through: str = "torchrun",
) -> list[Any]:
    """Call `module:function` in `processes` ranks; what each returned (JSON), by rank.

    Args:
        worker: "package.module:function".
        arguments: keyword arguments of the function, as JSON.
        through: "torchrun", or "accelerate" (with --multi_gpu, which starts processes on a CPU too), or "deepspeed"
            (`accelerate launch --use_deepspeed`).
    """
    with tempfile.TemporaryDirectory() as folder:
        module = ["-m", "tests.distributed.launch", worker, json.dumps(arguments or {})]
        option = {"accelerate": "--multi_gpu", "deepspeed": "--use_deepspeed"}.get(through)
        command = (
            torchrun(*module, processes=processes)
            if option is None
            else accelerate(option, "--num_processes", str(processes), *module)
        )
        finished = launch(command, timeout=timeout, env={**(env or {}), RESULTS: folder})
        assert not finished.timed_out, f"the watchdog ended it: {finished.tail()}"
        assert finished.code == 0, finished.tail()
        return [json.loads(Path(folder, f"{rank}.json").read_text("utf-8")) for rank in range(processes)]


def torchrun(*arguments: str | Path, processes: int = 2) -> list[str | Path]:
    """The command `torchrun --standalone ...`; the port is a free one, chosen by torchrun itself."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", *arguments]


def accelerate(*arguments: str | Path, port: int = 0) -> list[str | Path]:
    """The command `accelerate launch ...`; port 0 is a free one, chosen by accelerate itself."""
    return [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", str(port), *arguments]


def clean_environment() -> dict[str, str]:
    """Ours without an outer launcher's variables; offline, one thread a rank, the compiled operators of the project."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(FOREIGN) and k not in FOREIGN_NAMES}
    return {
        **kept,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{kept.get('PATH', '')}",  # DeepSpeed looks for ninja there
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCH_EXTENSIONS_DIR": str(EXTENSIONS),
        "DS_ACCELERATOR": "cpu",
    }


def build_operators() -> None:
    """Compile DeepSpeed's operators unless they are; without a time limit, since a killed compile leaves a lock."""
    subprocess.run([sys.executable, str(ROOT / "scripts" / "build_deepspeed_ops.py")], check=True)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def kill_marked(mark: str) -> None:
    """Kill every process that inherited this mark. torchrun starts ranks in sessions of their own: no group has all."""
    while marked := [process for process in psutil.process_iter() if _has_mark(process, mark)]:
        for process in marked:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(marked, timeout=5)


def _has_mark(process: psutil.Process, mark: str) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == mark)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def _run_worker(worker: str, arguments: str) -> int:
    module, function = worker.split(":")
    returned = getattr(importlib.import_module(module), function)(**json.loads(arguments))
    Path(os.environ[RESULTS], f"{os.environ['RANK']}.json").write_text(json.dumps(returned), encoding="utf-8")
    leave_process_group()
    return 0


if __name__ == "__main__":
    run_program(lambda: _run_worker(sys.argv[1], sys.argv[2]))
