"""Memory in every log event: how much is held, how much was held at most."""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

MIB = 2**20


class MemoryCallback(TrainerCallback):
    """Adds to the log event, for the callbacks behind this one (metrics.jsonl, progress), of the first process:

    - `memory_host_mib`, `memory_host_peak_mib`: resident memory of the process now, and its peak so far.
    - `memory_device_mib`, `memory_device_peak_mib`: allocated by torch on its accelerator; peak since the last event.
    """

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if logs is None or "loss" not in logs:
            return
        logs.update(host_memory())
        if args.device.type == "cuda":
            logs["memory_device_mib"] = round(torch.cuda.memory_allocated(args.device) / MIB, 1)
            logs["memory_device_peak_mib"] = round(torch.cuda.max_memory_allocated(args.device) / MIB, 1)
            torch.cuda.reset_peak_memory_stats(args.device)


def host_memory() -> dict[str, float]:
    """MiB of resident memory; what the system does not tell is left out."""
    # Linux counts in KiB, macOS in bytes.
    unit = 1 if sys.platform == "darwin" else 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB
    found = {"memory_host_peak_mib": round(peak, 1)}
    pages = Path("/proc/self/statm")
    if pages.is_file():
        resident = int(pages.read_text().split()[1]) * resource.getpagesize() / MIB
        found["memory_host_mib"] = round(resident, 1)
    return found
