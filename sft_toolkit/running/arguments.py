"""The sections of a configuration -> SFTArguments, and back to the section `training` in full."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from accelerate.parallelism_config import ParallelismConfig
from transformers import TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig

from sft_toolkit.args import DataArguments, DistributedArguments, PreparationArguments, TrainingExtras, field_names
from sft_toolkit.engines.deepspeed_config import choose_deepspeed_config, read_deepspeed_config
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing
from sft_toolkit.options import option_problems
from sft_toolkit.training_args import SFTArguments

_TRUE = ("1", "true", "yes", "on", "y", "t")


def arguments_from(
    training: dict[str, Any],
    data: DataArguments,
    distributed: DistributedArguments,
    kind: type[SFTArguments] = SFTArguments,
) -> SFTArguments:
    """The sections of a configuration as arguments; SFTArguments starts the process group, as TrainingArguments does.

    Args:
        kind: the class to build.

    Raises:
        ConfigError: what SFTArguments or TrainingArguments refuse.
    """
    values = {**training, **{name: getattr(data, name) for name in field_names(PreparationArguments)}}
    values.update(_distributed_values(training, distributed))
    if data.eval or data.val_split:
        values.setdefault("eval_strategy", "epoch")  # transformers' "no" would leave the held-out rows unread
    try:
        args = kind(**values)
    except ConfigError as error:
        raise ConfigError([f"training.{problem}" for problem in error.problems]) from error
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        # transformers speaks of command line options and of its enums: --save_strategy, SaveStrategy.STEPS.
        reason = re.sub(
            r"\w+Strategy\.([A-Z_]+)", lambda name: name[1].lower(), re.sub(r"--([a-z])", r"\1", str(error))
        )
        named = [name for name in re.findall(r"\w+", reason) if name in values]
        said = " ".join(reason.split())
        key = "training: " if not named else "training." if said.startswith(named[0]) else f"training.{named[0]}: "
        raise ConfigError(f"{key}{said}") from error
    steps = training.get("gradient_accumulation_steps", args.gradient_accumulation_steps)
    if steps != args.gradient_accumulation_steps:
        raise ConfigError(
            f"training.gradient_accumulation_steps: {steps} contradicts global_batch_size: {args.global_batch_size}, "
            f"which takes {args.gradient_accumulation_steps}; keep one of them"
        )
    return args


def _distributed_values(training: dict[str, Any], distributed: DistributedArguments) -> dict[str, Any]:
    """What section `distributed` says, in the fields of TrainingArguments."""
    values: dict[str, Any] = {}
    if distributed.backend != "auto":
        values["ddp_backend"] = distributed.backend
    settings = choose_deepspeed_config(distributed, os.environ)
    own = training.get("deepspeed")
    if settings is not None and own is not None:
        raise ConfigError(
            f"training.deepspeed contradicts distributed.strategy: {distributed.strategy}; keep one of them"
        )
    if settings is not None or own is not None:
        values["deepspeed"] = read_deepspeed_config(own) if settings is None and own is not None else settings
    if distributed.strategy == "fsdp" and os.environ.get("ACCELERATE_USE_FSDP", "").lower() not in (
        "1",
        "true",
        "yes",
        "on",
        "y",
        "t",
    ):
        values["fsdp"] = training.get("fsdp", True)
    if isinstance(training.get("parallelism_config"), dict):
        values["parallelism_config"] = _parallelism(training["parallelism_config"])
    if training.get("accelerator_config") is not None:
        try:
            values["accelerator_config"] = json_mapping(training["accelerator_config"])
        except ConfigError as error:
            raise ConfigError([f"training.accelerator_config: {problem}" for problem in error.problems]) from error
        problems = option_problems(AcceleratorConfig, values["accelerator_config"])
        if problems:
            raise ConfigError([f"training.accelerator_config: {problem}" for problem in problems])
    return values


def json_mapping(value: Mapping[str, Any] | str) -> dict[str, Any]:
    """A mapping, or that of a JSON file.

    Raises:
        ConfigError: no such file, or none that holds a mapping.
    """
    if not isinstance(value, str):
        return dict(value)
    try:
        read = json.loads(Path(value).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"'{value}': {missing(value)}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"'{value}' is no JSON file: {error}") from error
    if not isinstance(read, dict):
        raise ConfigError(f"'{value}' holds a {type(read).__name__}; expected a JSON object")
    return read


def _parallelism(options: dict[str, Any]) -> ParallelismConfig:
    problems = option_problems(ParallelismConfig, options)
    if problems:
        raise ConfigError([f"training.parallelism_config: {problem}" for problem in problems])
    try:
        return ParallelismConfig(**options)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"training.parallelism_config: {error}") from error


# Objects, and keys that another key or section decides: written back only as the user wrote them.
_AS_GIVEN = ("accelerator_config", "deepspeed", "fsdp", "fsdp_config", "parallelism_config", "ddp_backend", "do_train",
             "do_eval", "do_predict")  # fmt: skip
# `precision` says it, the new name says it, the launcher says it, a secret.
_NEVER = ("bf16", "fp16", "gradient_checkpointing", "gradient_checkpointing_kwargs", "local_rank", "hub_token")


def as_written(args: SFTArguments, training: dict[str, Any]) -> dict[str, Any]:
    """Section `training` in full, with what was chosen automatically: read again, it gives equal arguments.

    Args:
        args: the arguments that ran.
        training: the section that they were made from.
    """
    names = [*(f.name for f in fields(TrainingArguments)), *field_names(TrainingExtras)]
    left_out = {*_AS_GIVEN, *_NEVER, "resume_from_checkpoint"}
    if args.global_batch_size is not None:
        left_out.add("gradient_accumulation_steps")
    values = args.to_dict()  # type: ignore[no-untyped-call]
    written = {name: values[name] for name in names if name not in left_out}
    return {**written, **{name: training[name] for name in _AS_GIVEN if name in training}}
