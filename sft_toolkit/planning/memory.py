"""Bytes of a training by part, on each device and on each host. Pure arithmetic; every term says where it is from.

[ZeRO] Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", figure 1.
[Act]  the tensors that the autograd graph of one Llama layer keeps, counted with `saved_tensors_hooks`
       (tests/unit/planning/test_activations.py); attention keeps no square of scores (sdpa, flash).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sft_toolkit.planning.shape import ModelShape

STRATEGIES = ("none", "ddp", "zero1", "zero2", "zero3", "fsdp")
PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
# Bytes of optimizer state per trained parameter, beside an fp32 copy of the weight where the weight has 16 bits.
_STATE = {"sgd": 0, "adafactor": 0, "lion": 4, "adagrad": 4, "rmsprop": 4}
# Bytes of a quantised weight. nf4: 4 bits, 8 for the scale of 64 weights, 32 for that of 256 scales (Dettmers et al.
# 2023, "QLoRA", section 3: 0.127 bits of constants).
_QUANTISED = {"nf4": (4 + 8 / 64 + 32 / (64 * 256)) / 8, "int8": 1.0}
_LIVE_LIMIT = 10**9  # stage3_max_live_parameters of the ready files


@dataclass(frozen=True)
class Setup:
    """What is chosen for a run. Batches count rows (packed: bins) on one device, lengths tokens."""

    strategy: str = "none"
    offload_optimizer: bool = False
    offload_param: bool = False
    devices: int = 1
    devices_per_node: int = 1
    narrow: bool = True  # 16-bit arithmetic
    micro_batch: int = 1
    accumulation: int = 1
    max_length: int = 2048
    checkpointing: bool = True
    optim: str = "adamw_torch"
    loss_chunk: int = 1024
    on_cpu: bool = False
    quantize: str | None = None  # `model.quantize`

    @property
    def zero_stage(self) -> int:
        """0 without DeepSpeed."""
        return int(self.strategy[-1]) if self.strategy.startswith("zero") else 0


@dataclass(frozen=True)
class Memory:
    """Bytes by part on one device, and on one host: what is offloaded there, and what loading takes for a moment."""

    device: dict[str, int]
    host: dict[str, int] = field(default_factory=dict)
    accumulates: bool = False

    @property
    def per_device(self) -> int:
        """The peak of an update after the first.

        Gradients are freed before the forward (`zero_grad(set_to_none=True)`) and grow while the activations shrink;
        only with gradient accumulation are all of both there at once.
        """
        for_backward = self.device["activations"] + self.device["logits"]
        moving = (self.device["gradients"], for_backward)
        still = sum(self.device.values()) - sum(moving)
        return still + (sum(moving) if self.accumulates else max(moving))

    @property
    def per_host(self) -> int:
        """The larger of what loading takes and what training keeps there."""
        kept = sum(size for part, size in self.host.items() if part != "loading")
        return max(kept, self.host.get("loading", 0))


def memory_of(shape: ModelShape, setup: Setup) -> Memory:
    """Bytes that this run takes, without what the driver and the allocator take (`plan.RESERVE`)."""
    device = {
        "weights": _weights(shape, setup),
        "gradients": _gradients(shape, setup),
        "optimizer": _optimizer(shape, setup),
        "activations": activations(shape, setup),
        "logits": _logits(shape, setup),
        "buffers": _buffers(shape, setup),
    }
    host = {"loading": _loading(shape, setup)}
    ranks = setup.devices_per_node
    if setup.offload_optimizer:
        # ZeRO-Offload (Ren et al. 2021) moves each gradient to the host as it appears, into an fp32 buffer.
        host["optimizer"] = ranks * device["optimizer"]
        host["gradients"] = ranks * (4 * shape.trainable // setup.devices)
        device["optimizer"] = device["gradients"] = 0
    if setup.offload_param:
        host["weights"] = ranks * device["weights"]
        device["weights"] = 0
    return Memory(device, host, accumulates=setup.accumulation > 1)


def _wide(setup: Setup) -> int:
    return 2 if setup.narrow else 4


def _weights(shape: ModelShape, setup: Setup) -> int:
    if setup.zero_stage:
        whole = (
            _frozen(shape, setup) + _wide(setup) * shape.trainable
        )  # the engine keeps all of them in the precision of the run
        return whole // setup.devices if setup.zero_stage == 3 else whole
    whole = _frozen(shape, setup) + 4 * shape.trainable  # model.weights_dtype
    return whole // setup.devices if setup.strategy == "fsdp" else whole


def _frozen(shape: ModelShape, setup: Setup) -> int:
    """Embedding, head and norms are never quantised; norms are too few to count."""
    if setup.quantize is None:
        return _wide(setup) * shape.frozen
    quantised = max(0, shape.frozen - shape.tables)
    return int(_QUANTISED[setup.quantize] * quantised) + _wide(setup) * (shape.frozen - quantised)


def _gradients(shape: ModelShape, setup: Setup) -> int:
    size = (_wide(setup) if setup.zero_stage else 4) * shape.trainable
    return size // setup.devices if setup.zero_stage >= 2 or setup.strategy == "fsdp" else size


def _optimizer(shape: ModelShape, setup: Setup) -> int:
    name = setup.optim
    state = next((size for key, size in _STATE.items() if name.startswith(key)), 8)
    state = 2 if "8bit" in name else state
    # DeepSpeed keeps an fp32 copy of its share in either precision (stage_1_and_2.py: single_partition_of_fp32_groups).
    master = 4 if setup.zero_stage else 0
    size = (state + master) * shape.trainable
    return size // setup.devices if setup.zero_stage or setup.strategy == "fsdp" else size


def activations(shape: ModelShape, setup: Setup) -> int:
    """What the forward keeps for the backward; with checkpointing each layer's input and one layer in full [Act]."""
    tokens = setup.micro_batch * setup.max_length
    wide, pure = _wide(setup), setup.narrow and (bool(setup.zero_stage) or shape.frozen > shape.trainable)
    if not setup.narrow:
        layer, stream = 4 * (8 * shape.hidden + 2 * shape.kv_width + 4 * shape.intermediate), 4 * shape.hidden
    else:  # norms are computed in fp32; under autocast the residual stream is fp32 as well
        layer = (20 if pure else 30) * shape.hidden + 4 * shape.kv_width + 8 * shape.intermediate
        stream = (2 if pure else 4) * shape.hidden
    # The gradients of a layer's widest tensors live beside them.
    backward = wide * (2 * shape.intermediate + 2 * shape.hidden)
    if setup.checkpointing:
        return tokens * (shape.layers * stream + layer + backward)
    return tokens * (shape.layers * layer + backward)


def _logits(shape: ModelShape, setup: Setup) -> int:
    """A chunk of supervised tokens in fp32, whose logits become their own gradient; the head's gradient is apart."""
    tokens = setup.micro_batch * setup.max_length
    size = 4 * min(setup.loss_chunk, tokens) * shape.vocabulary
    return size + (4 * shape.head_trained if tokens > setup.loss_chunk else 0)


def _buffers(shape: ModelShape, setup: Setup) -> int:
    size = 0
    if setup.strategy == "ddp" and setup.devices > 1:
        size += 4 * shape.trainable  # DDP's buckets: gradient_as_bucket_view is off by default
    if setup.strategy in ("none", "ddp") and setup.narrow and shape.trainable >= shape.frozen:
        size += 2 * shape.total  # autocast keeps a 16-bit copy of each trained weight until the forward is over
    if setup.strategy == "fsdp":
        size += 2 * _wide(setup) * shape.largest  # the layer that computes and the one that is fetched
    if setup.zero_stage:
        size += 2 * _wide(setup) * shape.hidden**2  # two buckets of reduce_bucket_size
    if setup.zero_stage == 3:
        size += _wide(setup) * min(shape.total, max(_LIVE_LIMIT, shape.largest))  # gathered weights
    return size


def _loading(shape: ModelShape, setup: Setup) -> int:
    """Every rank reads the whole model, but for ZeRO-3 (zero.Init) and FSDP, where one does."""
    bytes_each = 4 if not setup.narrow or shape.trainable > shape.frozen else 2
    readers = 1 if setup.strategy in ("zero3", "fsdp") else setup.devices_per_node
    return bytes_each * shape.total * readers
