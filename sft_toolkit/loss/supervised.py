"""One forward with its loss: which logits are computed, and where.

Three ways, from the plainest to the smallest, each right for every model that is let onto it:

- `all logits`: the model's own forward as it is.
- `supervised logits`: its own forward, told by `logits_to_keep` to project only positions that carry a label.
- `chunked`: its own forward up to the head; the head is then applied to a chunk of those positions at a time, with the
  backward inside the chunk. Only where a probe has shown that the logits are what the head makes of its input: a model
  that caps or scales them behind its head keeps its own forward.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sft_toolkit.loss.chunked import chunk_rows, score_in_chunks
from sft_toolkit.loss.reduction import (
    IGNORE_INDEX,
    PerToken,
    Totals,
    next_token_targets,
    projects_only_kept,
    score,
    supervised_logits,
)
from sft_toolkit.model.modules import vocabulary_rows, without_adapter, without_cache

logger = logging.getLogger(__name__)

LossPath = Literal["all logits", "supervised logits", "chunked"]


class SupervisedForward:
    """Runs a model on a batch and adds up the loss of its supervised tokens.

    Args:
        model: without the wrappers of an engine; its adapter may be on.
        kept_only: False computes all logits whatever the model can do.
        chunk: tokens of a chunk; None chooses by vocabulary and device.
        with_entropy: also add up the entropy of the predictions.
    """

    def __init__(
        self, model: nn.Module, kept_only: bool = True, chunk: int | None = None, with_entropy: bool = False
    ) -> None:
        self.model = model
        self._chunk, self._with_entropy = chunk, with_entropy
        self._kept_only = kept_only and projects_only_kept(model)
        self._keywords = without_cache(model)
        self.path: LossPath = "supervised logits" if self._kept_only else "all logits"

    def try_chunks(self, wrapped: nn.Module) -> None:
        """Take the chunked path if this model's logits are what its head makes of its input.

        A batch that is no larger than a chunk has nothing to gain there and stays on the path before.

        Args:
            wrapped: the model as it is trained (DDP, DeepSpeed engine, ...); under ZeRO-3 every rank must call this.
        """
        name = type(without_adapter(self.model)).__name__
        try:
            plain = head_is_plain(wrapped, self.model)
        except Exception as error:  # whatever a model's own code makes of the probe: then it keeps its forward
            plain = False
            logger.info("loss: the head of %s could not be probed: %s", name, error)
        self.path = "chunked" if plain else self.path
        logger.info("loss: %s on the path '%s'", name, self.path)

    def __call__(
        self, wrapped: nn.Module, inputs: dict[str, Any], objective: PerToken | None = None, every_logit: bool = False
    ) -> tuple[Totals, Any]:
        """One forward.

        Args:
            wrapped: the model as it is trained.
            inputs: a batch with `labels` (batch, length), at the position of their own token; `loss_weights`, fp32 of
                the same shape, may stand beside them.
            objective: loss per token; None is negative log-likelihood.
            every_logit: the caller wants `outputs.logits` of all positions.

        Returns:
            Sums over the supervised tokens, and the model's outputs; off the path `all logits` their `logits` are only
            those that were computed.
        """
        targets = next_token_targets(inputs["labels"])
        kept = targets != IGNORE_INDEX
        weights = inputs.get("loss_weights")
        if weights is not None:
            weights = pad(weights[:, 1:], (0, 1))[kept].float()
        passed = {key: value for key, value in inputs.items() if key not in ("labels", "loss_weights")}
        passed |= self._keywords
        options: dict[str, Any] = {"weights": weights, "objective": objective, "with_entropy": self._with_entropy}
        rows = self._chunk or chunk_rows(vocabulary_rows(self.model), targets.device.type == "cpu")
        if self.path == "chunked" and not every_logit and targets.numel() > rows:
            return self._in_chunks(wrapped, passed, targets, kept, partial(score_in_chunks, **options, rows=rows))
        if self._kept_only and not every_logit:
            passed["logits_to_keep"] = kept
        outputs = wrapped(**passed)
        return score(*supervised_logits(outputs.logits, targets), **options), outputs

    def _in_chunks(
        self,
        wrapped: nn.Module,
        passed: dict[str, Any],
        targets: Tensor,
        kept: Tensor,
        scored: Callable[[nn.Module, Tensor, Tensor], Totals],
    ) -> tuple[Totals, Any]:
        head = head_of(self.model)
        found: list[Totals] = []

        def score_here(states: Tensor) -> Tensor:
            learned = states[:, -targets.shape[1] :][kept]  # prompt learning puts virtual tokens in front
            found.append(scored(head, learned, targets[kept]))
            return states[:, :0]

        with before_head(head, score_here):
            outputs = wrapped(**passed)
        (totals,) = found
        if any(hasattr(parameter, "ds_id") for parameter in head.parameters()):
            # ZeRO-3 gathers the head in the backward of its output. A rank whose batch is no larger than a chunk waits
            # for that; so here the sum of no logits, 0, leads there too.
            totals = replace(totals, loss=totals.loss + outputs.logits.sum())
        return totals, outputs


def head_of(model: nn.Module) -> nn.Module:
    """The module that projects hidden states to the vocabulary, an adapter's layer around it included.

    Raises:
        TypeError: the model names none.
    """
    head = without_adapter(model).get_output_embeddings()  # type: ignore[operator]
    if not isinstance(head, nn.Module):
        raise TypeError("it names no output embedding")
    return head


@contextmanager
def before_head(head: nn.Module, instead: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Inside the block, the head projects what `instead` makes of its input.

    A hook that is gone when the block is left, whatever ends it: the model and its forward stay as they are.
    """
    handle = head.register_forward_pre_hook(lambda _, arguments: (instead(arguments[0]), *arguments[1:]))
    try:
        yield
    finally:
        handle.remove()


@torch.no_grad()
def head_is_plain(wrapped: nn.Module, model: nn.Module) -> bool:
    """Whether the logits are what the head makes of its input, in one call and with nothing behind it.

    The input is scaled until logits reach 1,000: there no cap and no scale behind the head can hide in rounding.
    """
    head = head_of(model)
    made: list[Tensor] = []

    def amplified(states: Tensor) -> Tensor:
        states = states * (1000.0 / head.forward(states).abs().max().clamp_min(1e-6))
        made.append(head.forward(states).float())
        return states

    ids = torch.tensor([[i % vocabulary_rows(model) for i in range(1, 9)]], device=next(wrapped.parameters()).device)
    was_training = wrapped.training
    wrapped.eval()
    try:
        with before_head(head, amplified):
            logits = wrapped(input_ids=ids, **without_cache(model)).logits.float()
    finally:
        wrapped.train(was_training)
    return len(made) == 1 and made[0].shape == logits.shape and torch.allclose(logits, made[0], rtol=8e-3, atol=0.05)
