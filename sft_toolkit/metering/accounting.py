"""Counts of a training run: tokens, scores, speed, non-finite updates. No synchronisation but at log events."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sft_toolkit.loss.reduction import IGNORE_INDEX, Totals
from sft_toolkit.metering.step_times import PHASES, StepTimes

Batch = dict[str, Tensor]
Reduce = Callable[[Tensor], Tensor]
"""A vector of this rank -> its sum over all ranks."""


def _tokens_of_rows(batch: Batch) -> Tensor:
    """Tokens of a batch without padding and without the rows of one token that even out ranks: int64 scalar."""
    mask, positions = batch.get("attention_mask"), batch.get("position_ids")
    if mask is not None:
        lengths = mask.sum(1)
        return (lengths * (lengths > 1)).sum()
    total = torch.tensor(batch["labels"].numel(), device=batch["labels"].device)
    if positions is None:
        return total
    starts = torch.nn.functional.pad(positions == 0, (0, 1), value=True)
    return total - (starts[:, :-1] & starts[:, 1:]).sum()


class TokenMeter:
    """Adds up what each update holds on this rank, and turns it into log entries over all ranks.

    Device tensors are kept as they are, and read and reduced once per log event: an `.item()` per micro-batch would
    make the host wait for the device each time.

    Attributes:
        times: clock of the phases of an update.
        utilisation: (tokens, supervised tokens, seconds) of one device -> share of its peak arithmetic; None where the
            peak is not known.
    """

    def __init__(self) -> None:
        self.times = StepTimes()
        self.utilisation: Callable[[float, float, float], float] | None = None
        self.tokens = 0
        self.supervised_tokens = 0
        self.window_tokens, self.window_seconds = 0, 0.0  # since this process began, evaluation and saving left out
        self._counts: list[Tensor] = []  # per update: [tokens, supervised, slots], int64
        self._scored: list[tuple[int, Totals]] = []  # per micro-batch: its 0-based update
        self._nll_means: list[Tensor] = []  # per micro-batch, where something else is optimised

    def resume(self, log_history: Iterable[dict[str, Any]]) -> None:
        """Continue the counters of an interrupted run; every save is preceded by a log event, so they are exact."""
        self.tokens = self.supervised_tokens = 0
        for entry in log_history:
            self.tokens = int(entry.get("tokens", self.tokens))
            self.supervised_tokens = int(entry.get("supervised_tokens", self.supervised_tokens))
        for kept in (self._counts, self._scored, self._nll_means):
            kept.clear()
        self.times.take()

    def count(self, batches: list[Batch]) -> Tensor:
        """Count the micro-batches of one update.

        Returns:
            What their losses are divided by, on this rank: supervised tokens, an int64 scalar; the sum of their
            weights, fp32, where the batches carry `loss_weights`.
        """
        device = batches[0]["labels"].device if batches else torch.device("cpu")
        total = torch.zeros(3, dtype=torch.int64, device=device)
        weight: Tensor | None = None
        for batch in batches:
            labels, weights = batch["labels"], batch.get("loss_weights")
            slots = torch.tensor(labels.numel(), device=device)
            supervised = labels[:, 1:] != IGNORE_INDEX
            total += torch.stack([_tokens_of_rows(batch), supervised.sum(), slots])
            if weights is not None:
                part = (weights[:, 1:] * supervised).sum(dtype=torch.float32)
                weight = part if weight is None else weight + part
        self._counts.append(total)
        return total[1] if weight is None else weight

    def add(self, update: int, totals: Totals, nll_mean: Tensor | None = None) -> None:
        """Remember the sums of a micro-batch that belongs to `update` (0-based).

        Args:
            nll_mean: its share of the update's mean NLL, where another objective is optimised.
        """
        # Without the graph: it would hold the activations until the next log event.
        self._scored.append((update, totals.detached()))
        if nll_mean is not None:
            self._nll_means.append(nll_mean.detach())

    def log_entry(self, reduce: Reduce) -> tuple[dict[str, float], dict[int, float]]:
        """What happened since the last call, over all ranks, and the cumulative counters. Starts a new window.

        Returns:
            The entry (`loss` is in it only where another objective is optimised), and the updates whose loss is NaN or
            infinite on any rank: {0-based update: summed loss}.
        """
        if not self._counts:
            return {}, {}
        updates = sorted({update for update, _ in self._scored})
        ranks, *reduced = reduce(self._window(updates)).tolist()
        tokens, supervised, slots, correct, entropy, nll, seconds, *rest = reduced
        phases, losses = rest[: len(PHASES)], rest[len(PHASES) :]
        entry = self._speeds(int(tokens), int(supervised), int(slots), seconds / ranks, ranks)
        if self._scored and supervised:
            entry["token_accuracy"] = correct / supervised
            entry |= {} if self._scored[0][1].entropy is None else {"entropy": entropy / supervised}
        entry |= {} if not self._nll_means else {"loss": nll / ranks / len(self._counts)}
        entry |= _split(seconds, phases, ranks * len(self._counts))
        for kept in (self._counts, self._scored, self._nll_means):
            kept.clear()
        return entry, {u: t for u, t in zip(updates, losses, strict=True) if not math.isfinite(t)}

    def _window(self, updates: list[int]) -> Tensor:
        """Everything of this rank in one vector, so that one reduction and one read do; a 1 in front counts ranks."""
        scored = [totals for _, totals in self._scored]
        entropies = [totals.entropy for totals in scored if totals.entropy is not None]
        seconds, phases = self.times.take()
        sums = [
            self._counts[0].new_ones(1),
            torch.stack(self._counts).sum(0),
            _sum([totals.correct for totals in scored], self._counts[0]),
            _sum(entropies, self._counts[0]),
            _sum(self._nll_means, self._counts[0]),
            torch.tensor([seconds, *phases]),
            *(_sum([t.loss for u, t in self._scored if u == update], self._counts[0]) for update in updates),
        ]
        device = scored[0].loss.device if scored else self._counts[0].device
        exact = torch.float32 if device.type == "mps" else torch.float64  # mps has no float64
        return torch.cat([part.to(device, exact) for part in sums])

    def _speeds(self, tokens: int, supervised: int, slots: int, seconds: float, ranks: float) -> dict[str, float]:
        self.tokens += tokens
        self.supervised_tokens += supervised
        self.window_tokens, self.window_seconds = self.window_tokens + tokens, self.window_seconds + seconds
        entry = {
            "tokens": self.tokens,
            "supervised_tokens": self.supervised_tokens,
            "tokens_per_second": round(tokens / seconds, 2),
            "supervised_tokens_per_second": round(supervised / seconds, 2),
            "padding_share": round(1.0 - tokens / slots, 4) if slots else 0.0,
        }
        if self.utilisation is not None:
            entry["mfu"] = round(self.utilisation(tokens / ranks, supervised / ranks, seconds), 4)
        return entry


def _sum(values: Sequence[Tensor], like: Tensor) -> Tensor:
    """A vector of one number."""
    return torch.stack(list(values)).sum()[None] if values else like.new_zeros(1)


def _split(seconds: float, phases: Sequence[float], updates: float) -> dict[str, float]:
    """Mean seconds of an update, and of its phases; `other` is what is left: callbacks, logging, the loop itself."""
    other = max(seconds - sum(phases), 0.0)
    named = {"step_seconds": seconds, **{f"{p}_seconds": s for p, s in zip(PHASES, phases, strict=True)}}
    return {name: round(total / updates, 6) for name, total in {**named, "other_seconds": other}.items()}


class EvalMeter:
    """Sums over an evaluation set, so that its means weigh every supervised token the same.

    Args:
        parts: names of the set's sources and the batches of each on this rank, in order; they get means of their own.
    """

    def __init__(self, parts: Sequence[tuple[str, int]] = ()) -> None:
        self._sums: Tensor | None = None  # NLL, its weight, correct, tokens, entropy
        self._has_entropy = False
        self._part_of_batch = [name for name, batches in parts for _ in range(batches)]
        self._parts: dict[str, EvalMeter] = {}
        self._batches = 0

    def add(self, totals: Totals) -> None:
        """Add one batch of this rank."""
        exact = torch.float32 if totals.nll.device.type == "mps" else torch.float64  # mps has no float64
        self._has_entropy = totals.entropy is not None
        entropy = totals.nll.new_zeros(()) if totals.entropy is None else totals.entropy
        weight = torch.as_tensor(totals.weight, dtype=exact, device=totals.nll.device)
        tokens = torch.tensor(totals.tokens, dtype=exact, device=totals.nll.device)
        sums = torch.stack([totals.nll.to(exact), weight, totals.correct.to(exact), tokens, entropy.to(exact)])
        self._sums = sums if self._sums is None else self._sums + sums
        if self._batches < len(self._part_of_batch):
            self._parts.setdefault(self._part_of_batch[self._batches], EvalMeter()).add(totals)
        self._batches += 1

    def means(self, reduce: Reduce) -> dict[str, float | None]:
        """`loss` in nats per supervised token, `token_accuracy`, and `entropy` where it was asked for, over all ranks.

        Where nothing was added the loss is None.
        """
        if self._sums is None:
            return {"loss": None}
        nll, weight, correct, tokens, entropy = reduce(self._sums).tolist()
        found = {"token_accuracy": correct, **({"entropy": entropy} if self._has_entropy else {})}
        means = {name: total / tokens if tokens else 0.0 for name, total in found.items()}
        return {"loss": nll / weight if weight else 0.0, **means}

    def loss_by_part(self, reduce: Reduce) -> dict[str, float | None]:
        """The loss of each part; the parts are the same on all ranks."""
        return {name: part.means(reduce)["loss"] for name, part in self._parts.items()}


def mean_eval_loss(metrics: Mapping[str, float]) -> float:
    """`eval_loss`; where several held-out sets were evaluated by name, the mean of theirs."""
    if "eval_loss" in metrics:
        return metrics["eval_loss"]
    return fmean(value for name, value in metrics.items() if name.startswith("eval_") and name.endswith("_loss"))
