"""Which modules get an adapter: `auto`, `all-linear`, names or a regular expression -> what peft is given.

A name counts as peft counts it: the module's full name, or its end after a dot. Nothing is matched silently in vain.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import nn
from transformers.pytorch_utils import Conv1D

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.lora.embedding import tables

logger = logging.getLogger(__name__)

# Linear layers that choose between experts: an adapter there shifts the routing, which training must not disturb.
ROUTERS = ("gate", "router", "shared_expert_gate")
# Parts of multimodal models that text never reaches, so that an adapter there would never get a gradient.
OTHER_SENSES = ("vision", "visual", "image", "audio", "speech", "multi_modal_projector", "mm_projector", "embed_vision")


def resolve_targets(model: nn.Module, targets: str | Sequence[str], key: str = "lora.targets") -> list[str] | str:
    """What peft's `target_modules` becomes for this model.

    Args:
        targets: `auto` (every linear layer of attention and MLP: without the head, expert routers and the parts that
            only images or sound reach), `all-linear` (all but the head), module names, or a regular expression that
            is matched against whole module names.
        key: the option that error messages name.

    Returns:
        Sorted module names or name ends; a regular expression is returned as it is.

    Raises:
        ConfigError: a name or expression that matches nothing, each with the nearest names.
    """
    if targets in ("auto", "all-linear"):
        return _shortest(model, _linear(model, everything=targets == "all-linear"), key)
    names = [name for name, _ in model.named_modules() if name]
    if isinstance(targets, str):
        if not _regex(targets, names, key):
            return [targets] if _matches(targets, names) else _refuse([targets], model, key)
        return targets
    unmatched = [target for target in targets if not _matches(target, names)]
    if unmatched or not targets:
        return _refuse(unmatched, model, key)
    return list(targets)


def check_names(model: nn.Module, wanted: Iterable[str], key: str) -> None:
    """Raise ConfigError for names that match no module; peft itself ignores such entries of `modules_to_save`."""
    names = [name for name, _ in model.named_modules() if name]
    unmatched = [target for target in wanted if not _matches(target, names)]
    if unmatched:
        _refuse(unmatched, model, key)


def adapted_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that carry an adapter, by their name in the base model."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {name: module for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    # New tokens are trained by a part of the embedding that peft calls token_adapter.
    names = {n.removeprefix("base_model.model.").removesuffix(".token_adapter"): m for n, m in found.items()}
    # Each of several `target_parameters` of one module is another wrapper around it.
    return {name: module for name, module in names.items() if not name.endswith(".base_layer")}


def summary(model: nn.Module) -> str:
    """A line per kind of adapted module: last name, how many, and their shape, out x in."""
    kinds: Counter[tuple[str, str]] = Counter()
    for name, module in adapted_modules(model).items():
        shape = f"{getattr(module, 'out_features', '?')} x {getattr(module, 'in_features', '?')}"
        kinds[name.rsplit(".", 1)[-1], shape] += 1
    width = max((len(name) for name, _ in kinds), default=0)
    return "\n".join(f"  {name:<{width}}  {count:>4}  {shape}" for (name, shape), count in sorted(kinds.items()))


def left_out(model: nn.Module) -> list[str]:
    """What `auto` leaves alone on this model, a line per kind: its name and why."""
    reasons: dict[str, str] = {}
    head = list(tables(model).values())[1:]
    for name, module in model.named_modules():
        parts = name.split(".")
        if module in head:
            reasons[parts[-1]] = "the head; name it in lora.targets or lora.modules_to_save to train it"
        elif isinstance(module, nn.Linear | Conv1D) and _left_out(name):
            sense = next((part for part in parts[:-1] if any(s in part for s in OTHER_SENSES)), None)
            reasons[sense or parts[-1]] = "text never reaches it" if sense else "chooses between experts"
    for name, parameter in model.named_parameters():
        if len(getattr(parameter, "ds_shape", parameter.shape)) == 3 and not _left_out(f"{name}.x"):
            reasons[".".join(name.split(".")[-2:])] = (
                "stacked experts; name them in lora.target_parameters to train them"
            )
    width = max((len(name) for name in reasons), default=0)
    return [f"  {name:<{width}}  {why}" for name, why in reasons.items()]


def _linear(model: nn.Module, everything: bool) -> list[str]:
    head = list(tables(model).values())[1:]
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D) and module not in head and (everything or not _left_out(name))
    ]


def _left_out(name: str) -> bool:
    parts = name.split(".")
    return parts[-1] in ROUTERS or any(sense in part for part in parts[:-1] for sense in OTHER_SENSES)


def _shortest(model: nn.Module, chosen: list[str], key: str) -> list[str]:
    """Last names where they name nothing but chosen modules, else whole names."""
    if not chosen:
        raise ConfigError(f"{key}: {type(model).__name__} has no linear layers to adapt; name its modules instead")
    last_names = {name.rsplit(".", 1)[-1] for name in chosen}
    also_named = {name for name, _ in model.named_modules() if name.rsplit(".", 1)[-1] in last_names}
    return sorted(last_names if also_named == set(chosen) else chosen)


def _matches(target: str, names: Iterable[str]) -> bool:
    return any(name == target or name.endswith(f".{target}") for name in names)


def _regex(pattern: str, names: Iterable[str], key: str) -> bool:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{key}: '{pattern}' is no regular expression: {error}") from error
    return any(compiled.fullmatch(name) for name in names)


def _refuse(unmatched: Sequence[str], model: nn.Module, key: str) -> list[str]:
    known = sorted({name.rsplit(".", 1)[-1] for name, module in model.named_modules() if _can_adapt(module)})
    if not unmatched:
        raise ConfigError(f"{key} is empty; this model has {', '.join(known)}")
    raise ConfigError(
        [
            f"{key}: '{target}' matches no module{did_you_mean(target.rsplit('.', 1)[-1], known)} "
            f"(this model has {', '.join(known)})"
            for target in unmatched
        ]
    )


def _can_adapt(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Embedding | Conv1D)
