"""The mappings of section `training`: upstream passes over most keys that it does not know, or passes them on.

Which keys there are is read from the installed packages: their signatures, annotations and, for `fsdp_config`, source.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any, Literal

from accelerate.utils import GradientAccumulationPlugin
from accelerate.utils.constants import FSDP_AUTO_WRAP_POLICY, FSDP_SHARDING_STRATEGY, FSDP_STATE_DICT_TYPE
from transformers import TrainingArguments
from transformers.utils.import_utils import is_liger_kernel_available

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.limits import accepts, expected
from sft_toolkit.options import option_problems
from sft_toolkit.running.arguments import json_mapping

_READ_OF_FSDP = re.compile(r"""fsdp_config(?:\.get\(|\.setdefault\(|\[)["'](\w+)["']""")
_SWITCHES_OF_FSDP = ("activation_checkpointing", "cpu_offload", "cpu_ram_efficient_loading", "forward_prefetch",
                     "limit_all_gathers", "sync_module_states", "use_orig_params", "xla", "xla_fsdp_grad_ckpt",
                     "xla_fsdp_v2")  # fmt: skip


_TYPES_OF_FSDP: dict[str, Any] = {
    "auto_wrap_policy": Literal[tuple(FSDP_AUTO_WRAP_POLICY)],
    "min_num_params": int,
    "reshard_after_forward": bool | Literal[tuple(name.lower() for name in FSDP_SHARDING_STRATEGY)],
    "state_dict_type": Literal[tuple(FSDP_STATE_DICT_TYPE)],
    "transformer_layer_cls_to_wrap": str | list[str],
    "version": Literal[1, 2],
}


def mapping_problems(args: Any, written: Mapping[str, Any]) -> Iterator[str]:
    """Keys that nobody reads and values of a wrong type.

    Args:
        args: the arguments that were made from it.
        written: the section as the user wrote it.
    """
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        yield from (f"training.{name}: {problem}" for problem in _checkpointing(written.get(name) or {}))
    yield from (f"training.fsdp_config: {problem}" for problem in _fsdp(written.get("fsdp_config") or {}))
    yield from (f"training.accelerator_config: {problem}" for problem in _accelerator(args.accelerator_config))
    yield from (f"training.liger_kernel_config: {problem}" for problem in _liger(written))


def _checkpoint(  # what Trainer takes out for the layers, and torch.utils.checkpoint.checkpoint behind it
    every_n_layers: int = 1,
    offload: bool = False,
    use_reentrant: bool = False,
    preserve_rng_state: bool = True,
    determinism_check: Literal["default", "none"] = "default",
    debug: bool = False,
    early_stop: bool = True,
) -> None:
    """The signature that a file can fill."""


def _checkpointing(options: Mapping[str, Any]) -> Iterator[str]:
    found = option_problems(_checkpoint, options)
    yield from found
    if not found and options.get("every_n_layers", 1) < 1:
        yield f"every_n_layers: {options['every_n_layers']} is below the minimum, 1"


def _fsdp(written: Mapping[str, Any] | str) -> Iterator[str]:
    try:
        options = json_mapping(written)
    except ConfigError as error:
        yield from error.problems
        return
    known = sorted({*_READ_OF_FSDP.findall(inspect.getsource(TrainingArguments)), *_SWITCHES_OF_FSDP})
    for name, value in options.items():
        key = name.removeprefix("fsdp_")
        if key not in known:
            yield f"unknown option '{name}'{did_you_mean(key, known)} (accepted: {', '.join(known)})"
        elif not accepts(hint := _TYPES_OF_FSDP.get(key, bool if key in _SWITCHES_OF_FSDP else Any), value):
            yield f"option '{name}': expected {expected(hint)}, not {value!r}"


def _accelerator(options: Any) -> Iterator[str]:
    if options.use_configured_state:
        yield "use_configured_state belongs to a program that has made its own state"
    given = options.gradient_accumulation_kwargs or {}
    if "num_steps" in given:
        yield "num_steps is training.gradient_accumulation_steps here"
        return
    for problem in option_problems(GradientAccumulationPlugin, given, given=("num_steps",)):
        yield f"gradient_accumulation_kwargs: {problem}"


def _liger(written: Mapping[str, Any]) -> Iterator[str]:
    """Liger's functions take kernels by name, and transformers leaves out those that a model's function has not."""
    if not written.get("use_liger_kernel") or not is_liger_kernel_available():
        return
    monkey_patch: Any = import_module("liger_kernel.transformers.monkey_patch")

    functions = monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN.values()
    known = sorted({name for function in functions for name in inspect.signature(function).parameters} - {"model"})
    for name in written.get("liger_kernel_config") or {}:
        if name not in known:
            yield f"unknown kernel '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})"
