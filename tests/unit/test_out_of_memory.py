"""Out of memory, however a library says it."""

from __future__ import annotations

import errno

import pytest
import torch

from sft_toolkit.phases import phase
from sft_toolkit.running.out_of_memory import before_training, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried"),
        RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
)
def test_known(error: Exception) -> None:
    assert is_out_of_memory(error)
    wrapped = ValueError("a callback gave up")
    wrapped.__cause__ = error
    assert is_out_of_memory(wrapped)


def test_a_real_one_of_the_cpu_allocator() -> None:
    with pytest.raises(RuntimeError) as failure:
        torch.empty(2**55, dtype=torch.uint8)
    assert is_out_of_memory(failure.value)


@pytest.mark.parametrize(
    "error", [RuntimeError("shape mismatch"), OSError(errno.ENOSPC, "No space left"), ValueError()]
)
def test_something_else(error: Exception) -> None:
    assert not is_out_of_memory(error)


def test_before_there_is_a_trainer() -> None:
    with pytest.raises(MemoryError) as failure, phase("loading the model"):
        raise MemoryError
    first, measured, *ways = str(before_training(failure.value)).splitlines()
    assert first == "out of memory while loading the model: MemoryError"
    assert "of host memory at most in this process" in measured
    assert [way.split(":")[0].strip() for way in ways[1:4]] == [
        "model.quantize",
        "model.dtype",
        "distributed.strategy",
    ]
