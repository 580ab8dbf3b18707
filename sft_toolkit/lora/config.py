"""Section `lora` -> `peft.LoraConfig`, and the same section held against an adapter that is continued."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from peft import LoraConfig, TaskType
from torch import nn

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.lora.checks import refuse_loftq_without_its_packages
from sft_toolkit.lora.embedding import is_tied, tables
from sft_toolkit.lora.fields import field_problems, with_settings
from sft_toolkit.lora.targets import check_names, resolve_targets

DEFAULT_RANK = 16
DEFAULT_SCALE = 2.0

VARIANTS: dict[str, dict[str, Any]] = {
    "lora": {},
    "rslora": {"use_rslora": True},
    "dora": {"use_dora": True},
    "pissa": {"init_lora_weights": "pissa"},
    "olora": {"init_lora_weights": "olora"},
    "loftq": {"init_lora_weights": "loftq"},
}
"""What each `variant` sets in peft's configuration."""

LOFTQ = {"loftq_bits": 4, "loftq_iter": 1}
"""peft's own defaults, which it only knows for a `LoftQConfig`, while a file holds a mapping."""

OURS = {"lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}
"""Fields of peft that the section spells in its own way: {theirs: ours}."""

THEIRS = {ours: theirs for theirs, ours in OURS.items()}


def to_peft(args: LoraArguments, model: nn.Module) -> LoraConfig:
    """The peft configuration of a new adapter on `model`.

    Without `alpha` the update is scaled by 2: alpha = 2 r, or 2 sqrt(r) for rslora, which divides by sqrt(r).

    Raises:
        ConfigError: names that match no module, and fields of `extra` that peft does not have or that contradict
            the section's own.
    """
    _check_extra(args)
    rank = DEFAULT_RANK if args.r is None else args.r
    rooted = VARIANTS[args.variant].get("use_rslora") or args.extra.get("use_rslora")
    alpha = DEFAULT_SCALE * (rank**0.5 if rooted else rank) if args.alpha is None else args.alpha
    check_names(model, args.modules_to_save, "lora.modules_to_save")
    values = {
        "task_type": TaskType.CAUSAL_LM if hasattr(model, "prepare_inputs_for_generation") else None,
        "r": rank,
        "lora_alpha": _whole(alpha),
        "lora_dropout": args.dropout,
        "target_modules": resolve_targets(model, args.targets),
        "modules_to_save": list(args.modules_to_save) or None,
        **_tying(args, model),
        **VARIANTS[args.variant],
        **with_settings(args.extra),
    }
    if values.get("init_lora_weights") == "loftq":
        refuse_loftq_without_its_packages()
        values["loftq_config"] = {**LOFTQ, **(args.extra.get("loftq_config") or {})}
    try:
        return LoraConfig(**values)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"lora: {error}") from error


def check_fields(args: LoraArguments) -> None:
    """What can be said of the section without a model.

    Raises:
        ConfigError: as `to_peft`, names of modules apart.
    """
    _check_extra(args)
    values: dict[str, Any] = {"task_type": TaskType.CAUSAL_LM, "target_modules": ["q_proj"]}
    values |= {"r": args.r or DEFAULT_RANK, **VARIANTS[args.variant], **with_settings(args.extra)}
    if values.get("init_lora_weights") == "loftq":
        refuse_loftq_without_its_packages()
        values["loftq_config"] = {**LOFTQ, **(args.extra.get("loftq_config") or {})}
    try:
        LoraConfig(**values)
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise ConfigError(f"lora: {error}") from error


def check_continues(args: LoraArguments, saved: LoraConfig, model: nn.Module, began: Mapping[str, Any]) -> None:
    """Raise ConfigError where the section asks for another adapter than the saved one.

    A key left at its default asks for nothing: `r: null`, `alpha: null`, `targets: auto`, `variant: lora`, an empty
    `modules_to_save`. Dropout is no part of the weights, so it may differ.

    Args:
        began: peft's settings as they were before saving made plain LoRA of the adapter; they may be asked for too.
    """
    _check_extra(args)
    asked: dict[str, tuple[Any, Any]] = {}
    if args.r is not None:
        asked["r"] = (args.r, saved.r)
    if args.alpha is not None:
        asked["alpha"] = (_whole(args.alpha), _whole(saved.lora_alpha))
    if args.modules_to_save:
        asked["modules_to_save"] = (args.modules_to_save, saved.modules_to_save or [])
    if args.targets != "auto":
        asked["targets"] = (_comparable(resolve_targets(model, args.targets)), _comparable(saved.target_modules))
    for name, value in {**VARIANTS[args.variant], **with_settings(args.extra)}.items():
        asked[name] = (value, getattr(saved, name))
    problems = [
        f"lora.{name}: asked for {wanted}, but '{args.adapter}' was saved with {held}; leave the key out to continue it"
        for name, (wanted, held) in asked.items()
        if _comparable(wanted) not in (_comparable(held), _comparable(began.get(THEIRS.get(name, name), held)))
    ]
    if problems:
        raise ConfigError(problems)


def _tying(args: LoraArguments, model: nn.Module) -> dict[str, bool]:
    """A head that shares the embedding's weight goes on sharing it when one of them is trained."""
    named = [*args.modules_to_save, *(args.targets if isinstance(args.targets, list) else [])]
    last_names = {name.rsplit(".", 1)[-1] for name in named}
    trained = any(name.rsplit(".", 1)[-1] in last_names for name in tables(model))
    supported = any(f.name == "ensure_weight_tying" for f in fields(LoraConfig))
    return {"ensure_weight_tying": True} if trained and supported and is_tied(model) else {}


def _check_extra(args: LoraArguments) -> None:
    known = {f.name for f in fields(LoraConfig)}
    problems = [f"lora.{name}: write lora.{OURS[name]} instead" for name in args.extra if name in OURS]
    for name in args.extra:
        if name not in known:
            problems.append(f"lora.{name}: unknown key{did_you_mean(name, known)}")
        elif name in VARIANTS[args.variant] and args.extra[name] != VARIANTS[args.variant][name]:
            problems.append(f"lora.{name}: {args.extra[name]} contradicts lora.variant: {args.variant}")
    problems += field_problems(args.extra)
    if problems:
        raise ConfigError(problems)


def _whole(number: float) -> float:
    """32.0 -> 32: peft's file calls alpha an integer, though any number works."""
    return int(number) if float(number).is_integer() else number


def _comparable(value: Any) -> Any:
    return sorted(value) if isinstance(value, (list, set, tuple)) else value
