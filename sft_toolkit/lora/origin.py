"""Which base an adapter was trained on: kept beside it in `base_model.json`, and compared before it is used.

An adapter of another base often fits in every shape and then answers nonsense without a word. The fingerprint is a
handful of weights per matrix, so it costs nothing at any size, and it survives another dtype and new token rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from sft_toolkit.errors import ConfigError

logger = logging.getLogger(__name__)

FILE_NAME = "base_model.json"
MATRICES, VALUES, ROWS = 32, 8, 64
"""Matrices of a model that are looked at, weights of each, and the first rows they lie in (new tokens come last)."""

SAME_FROM = 0.9
"""Share of equal weights from which two bases count as one. fp16 loses the smallest weights: 0.3 % of normal(0, 0.02).
Sister models differ in almost all: a fine-tune moves a weight by more than the 0.4 % that bf16 resolves."""


@dataclass
class Origin:
    """The base of an adapter.

    `started_from` holds what `lora` was asked for where saving had to change it (see `portable`), so that the same
    section continues the adapter. `start` are the adapter's first tensors by name; they are never written here.
    """

    name_or_path: str | None
    revision: str | None
    architecture: str
    fingerprint: dict[str, list[float]]
    started_from: dict[str, Any] = field(default_factory=dict)
    start: dict[str, torch.Tensor] | None = None


_ORIGINS: WeakKeyDictionary[nn.Module, Origin] = WeakKeyDictionary()


def of_model(model: Any) -> Origin:
    """The origin that an adapter on this bare base model has; ask before anything changes the weights."""
    config = getattr(model, "config", None)
    name, revision = getattr(model, "name_or_path", None), getattr(config, "_commit_hash", None)
    return Origin(name or None, revision, type(model).__name__, fingerprint(model))


def remember(model: nn.Module, origin: Origin) -> None:
    """Keep the origin for as long as the adapted model lives."""
    _ORIGINS[model] = origin


def recall(model: nn.Module) -> Origin | None:
    """The origin of a model that `inject` adapted, or None."""
    return _ORIGINS.get(model)


def write(origin: Origin, folder: Path) -> None:
    """Write `base_model.json` beside the adapter."""
    known = {knob.name: getattr(origin, knob.name) for knob in fields(Origin) if knob.name != "start"}
    (folder / FILE_NAME).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> Origin | None:
    """The origin of a saved adapter; None where it was saved by others, or the file can't be read."""
    try:
        return Origin(**json.loads((folder / FILE_NAME).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        logger.warning("%s can't be read (%s): the base of this adapter is not checked", folder / FILE_NAME, error)
        return None


def check_base(folder: Path, model: nn.Module, key: str, allow_other: str | None) -> None:
    """Raise ConfigError where the adapter in `folder` was trained on other weights than `model` holds.

    Args:
        key: the option that named the adapter.
        allow_other: how the user says that it is meant so; None where it was said already: then it is only logged.
    """
    saved = read(folder)
    if saved is None:
        return
    share = agreement(saved.fingerprint, fingerprint(model))
    if share is None or share >= SAME_FROM:
        return
    at = f" at revision {saved.revision}" if saved.revision else ""
    found = f"{key}: '{folder}' was trained on another base ('{saved.name_or_path}'{at}, {saved.architecture}): "
    found += f"{share:.0%} of the compared weights are the same"
    if allow_other is not None:
        raise ConfigError(f"{found}. Load that base, or say {allow_other} if this is meant")
    logger.warning("%s; used as asked", found)


def agreement(one: dict[str, list[float]], other: dict[str, list[float]]) -> float | None:
    """Share of equal weights among the matrices that both know; None where they have none in common."""
    pairs = [(a, b) for name in one.keys() & other.keys() for a, b in zip(one[name], other[name], strict=False)]
    return sum(a == b for a, b in pairs) / len(pairs) if pairs else None


@torch.no_grad()
def fingerprint(model: nn.Module) -> dict[str, list[float]]:
    """Some weights of some matrices, rounded to bf16; quantised ones are left out. Collective under ZeRO-3."""
    found = {}
    for name, parameter in _chosen(model):
        with _whole(parameter):
            head = parameter.detach()[:ROWS].flatten()
            at = torch.linspace(0, head.numel() - 1, VALUES, device=head.device).long()
            found[name] = head[at].to(torch.bfloat16).float().tolist()
    return found


def _chosen(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if len(getattr(parameter, "ds_shape", parameter.shape)) > 1 and parameter.is_floating_point()
    ]
    for number in range(min(MATRICES, len(named))):
        yield named[number * len(named) // min(MATRICES, len(named))]


def _whole(parameter: nn.Parameter) -> AbstractContextManager[Any]:
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter])
    return gathered
