"""The DeepSpeed settings as the engine will get them, as far as they can be known without the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sft_toolkit.hints import did_you_mean, near

if TYPE_CHECKING:
    from sft_toolkit.rehearsal.draft import Draft

# Of DeepSpeed's documentation (config-json); it passes over any other key without a word.
_NAMES = """
activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
compile compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last
disable_allgather disable_python_gc dump_state eigenvalue elasticity flops_profiler fp16 gradient_accumulation_steps
gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients progressive_layer_drop
quantize_training scheduler seq_parallel_communication_data_type sparse_attention sparse_gradients steps_per_print
tensor_parallel tensorboard timers torch_autocast train_batch_size train_micro_batch_size_per_gpu
use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb weight_quantization
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
_TOP = tuple(_NAMES.split())


def resolved_settings(args: Draft) -> dict[str, Any] | None:
    """The settings with every "auto" that the arguments answer; what the model or the number of updates decides stays.

    None without DeepSpeed; the settings as they stand where DeepSpeed is not installed.
    """
    if not args.deepspeed:
        return None
    settings: dict[str, Any] = copy.deepcopy(cast(Any, args.deepspeed))
    if find_spec("deepspeed") is None:
        return settings
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    # It makes itself known to from_pretrained by a weak reference, which ends with this function.
    config = HfTrainerDeepSpeedConfig(settings)  # type: ignore[no-untyped-call]
    config.trainer_config_process(args)  # type: ignore[no-untyped-call]
    resolved: dict[str, Any] = config.config
    return resolved


def key_problems(settings: Mapping[str, Any]) -> Iterator[str]:
    """Keys of `zero_optimization` that DeepSpeed refuses when the engine starts; read from its source."""
    zero, known = settings.get("zero_optimization"), _zero_keys()
    for key in zero if isinstance(zero, Mapping) and known else ():
        if key not in known:
            yield f"zero_optimization.{key}: DeepSpeed has no such key{did_you_mean(key, known)}"


def unread_keys(settings: Mapping[str, Any]) -> Iterator[str]:
    """Keys that look like one of DeepSpeed's and are none."""
    for key in settings:
        if key not in _TOP and near(key, _TOP):
            yield f"{key}: has no effect: DeepSpeed has no such key{did_you_mean(key, _TOP)}"


def _zero_keys() -> set[str]:
    spec = find_spec("deepspeed")
    if spec is None or not spec.submodule_search_locations:
        return set()
    source = Path(spec.submodule_search_locations[0]) / "runtime" / "zero" / "config.py"
    text = source.read_text(encoding="utf-8") if source.is_file() else ""
    return {*re.findall(r"^    (\w+): ", text, re.MULTILINE), *re.findall(r'alias="(\w+)"', text)}
