"""Mixtures of experts under ZeRO-3: a block is gathered as a whole, since ranks call different experts of it.

ZeRO-3 gathers the weights of each module when the module is called, and every rank has to take part. An expert that one
rank's tokens reach and another rank's don't is gathered by one of them alone, which waits for ever. As a "leaf" of
DeepSpeed the block gathers all of its experts at once (https://deepspeed.readthedocs.io/en/latest/zero3.html, "Leaf
modules"). DeepSpeed 0.19.8 marks three classes of transformers by itself; transformers 5 keeps most experts in one
tensor, which needs no mark; what is left is the models that bring code of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from torch import nn

logger = logging.getLogger(__name__)

_ROUTERS = ("gate", "router")


def mark_expert_blocks(model: nn.Module) -> list[str]:
    """Make DeepSpeed gather each block of experts as a whole; call it before the engine is built.

    Returns:
        Names of the classes that were marked.
    """
    blocks = list(expert_blocks(model))
    if not blocks:
        return []
    from deepspeed.utils import set_z3_leaf_module

    for block in blocks:
        set_z3_leaf_module(block, True)
    names = sorted({type(block).__name__ for block in blocks})
    logger.info("zero3: all experts of a block are gathered together (%s)", ", ".join(names))
    return names


def expert_blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Modules that choose among several modules of one kind: known by the name "expert", or by a router beside them."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, nn.ModuleList | nn.ModuleDict) and _are_experts(name, child, module):
                yield module
                break


def _are_experts(name: str, container: nn.ModuleList | nn.ModuleDict, owner: nn.Module) -> bool:
    members = list(container.children())
    if len(members) < 2 or len({type(member) for member in members}) > 1:
        return False
    named = any("expert" in word.lower() for word in (name, type(container).__name__, type(members[0]).__name__))
    return named or any(_rows(getattr(owner, router, None)) == len(members) for router in _ROUTERS)


def _rows(router: object) -> int:
    """Outputs of a linear layer, also where ZeRO-3 has taken its weight apart; 0 for anything else."""
    weight = getattr(router, "weight", None)
    shape: tuple[int, ...] = tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))
    return shape[0] if len(shape) == 2 else 0
