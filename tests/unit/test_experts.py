"""Which modules are blocks of experts, whose weights ZeRO-3 has to gather together."""

from __future__ import annotations

from collections import OrderedDict

import pytest
from torch import nn

from sft_toolkit.engines.experts import expert_blocks
from tests.distributed.routed import RoutedMLP, routed_model
from tests.tiny import tiny_model


class Block(nn.Module):
    """Submodules under the names that a test gives."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def several(count: int = 4) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(3, 3) for _ in range(count))


def by_name() -> nn.ModuleDict:
    return nn.ModuleDict(OrderedDict(a=nn.Linear(3, 3), b=nn.Linear(3, 3)))


def test_experts_that_are_modules_are_found() -> None:
    assert [type(block) for block in expert_blocks(routed_model())] == [RoutedMLP, RoutedMLP]
    assert list(expert_blocks(tiny_model())) == []


@pytest.mark.parametrize(
    ("children", "found"),
    [
        ({"local_experts": several()}, True),
        ({"experts": by_name()}, True),
        ({"gate": nn.Linear(3, 4), "branches": several()}, True),
        ({"router": nn.Linear(3, 5), "branches": several()}, False),  # chooses among others
        ({"layers": several(), "head": nn.Linear(3, 4)}, False),
        ({"experts": nn.ModuleList([nn.Linear(3, 3)])}, False),
        ({"experts": nn.ModuleList([nn.Linear(3, 3), nn.ReLU()])}, False),
    ],
)
def test_a_block_is_known_by_its_names_or_its_router(children: dict[str, nn.Module], found: bool) -> None:
    block = Block(**children)
    assert list(expert_blocks(block)) == ([block] if found else [])
