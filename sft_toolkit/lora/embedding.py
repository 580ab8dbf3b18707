"""The embedding table and the head: their names, whether they share a weight, and the rows an adapter expects."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from peft import PeftConfig
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

logger = logging.getLogger(__name__)

OUT_OF_REACH = "under ZeRO-3, peft trains single rows of a table on CUDA devices only"


def tables(model: nn.Module) -> dict[str, Any]:
    """Input embedding and head by module name, in this order; empty for a model that is not of transformers."""
    if not isinstance(model, PreTrainedModel):
        return {}
    base: Any = model
    layers = [base.get_input_embeddings(), base.get_output_embeddings()]
    named = {id(module): name for name, module in model.named_modules()}
    return {named[id(layer)]: layer for layer in layers if layer is not None}


def is_tied(model: nn.Module) -> bool:
    """Whether the head uses the embedding's own weight."""
    return len({id(layer.weight) for layer in tables(model).values()}) < len(tables(model))


def rows_are_out_of_reach() -> bool:
    """Whether peft can't train single rows here: `TrainableTokensLayer._collect_token_weights` (0.21) asks for CUDA."""
    return bool(is_deepspeed_zero3_enabled()) and not torch.cuda.is_available()  # type: ignore[no-untyped-call]


def table_rows(model: PreTrainedModel) -> int:
    """Rows of the input embedding, also where ZeRO-3 has taken it apart."""
    weight: Any = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def names_a_table(model: nn.Module) -> Callable[[str], bool]:
    """Tells whether a tensor of a saved adapter is a whole embedding or head of this model."""
    names = "|".join(map(re.escape, tables(model))) or "$^"
    whole = re.compile(rf"\.({names})(\.base_layer|\.modules_to_save)?\.weight")
    return lambda tensor: whole.search(tensor) is not None


def grow_table(model: nn.Module, config: PeftConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Give the embedding the rows that a saved adapter was trained with, where it holds a longer table or new tokens.

    The new rows start random here and are overwritten by what the adapter holds for them.

    Args:
        shapes: of the adapter's saved tensors, by name.
    """
    if not isinstance(model, PreTrainedModel):
        return
    rows, in_table = table_rows(model), names_a_table(model)
    saved = [shape[0] for name, shape in shapes.items() if in_table(name)]
    wanted = max([rows, *saved, *(i + 1 for i in _token_indices(config))])
    if wanted > rows:
        model.resize_token_embeddings(wanted)
        logger.info("the embedding grew from %d to %d rows, as the adapter has them", rows, wanted)


def _token_indices(config: PeftConfig) -> list[int]:
    indices = getattr(config, "trainable_token_indices", None) or []
    return [i for ids in indices.values() for i in ids] if isinstance(indices, dict) else list(indices)
