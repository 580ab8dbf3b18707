"""Devices, memory, shared memory, threads and disks."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from sft_toolkit.doctor.finding import Finding
from sft_toolkit.engines.files_of_system import file_system, is_shared
from sft_toolkit.planning.words import in_gib

GIB = 2**30
ENOUGH_SHM = GIB  # what loader workers and DeepSpeed's CPU communication take; containers come with 64 MiB


def check_devices() -> Iterator[Finding]:
    """What torch can train on; a GPU that it can't reach."""
    import torch

    if torch.cuda.is_available():
        for number in range(torch.cuda.device_count()):
            about = torch.cuda.get_device_properties(number)
            free, total = torch.cuda.mem_get_info(number)
            text, alone = f"cuda:{number} {about.name}, {in_gib(free)} of {in_gib(total)} free", free > 0.9 * total
            yield Finding("ok" if alone else "note", "devices", text, "" if alone else "another process uses it")
        return
    if Path("/dev/nvidia0").exists() and torch.version.cuda is None:
        yield Finding("bad", "devices", "there is a GPU, and this torch is built for the CPU", "install a CUDA build")
    elif Path("/dev/nvidia0").exists():
        yield Finding(
            "bad", "devices", "there is a GPU, and torch can't use it", "compare nvidia-smi with torch.version"
        )
    else:
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
        yield Finding("ok", "devices", f"{kind}, {os.cpu_count()} cores, {in_gib(host_memory())} of memory")


def check_limits(env: Mapping[str, str]) -> Iterator[Finding]:
    """Shared memory, locked memory, threads."""
    shm = Path("/dev/shm")
    if shm.is_dir():
        free = shutil.disk_usage(shm).free
        enough = free >= ENOUGH_SHM
        remedy = "" if enough else "docker run --shm-size=8g, or --ipc=host"
        yield Finding("ok" if enough else "bad", "/dev/shm", f"{in_gib(free)} free", remedy)
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if locked != resource.RLIM_INFINITY and locked < GIB:
        yield Finding(
            "note", "ulimit -l", f"{in_gib(locked)} may be locked", 'for offload write "pin_memory": false, or raise it'
        )
    if "OMP_NUM_THREADS" not in env:
        yield Finding("note", "threads", "OMP_NUM_THREADS is not set", "launchers then give each process one thread")


def host_memory() -> int:
    """Bytes of memory of this machine, or of its container."""
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text(encoding="ascii").strip() if limit.is_file() else "max"
    return min(whole, int(text)) if text.isdigit() else whole


def check_disks(output_dir: Path, checkpoint: int = 0) -> Iterator[Finding]:
    """Room where checkpoints go, and whether other nodes see that folder.

    Args:
        checkpoint: bytes of one checkpoint; 0 where it is not known.
    """
    place = next(p for p in (output_dir.absolute(), *output_dir.absolute().parents) if p.exists())
    free = shutil.disk_usage(place).free
    kind = file_system(place)
    shared = "shared by machines" if is_shared(place) else "of this machine alone"
    text = f"{output_dir}: {in_gib(free)} free, {kind or 'unknown file system'}, {shared}"
    if not os.access(place, os.W_OK):
        yield Finding("bad", "output_dir", f"{output_dir} can't be written", "name another training.output_dir")
    elif checkpoint and free < 2 * checkpoint:  # a new one is written before an old one goes
        remedy = f"a checkpoint takes {in_gib(checkpoint)}, and two are there at a time"
        yield Finding("bad", "output_dir", text, remedy)
    elif free < 10 * GIB and not checkpoint:
        yield Finding("note", "output_dir", text, "a checkpoint takes 12 bytes for each trained parameter")
    else:
        yield Finding("ok", "output_dir", text)
