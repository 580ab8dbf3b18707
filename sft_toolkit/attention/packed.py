"""Which attention packed rows are trained with: the fast one where it is proven on this model, else the model's own."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeGuard

from torch import nn
from transformers import PreTrainedModel

from sft_toolkit.attention.isolation import difference_from_parts
from sft_toolkit.attention.per_document import PER_DOCUMENT, register_per_document

logger = logging.getLogger(__name__)

TOLERANCE = {"fp32": 2e-3, "half": 5e-2}
"""Relative RMS between the logits of a packed row and of its documents alone. Rounding measures 1e-7 in fp32 (1e-3
where a GPU multiplies in TF32) and 1e-2 in bf16; a wrong mask measures 1e-1 and more."""


class PackedAttention:
    """Attention per document for the time of a training or an evaluation, proven once on the model itself.

    Only a model that runs with stock `sdpa` is switched; eager and flash attention were asked for by name. The model
    gets its own attention back afterwards, so that what is handed out, copied or pickled knows nothing of it.

    Args:
        wanted: False leaves every model alone.
    """

    def __init__(self, wanted: bool = True) -> None:
        self.wanted = wanted
        self.proven: bool | None = None  # None: not yet tried
        self.path = "as the model was loaded"
        self._about: nn.Module | None = None
        self._switched: PreTrainedModel | None = None

    def switch_on(self, wrapped: nn.Module, model: nn.Module, half: bool) -> None:
        """Attend per document from here on, if that gives the logits of the documents alone.

        Args:
            wrapped: the model as it is trained; under ZeRO-3 every rank must call this.
            model: the same model without wrapper and adapter.
            half: whether it computes in bf16 or fp16.
        """
        if model is not self._about:  # `model_init` makes a new one for each training
            self.proven, self._about = None, model
        if self._switched is not None or self.proven is False or not self.wanted or not _runs_sdpa(model):
            return
        register_per_document()
        model.set_attn_implementation(PER_DOCUMENT)
        self._switched = model
        if self.proven is None:
            self.proven = self._prove(wrapped, model, half)
            self.path = f"{PER_DOCUMENT} (proven on this model)" if self.proven else "sdpa with a dense mask"
        if not self.proven:
            self.switch_off()

    def switch_off(self) -> None:
        """Give the model back its own attention."""
        if self._switched is not None:
            self._switched.set_attn_implementation("sdpa")
            self._switched = None

    @contextmanager
    def switched_on(self, wrapped: nn.Module, model: nn.Module, half: bool) -> Iterator[None]:
        """On inside the block; stays on where it was on before."""
        was_on = self._switched is not None
        self.switch_on(wrapped, model, half)
        try:
            yield
        finally:
            if not was_on:
                self.switch_off()

    def _prove(self, wrapped: nn.Module, model: nn.Module, half: bool) -> bool:
        try:
            difference = difference_from_parts(wrapped, model)
        except Exception as error:  # whatever a model's own code makes of it: then it keeps its attention
            logger.info("packed rows: %s keeps its own attention: %s", type(model).__name__, error)
            return False
        if difference > TOLERANCE["half" if half else "fp32"]:
            logger.warning(
                "packed rows: %s keeps its own attention, with a dense mask: attending per document changed the logits "
                "of a probe by %.1e",
                type(model).__name__,
                difference,
            )
            return False
        logger.info("packed rows: attention per document (difference to separate documents %.1e)", difference)
        return True


def _runs_sdpa(model: nn.Module) -> TypeGuard[PreTrainedModel]:
    """Whether the model and all parts of it that have an attention of their own run with stock `sdpa`."""
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    can_switch = isinstance(model, PreTrainedModel) and all(part._can_set_attn_implementation() for part in parts)
    return can_switch and all(part.config._attn_implementation == "sdpa" for part in parts)
