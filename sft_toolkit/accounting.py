"""Counts of a training run: tokens, padding, speed, non-finite updates. No synchronisation but at log events."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sft_toolkit.loss import IGNORE_INDEX

Batch = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]


class TokenMeter:
    """Adds up what each update holds on this rank, and turns it into log entries over all ranks.

    Device tensors are kept as they are and read once per log event: an `.item()` per micro-batch would make the host
    wait for the device each time.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.supervised_tokens = 0
        self.window_tokens, self.window_seconds = 0, 0.0  # since this process began, evaluation and saving left out
        self._counts: list[Tensor] = []  # per update: [tokens, supervised, slots], int64
        self._losses: dict[int, Tensor] = {}  # update -> sum of what is optimised, on this rank
        self._nll: Tensor | None = None  # sum since the last log event, where another objective is optimised
        self._since = time.perf_counter()

    def resume(self, log_history: Iterable[dict[str, Any]]) -> None:
        """Continue the counters of an interrupted run; every save is preceded by a log event, so they are exact."""
        self.tokens = self.supervised_tokens = 0
        for entry in log_history:
            self.tokens = int(entry.get("tokens", self.tokens))
            self.supervised_tokens = int(entry.get("supervised_tokens", self.supervised_tokens))
        self._counts.clear()
        self._losses.clear()
        self._since = time.perf_counter()

    def count(self, batches: list[Batch]) -> Tensor:
        """Count the micro-batches of one update.

        Returns:
            int64 scalar: supervised tokens of these micro-batches on this rank.
        """
        device = batches[0]["labels"].device if batches else torch.device("cpu")
        total = torch.zeros(3, dtype=torch.int64, device=device)
        for batch in batches:
            labels, mask = batch["labels"], batch.get("attention_mask")
            slots = torch.tensor(labels.numel(), device=device)
            tokens = slots if mask is None else mask.sum()
            total += torch.stack([tokens, (labels[:, 1:] != IGNORE_INDEX).sum(), slots])
        self._counts.append(total)
        return total[1]

    def add_loss(self, update: int, loss: Tensor, nll: Tensor | None = None) -> None:
        """Remember the summed loss of a micro-batch that belongs to `update` (0-based).

        Args:
            nll: its summed NLL, where another objective is optimised; log entries then hold `nll` too.
        """
        seen = self._losses.get(update)
        self._losses[update] = loss.detach() if seen is None else seen + loss.detach()
        if nll is not None:
            self._nll = nll if self._nll is None else self._nll + nll

    def log_entry(self, reduce: Reduce) -> dict[str, float]:
        """Totals over all ranks since the last call, cumulative counters and speed. Starts a new window."""
        if not self._counts:
            return {}
        tokens, supervised, slots = (int(n) for n in reduce(torch.stack(self._counts).sum(0)).tolist())
        seconds = max(time.perf_counter() - self._since, 1e-9)
        self.tokens += tokens
        self.window_tokens, self.window_seconds = self.window_tokens + tokens, self.window_seconds + seconds
        self.supervised_tokens += supervised
        self._counts.clear()
        self._since = time.perf_counter()
        entry = {} if self._nll is None else {"nll": float(reduce(self._nll)) / max(supervised, 1)}
        self._nll = None
        return entry | {
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_second": round(tokens / seconds, 2),
            "supervised_tokens_per_second": round(supervised / seconds, 2),
            "padding_share": round(1.0 - tokens / slots, 4) if slots else 0.0,
        }

    def nonfinite_updates(self, reduce: Reduce) -> dict[int, float]:
        """Updates since the last call whose loss is NaN or infinite on any rank: {0-based update: loss}."""
        if not self._losses:
            return {}
        updates = sorted(self._losses)
        totals = reduce(torch.stack([self._losses[u].float() for u in updates])).tolist()
        self._losses.clear()
        return {u: t for u, t in zip(updates, totals, strict=True) if not math.isfinite(t)}

    def pause(self) -> Callable[[], None]:
        """Stop the clock (evaluation, saving); call the result to go on."""
        stopped = time.perf_counter()

        def go_on() -> None:
            self._since += time.perf_counter() - stopped

        return go_on


class EvalMeter:
    """Sum of NLL and supervised tokens over an evaluation set, so that its mean weighs every token the same.

    Args:
        parts: names of the set's sources and the batches of each on this rank, in order; they get means of their own.
    """

    def __init__(self, parts: Sequence[tuple[str, int]] = ()) -> None:
        self.nll: Tensor | None = None
        self.tokens: Tensor | None = None
        self._part_of_batch = [name for name, batches in parts for _ in range(batches)]
        self._parts: dict[str, EvalMeter] = {}
        self._batches = 0

    def add(self, nll: Tensor, tokens: Tensor) -> None:
        """Add one batch of this rank: fp32 scalar sum and int64 scalar count."""
        nll = nll.float() if nll.device.type == "mps" else nll.double()  # mps has no float64
        self.nll = nll if self.nll is None else self.nll + nll
        self.tokens = tokens if self.tokens is None else self.tokens + tokens
        if self._batches < len(self._part_of_batch):
            self._parts.setdefault(self._part_of_batch[self._batches], EvalMeter()).add(nll, tokens)
        self._batches += 1

    def by_part(self, reduce: Reduce) -> dict[str, float | None]:
        """As `mean`, for each part; the parts are the same on all ranks."""
        return {name: part.mean(reduce) for name, part in self._parts.items()}

    def mean(self, reduce: Reduce) -> float | None:
        """Nats per supervised token over all ranks; None where nothing was added."""
        if self.nll is None or self.tokens is None:
            return None
        nll, tokens = float(reduce(self.nll).item()), int(reduce(self.tokens).item())
        return nll / tokens if tokens else 0.0
