"""Several machines: do they see one disk, and from which checkpoint do all of them go on?

Each machine looks at its own `output_dir`. Where that is one shared folder they find the same; where it is not, only
the first one's holds whole checkpoints, and the others would start anew beside it.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sft_toolkit.engines.launch import read_launch

PIECE = 2**26  # bytes that are sent at a time

logger = logging.getLogger(__name__)


def several(env: Mapping[str, str]) -> bool:
    """Whether the launcher says that there is more than one machine."""
    launch = read_launch(env)
    return launch is not None and launch.nodes > 1


def is_first(env: Mapping[str, str]) -> bool:
    """Whether this is the rank that chooses the checkpoint."""
    launch = read_launch(env)
    return launch is None or launch.rank == 0


def of_first_rank(value: Any) -> Any:
    """What the first rank brought; every rank has to ask."""
    from accelerate.utils import broadcast_object_list

    found: list[Any] = [value]
    broadcast_object_list(found)
    return found[0]


def of_all_ranks(value: Any) -> list[Any]:
    """What every rank brought, by rank."""
    from accelerate.utils import gather_object

    found: list[Any] = gather_object([value])
    return found


def share_one_disk(output_dir: Path) -> bool:
    """Whether a file of the first rank is there for every rank."""
    token, first = of_first_rank(f".seen-{uuid.uuid4().hex}"), _rank() == 0
    if first:
        (output_dir / token).touch()
    of_all_ranks(None)  # it is written
    seen = of_all_ranks((output_dir / token).exists())
    if first:
        (output_dir / token).unlink(missing_ok=True)
    return all(seen)


def _rank() -> int:
    from torch import distributed

    return distributed.get_rank() if distributed.is_initialized() else 0


def settle(output_dir: Path, chosen: Path | None) -> Path | None:
    """The checkpoint that all ranks go on from, by its place on this machine; for runs on several machines.

    The first rank chooses. Without a shared disk its files are sent to the machines that lack them; what these wrote
    themselves (their shares of a ZeRO optimizer) stays.

    Args:
        chosen: what the first rank has chosen; looked at on no other.
    """
    wanted = of_first_rank(None if chosen is None else (chosen.name, str(chosen)))
    if share_one_disk(output_dir):
        return None if wanted is None else Path(wanted[1])
    logger.warning("training.output_dir is another folder on each machine: the first one's holds the checkpoints")
    if wanted is None:
        return None
    here = chosen if _rank() == 0 and chosen is not None else output_dir / wanted[0]
    _send(here)
    return here


def _send(folder: Path) -> None:
    """Files of the first rank's folder to the same place on every machine that has not got them, in pieces."""
    files = of_first_rank(_sizes(folder))
    lacking = [of_all_ranks(_sizes(folder).get(name) != size) for name, size in files.items()]
    for (name, size), absent in zip(files.items(), lacking, strict=True):
        # A small file of the same size may still be another one, such as the state of another update.
        if not any(absent) and size > PIECE:
            continue
        target, partial = folder / name, folder / f"{name}.partial"
        writes = _rank() != 0 and os.environ.get("LOCAL_RANK", "0") == "0"
        with target.open("rb") if _rank() == 0 else nullcontext() as source:
            for start in range(0, max(size, 1), PIECE):
                piece = of_first_rank(source.read(PIECE) if source is not None else None)
                if writes:
                    partial.parent.mkdir(parents=True, exist_ok=True)
                    with partial.open("wb" if start == 0 else "ab") as file:
                        file.write(piece)
        if writes:
            os.replace(partial, target)
    of_all_ranks(None)


def _sizes(folder: Path) -> dict[str, int]:
    return {str(p.relative_to(folder)): p.stat().st_size for p in sorted(folder.rglob("*")) if p.is_file()}
