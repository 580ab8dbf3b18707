"""One rank of a small all-reduce: `torchrun --nproc-per-node N -m sft_toolkit.doctor.all_reduce`, on any machines.

The first rank prints one JSON object. Bandwidth is that of the algorithm: bytes of the tensor times 2 (n - 1) / n,
which a ring moves over each link (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

MEBIBYTES, ROUNDS = 16, 5


def main() -> None:
    """Join the group of the launcher, add up a tensor, leave."""
    import torch
    from torch import distributed

    on_cuda = torch.cuda.is_available() and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    backend = "nccl" if on_cuda else "gloo"
    distributed.init_process_group(backend, timeout=timedelta(seconds=30))
    tensor = torch.ones(MEBIBYTES * 2**18, device=device)
    distributed.all_reduce(tensor)  # the first one connects
    if float(tensor[0]) != distributed.get_world_size():
        raise RuntimeError(f"the sum of {distributed.get_world_size()} ones is {float(tensor[0])}")
    _wait(device)
    started = time.perf_counter()
    for _ in range(ROUNDS):
        distributed.all_reduce(tensor)
    _wait(device)
    seconds = (time.perf_counter() - started) / ROUNDS
    ranks = distributed.get_world_size()
    moved = tensor.numel() * 4 * 2 * (ranks - 1) / ranks
    if distributed.get_rank() == 0:
        found = {"ranks": ranks, "backend": backend, "mebibytes": MEBIBYTES, "gigabytes": moved / seconds / 1e9}
        sys.stdout.write(json.dumps(found) + "\n")
    distributed.destroy_process_group()


def _wait(device: object) -> None:
    import torch

    if getattr(device, "type", "") == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
