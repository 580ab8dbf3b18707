"""What Linux says about files and processes: kinds of file systems, who holds a file. No torch, no other package."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

# A file there may be held by a process of another machine, which can't be seen from here.
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "glusterfs", "9p", "wekafs", "fuse")


def file_system(path: Path) -> str:
    """Type of the file system on which `path` lies, or will; "" where /proc does not say."""
    mounts = Path("/proc/mounts")
    if not mounts.exists():
        return ""
    target, found, length = str(path.resolve()), "", -1
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split(" ")
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= length:
            found, length = kind, len(point)
    return found


def is_shared(path: Path) -> bool:
    """Whether several machines may see this path."""
    return file_system(path).split(".")[0] in _SHARED


def processes_using(lock: Path) -> list[int]:
    """Ids of the processes that hold the lock file open, or whose working folder is the operator's (ninja, g++)."""
    wanted = {str(lock), str(lock.parent)}
    return [int(process.name) for process in Path("/proc").glob("[0-9]*") if wanted & links_of(process)]


def links_of(process: Path) -> set[str]:
    """The working folder and the open files of a process; what it closes meanwhile is left out."""
    targets = set()
    with suppress(OSError):  # ended meanwhile, or another user's
        for link in [process / "cwd", *(process / "fd").iterdir()]:
            with suppress(OSError):
                targets.add(os.readlink(link))
    return targets
