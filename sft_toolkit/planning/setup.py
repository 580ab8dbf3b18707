"""What the arguments of a run decide about its memory."""

from __future__ import annotations

from typing import Any

from sft_toolkit.loss.chunked import chunk_rows
from sft_toolkit.planning.memory import Setup
from sft_toolkit.planning.shape import ModelShape


def setup_of(args: Any, shape: ModelShape, *, on_cpu: bool, precision: str, **engine: Any) -> Setup:
    """The setup of these `SFTArguments`.

    Args:
        precision: fp32, bf16 or fp16; what `training.precision` has become.
        engine: `strategy`, `devices`, `devices_per_node`, `offload_optimizer`, `offload_param`;
            `quantize`.
    """
    return Setup(
        narrow=precision != "fp32",
        micro_batch=args.per_device_train_batch_size,
        accumulation=args.gradient_accumulation_steps,
        max_length=args.max_length,
        checkpointing=bool(args.activation_checkpointing),
        optim=str(getattr(args.optim, "value", args.optim)),
        loss_chunk=args.loss_chunk or chunk_rows(max(1, shape.vocabulary), on_cpu),
        on_cpu=on_cpu,
        **engine,
    )
