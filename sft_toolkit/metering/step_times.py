"""Where the time of an update goes: waiting for data, forward, backward, optimizer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Phase = Literal["data", "forward", "backward", "optimizer"]
PHASES: tuple[Phase, ...] = ("data", "forward", "backward", "optimizer")


class StepTimes:
    """Seconds of each phase since the last `take`, and of everything.

    `data`: fetching and collating the micro-batches of an update, in this process. `forward`: from moving a micro-batch
    to the device to its loss. `backward`: its backward, the reduction of gradients included; under DeepSpeed also
    clipping and the optimizer, which its engine runs there. `optimizer`: clipping and the step.

    On CUDA the phases are read from events in the stream, since the host runs ahead of the device: a phase is as long
    as the device was busy with it, or idle because of it. Nothing waits before `take`.

    Args:
        on_cuda: the model runs there; elsewhere the clock of the host is read.
    """

    def __init__(self, on_cuda: bool = False) -> None:
        self._on_cuda = on_cuda
        self._began = time.perf_counter()
        self._left_out = 0.0
        self._phase: Phase | None = None
        self._since: float | torch.cuda.Event = self._now()
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._intervals: list[tuple[Phase, torch.cuda.Event, torch.cuda.Event]] = []

    @property
    def phase(self) -> Phase | None:
        """What is going on; None is anything beside the parts of an update."""
        return self._phase

    def enter(self, phase: Phase | None) -> None:
        """The phase before ends here; None is anything else."""
        if self._phase is None and phase is None:
            return
        now = self._now()
        if self._phase is not None:
            if isinstance(now, float) and isinstance(self._since, float):
                self._seconds[self._phase] += now - self._since
            else:
                self._intervals.append((self._phase, self._since, now))  # type: ignore[arg-type]
        self._phase, self._since = phase, now

    def take(self) -> tuple[float, list[float]]:
        """Seconds since the last call, what was left out not counted, and those of each of `PHASES`; starts anew."""
        if self._intervals:
            self._intervals[-1][2].synchronize()
        for phase, start, end in self._intervals:
            self._seconds[phase] += start.elapsed_time(end) / 1000.0
        now = time.perf_counter()
        total = max(now - self._began - self._left_out, 1e-9)
        taken = [self._seconds[phase] for phase in PHASES]
        self._began, self._left_out = now, 0.0
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._intervals.clear()
        return total, taken

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """What happens inside the block (an evaluation) is no part of any update."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._left_out += time.perf_counter() - began

    def restart(self) -> None:
        """Forget the time since `take`: a checkpoint was written meanwhile."""
        self._began, self._left_out = time.perf_counter(), 0.0

    def _now(self) -> float | torch.cuda.Event:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
