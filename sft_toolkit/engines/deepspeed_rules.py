"""What DeepSpeed settings must not say: values that can't work, and values that contradict the arguments.

Pure functions over the JSON and the arguments; `deepspeed_config.check_deepspeed_config` words the error.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import TrainingArguments

AUTO = "auto"
# Keys whose "auto" somebody fills: transformers' HfTrainerDeepSpeedConfig or accelerate's DeepSpeedPlugin. Everywhere
# else "auto" reaches DeepSpeed as a string and fails in the middle of train().
FILLED = {
    "": ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"],
    "bf16.": ["enabled"],
    "fp16.": ["enabled"],
    "optimizer.params.": ["lr", "betas", "eps", "weight_decay"],
    "scheduler.params.": ["warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"],
    "zero_optimization.": [
        "reduce_bucket_size",
        "stage3_prefetch_bucket_size",
        "stage3_param_persistence_threshold",
        "stage3_gather_16bit_weights_on_model_save",
    ],
}
# Under offload accelerate replaces every torch optimizer by DeepSpeed's CPU Adam (map_pytorch_optim_to_deepspeed), also
# SGD. For AdamW the replacement makes the same updates, with lr, betas, eps and weight decay kept (tested). Adagrad,
# which it means to support, ends in a TypeError (accelerate 1.15, DeepSpeed 0.19.8).
OFFLOADABLE = ("adamw_torch", "adamw_torch_fused")


def impossible(config: Mapping[str, Any], args: TrainingArguments) -> Iterator[str]:
    """Settings that no arguments could agree with, one sentence each."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, Mapping):
        yield "'zero_optimization' is missing; write {\"stage\": 2} for ZeRO-2"
        return
    stage = zero.get("stage", 0)
    if stage not in (0, 1, 2, 3):
        yield f"zero_optimization.stage: {stage!r} is none of 0, 1, 2, 3"
    filled = {prefix + key for prefix, keys in FILLED.items() for key in keys}
    for key, value in flat(config).items():
        if value == AUTO and key not in filled:
            yield f'{key}: nobody fills "auto" here; write a number or leave the key out'
    if value_of(config, "fp16.enabled") is True and value_of(config, "bf16.enabled") is True:
        yield "fp16.enabled and bf16.enabled are both true; only one precision is possible"
    if stage == 3 and zero.get("stage3_gather_16bit_weights_on_model_save") is not True:
        yield (
            "zero_optimization.stage3_gather_16bit_weights_on_model_save: without it ZeRO-3 saves no weights that load "
            "without DeepSpeed; write true (in an accelerate file: zero3_save_16bit_model: true)"
        )
    if stage != 3 and _device(config, "offload_param") != "none":
        yield f"zero_optimization.offload_param: needs stage 3, and the stage is {stage}"
    yield from _optimizer_problems(config, str(getattr(args.optim, "value", args.optim)))
    if "optimizer" in config and getattr(args, "lora_plus_ratio", None) is not None:
        yield (
            "optimizer: DeepSpeed's own has one learning rate, and training.lora_plus_ratio asks for two; take "
            "'optimizer' out of the settings, and training.optim is used"
        )


def _optimizer_problems(config: Mapping[str, Any], name: str) -> Iterator[str]:
    own = value_of(config, "optimizer.type")
    if own is not None and name not in OFFLOADABLE:
        yield f"optimizer: the JSON's '{own}' would replace training.optim: {name}; drop one of the two"
    if own is None and offloads_optimizer(config) and name not in OFFLOADABLE:
        yield f"training.optim: {name} {_NO_OFFLOAD}"


_NO_OFFLOAD = (
    "can't run under optimizer offload: accelerate would train with DeepSpeed's CPU Adam instead. Ways out: "
    "training.optim: adamw_torch (runs as the CPU Adam with the same learning rate, betas, epsilon and weight decay), "
    "offload_optimizer: false, or a JSON with an optimizer of its own"
)


def offloads_optimizer(config: Mapping[str, Any]) -> bool:
    """Whether accelerate replaces the optimizer by DeepSpeed's CPU version."""
    return _device(config, "offload_optimizer") != "none" and bool(config.get("zero_force_ds_cpu_optimizer", True))


def replaced_by_offload(optimizer: Any) -> str | None:
    """Why offload would make another algorithm of this torch optimizer; None where the CPU version does the same."""
    name = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not re.fullmatch(r"torch\.optim\.(adam\.Adam|adamw\.AdamW)", name):
        return f"optimizer: {name} {_NO_OFFLOAD}"
    changed = {option for group in optimizer.param_groups for option in ("amsgrad", "maximize") if group.get(option)}
    return f"optimizer: {name} with {' and '.join(sorted(changed))} {_NO_OFFLOAD}" if changed else None


def contradictions(config: Mapping[str, Any], args: TrainingArguments) -> Iterator[tuple[str, str, str]]:
    """Rows (key, JSON, YAML) of the values that differ; "auto" and absent keys follow the arguments."""
    for key, expected, source in _expectations(args):
        found = value_of(config, key)
        if found is not None and found != AUTO and not _equal(found, expected):
            yield key, _shown(found), f"{_shown(expected)}  ({source})"
    stage = getattr(args, "zero_stage", None)
    found_stage = value_of(config, "zero_optimization.stage")
    if stage is not None and found_stage is not None and found_stage != stage:
        yield "zero_optimization.stage", _shown(found_stage), f"{stage}  (zero_stage)"
    for name in ("offload_optimizer", "offload_param"):
        asked = getattr(args, name, False)
        device = "cpu" if asked is True else asked or "none"
        if asked and _device(config, name) != device:
            yield f"zero_optimization.{name}.device", _device(config, name), f"{device}  ({name})"


def _expectations(args: TrainingArguments) -> Iterator[tuple[str, Any, str]]:
    """(key of the JSON, value of the arguments, its name in the YAML), as transformers fills them."""
    micro, accumulation, ranks = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.world_size
    yield "train_micro_batch_size_per_gpu", micro, "training.per_device_train_batch_size"
    yield "gradient_accumulation_steps", accumulation, "training.gradient_accumulation_steps"
    yield "train_batch_size", micro * accumulation * ranks, f"{micro} rows x {accumulation} accumulated x {ranks} ranks"
    yield "gradient_clipping", args.max_grad_norm, "training.max_grad_norm"
    yield "bf16.enabled", bool(args.bf16 or args.bf16_full_eval), "training.bf16 / precision"
    yield "fp16.enabled", bool(args.fp16 or args.fp16_full_eval), "training.fp16 / precision"
    yield "optimizer.params.lr", args.learning_rate, "training.learning_rate"
    yield "optimizer.params.betas", [args.adam_beta1, args.adam_beta2], "training.adam_beta1, adam_beta2"
    yield "optimizer.params.eps", args.adam_epsilon, "training.adam_epsilon"
    yield "optimizer.params.weight_decay", args.weight_decay, "training.weight_decay"
    yield "scheduler.params.warmup_max_lr", args.learning_rate, "training.learning_rate"
    if args.warmup_steps >= 1:
        yield "scheduler.params.warmup_num_steps", args.warmup_steps, "training.warmup_steps"
    if args.max_steps > 0:
        yield "scheduler.params.total_num_steps", args.max_steps, "training.max_steps"


def value_of(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key, or None."""
    value: Any = config
    for part in key.split("."):
        if not isinstance(value, Mapping):
            return None
        value = value.get(part)
    return value


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings by dotted key: `{"bf16": {"enabled": True}}` -> `{"bf16.enabled": True}`."""
    entries: dict[str, Any] = {}
    for key, value in config.items():
        entries.update(flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value})
    return entries


def _device(config: Mapping[str, Any], offload: str) -> str:
    return value_of(config, f"zero_optimization.{offload}.device") or "none"


def _equal(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return isinstance(found, list) and len(found) == len(expected) and all(map(_equal, found, expected))
    if isinstance(expected, float) and isinstance(found, (int, float)):
        return math.isclose(found, expected, rel_tol=1e-12)
    return bool(found == expected)


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
