"""What a model takes, and what lies inside its wrappers."""

from __future__ import annotations

import inspect
from typing import Any, cast

from torch import nn


def without_adapter(model: nn.Module) -> nn.Module:
    """The base model inside a peft wrapper; any other module as it is."""
    inner = getattr(model, "get_base_model", None)
    return cast(nn.Module, inner()) if inner is not None else model


def vocabulary_rows(model: nn.Module) -> int:
    """Rows of the input embedding, also where ZeRO-3 has taken it apart or peft has wrapped it."""
    weight: Any = cast(Any, without_adapter(model)).get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def forward_parameters(model: nn.Module) -> frozenset[str]:
    """Names that `model.forward` takes; looks through a peft wrapper, whose own forward takes anything."""
    return frozenset(inspect.signature(without_adapter(model).forward).parameters)


def without_cache(model: nn.Module) -> dict[str, bool]:
    """Keywords that keep `model.forward` from filling a cache: with one, attention no longer separates documents.

    Multimodal classes of transformers name no `use_cache` and hand it down to their text model among other keywords.
    """
    base = without_adapter(model)
    takes = inspect.signature(base.forward).parameters.values()
    named = any(parameter.name == "use_cache" for parameter in takes)
    handed_down = any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes)
    of_transformers = type(base).__module__.startswith("transformers.")
    return {"use_cache": False} if named or (handed_down and of_transformers) else {}
