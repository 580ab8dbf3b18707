"""A copy in host memory of what training goes on to change."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def in_host_memory(value: Any, is_constant: Callable[[Tensor], bool] = lambda _: False) -> Any:
    """`value` with every tensor in it copied; the same tensor at two places (tied weights) is one copy at both.

    Args:
        value: tensors in dicts, lists and tuples, such as a state dict; anything else is kept as it is.
        is_constant: tensors that nothing will change, and that are not copied.
    """
    copies: dict[Any, Tensor] = {}

    def copy(item: Any) -> Any:
        if isinstance(item, Tensor):
            if is_constant(item):
                return item
            place = _place(item)
            if place not in copies:
                copies[place] = _copied(item)
            return copies[place]
        if isinstance(item, OrderedDict):  # what state_dict() returns: other types of dict are pickled under their name
            return OrderedDict((name, copy(part)) for name, part in item.items())
        if isinstance(item, dict):
            return {name: copy(part) for name, part in item.items()}
        if isinstance(item, list | tuple):
            return type(item)(copy(part) for part in item)
        return item

    return copy(value)


def _place(tensor: Tensor) -> Any:
    """Equal for two tensors that are the same numbers in memory."""
    if tensor.numel() == 0:
        return id(tensor)
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.device


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True, memory_format=torch.preserve_format)
