"""The launcher that started this process, and whether it is still there.

`accelerate launch` with one process starts it as a child and dies of a SIGTERM without passing it on; so do all
launchers of a SIGKILL. Schedulers and `docker stop` send theirs to the launcher: the training would go on alone,
unseen, and be killed in the end without having saved.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_LAUNCHERS = re.compile(
    r"(^|/)(accelerate|accelerate-launch|torchrun|deepspeed)$|accelerate[./]commands|torch[./]distributed"
)


def launcher() -> int | None:
    """Process id of the parent, if it is a launcher. A shell is none: who logs out leaves `nohup` behind on purpose.

    Read from `/proc`, hence None where there is none of it (macOS, Windows).
    """
    parent = os.getppid()
    try:
        command = Path(f"/proc/{parent}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return None
    return parent if any(_LAUNCHERS.search(part) for part in command[:4]) else None


def is_orphaned(launcher: int | None) -> bool:
    """Whether the launcher has gone; its children then belong to another process."""
    return launcher is not None and os.getppid() != launcher
