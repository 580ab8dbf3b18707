"""Fields of peft that a value alone does not settle: settings of their own, starts that peft leaves to the caller."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, get_args, get_type_hints

from peft import LoraConfig

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.limits import choices, members
from sft_toolkit.options import option_problems

# Starts that need a pass over data, and the function of peft that makes it.
_FROM_DATA = {"eva": "initialize_lora_eva_weights", "corda": "preprocess_corda", "lora_ga": "preprocess_loraga"}
# Fields that do nothing by themselves, or nothing on a model that this toolkit loads.
_NOT_FROM_HERE = {
    "arrow_config": "it routes between adapters that are trained already",
    "megatron_config": "it is for the layers of Megatron",
    "use_qalora": "it is for weights in GPTQ",
}
_OWN_LOSS = ("kasa_config", "monteclora_config")


def with_settings(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of peft as written, mappings turned into the configuration classes that peft expects.

    Raises:
        ConfigError: keys that such a class does not have, or values that it refuses.
    """
    values, problems = dict(extra), []
    for name, kind in _classes().items():
        written = values.get(name)
        if not isinstance(written, Mapping):
            continue
        found = option_problems(kind, written)
        problems += [f"lora.{name}: {problem}" for problem in found]
        if found or name == "loftq_config":  # peft keeps that one as a mapping
            continue
        try:
            values[name] = kind(**written)
        except (TypeError, ValueError) as error:
            problems.append(f"lora.{name}: {error}")
    if problems:
        raise ConfigError(problems)
    return values


def field_problems(extra: Mapping[str, Any]) -> Iterator[str]:
    """Fields that this toolkit can't follow, known before there is a model."""
    start = extra.get("init_lora_weights", True)
    if start in _FROM_DATA:
        yield (
            f"lora.init_lora_weights: {start} starts from statistics of data, which peft gathers in Python only "
            f"({_FROM_DATA[start]}): pass a model that it has prepared to SFTTrainer"
        )
    elif isinstance(start, str) and start not in (known := _starts()) and not re.fullmatch(r"pissa_niter_\d+", start):
        yield f"lora.init_lora_weights: unknown '{start}'{did_you_mean(start, known)} (known: {', '.join(known)})"
    for name, reason in _NOT_FROM_HERE.items():
        if extra.get(name):
            yield f"lora.{name}: {reason}; leave it out"
    for pattern, rank in (extra.get("rank_pattern") or {}).items():
        if rank < 1:
            yield f"lora.rank_pattern: {rank} for '{pattern}' is below the minimum, 1"
    for layers in extra.get("layer_replication") or ():
        if len(layers) != 2 or not all(isinstance(n, int) for n in layers) or not 0 <= layers[0] < layers[1]:
            yield f"lora.layer_replication: expected [first, end] pairs, such as [[0, 4], [2, 5]], not {layers}"


def idle_fields(extra: Mapping[str, Any]) -> Iterator[str]:
    """Fields that have no effect beside the others."""
    start = extra.get("init_lora_weights", True)
    for name, of in (("eva_config", "eva"), ("corda_config", "corda"), ("lora_ga_config", "lora_ga")):
        if extra.get(name) is not None and start != of:
            yield f"lora.{name}: has no effect without init_lora_weights: {of}"
    for name, of in (("qalora_group_size", "use_qalora"), ("megatron_core", "megatron_config")):
        if name in extra and not extra.get(of):
            yield f"lora.{name}: has no effect without {of}"
    for name in _OWN_LOSS:
        if extra.get(name) is not None:
            yield f"lora.{name}: peft leaves its own loss to the training loop, and this one does not add it"


def _classes() -> dict[str, type]:
    """The configuration class of each field that has one."""
    hints = get_type_hints(LoraConfig)
    found = {f.name: [m for m in members(hints[f.name]) if is_dataclass(m)] for f in fields(LoraConfig)}
    return {name: kinds[0] for name, kinds in found.items() if kinds and isinstance(kinds[0], type)}


def _starts() -> list[str]:
    hint = get_type_hints(LoraConfig)["init_lora_weights"]
    named = [value for member in get_args(hint) for value in choices(member) if "[" not in str(value)]
    return [*named, "pissa_niter_N"]
