"""The parts of a training that section `training` describes, each built on one parameter: what fails names its key."""

from __future__ import annotations

import copy
import importlib.util
import inspect
import os
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import DynamoBackend
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    get_available_reporting_integrations,
)
from transformers.optimization import TYPE_TO_SCHEDULER_FUNCTION, get_scheduler
from transformers.utils.import_utils import is_liger_kernel_available, is_torch_tf32_available, is_torch_xla_available

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.options import option_problems
from sft_toolkit.rehearsal import engine
from sft_toolkit.rehearsal.mappings import mapping_problems

if TYPE_CHECKING:
    from sft_toolkit.rehearsal.draft import Draft

_LOW_RANK = ("galore", "apollo")
_GIVEN_BY_TRAINER = ("optimizer", "num_warmup_steps", "num_training_steps", "last_epoch")
# transformers calls these without options (transformers.optimization.get_scheduler).
_WITHOUT_OPTIONS = ("constant", "constant_with_warmup")
_STEPS_TRIED = 50
_OF_COMPUTE_METRICS = (
    "include_for_metrics", "batch_eval_metrics", "eval_accumulation_steps", "eval_use_gather_object",
    "eval_do_concat_batches",
)  # fmt: skip
# What DeepSpeed settings with such an entry take the place of; another `optim` is refused (`deepspeed_rules`).
_INSTEAD = {
    "optimizer": ("optim_args", "optim_target_modules"),
    "scheduler": ("lr_scheduler_type", "lr_scheduler_kwargs"),
}
# Tracker -> package and module, where its own name is neither.
_PACKAGES = {
    "azure_ml": ("azureml-sdk", "azureml"),
    "comet_ml": ("comet-ml", "comet_ml"),
    "flyte": ("flytekit", "flytekit"),
}


def training_problems(args: Draft, written: Mapping[str, Any]) -> Iterator[str]:
    """Everything in section `training` that Trainer would fail on, with the key that the user wrote."""
    yield from _optimizer(args)
    yield from _schedule(args)
    yield from _trackers(args, written)
    yield from _compiler(args)
    yield from _kernels(args)
    yield from _loss(args)
    yield from mapping_problems(args, written)
    yield from (f"DeepSpeed settings: {problem}" for problem in engine.key_problems(cast(Any, args.deepspeed) or {}))
    yield from _ours(args)
    yield from _hub(args)


def without_effect(args: Draft, written: Mapping[str, Any]) -> Iterator[str]:
    """Keys that the user wrote and nothing reads."""
    optimizer, schedule = _name(args.optim), _name(args.lr_scheduler_type)
    for item in (args.optim_args or "").replace(" ", "").split(","):
        if item.count("=") == 1 and not _is_read(item, args):
            yield f"training.optim_args: {item.partition('=')[0]} has no effect: optim: {optimizer} does not read it"
    if args.optim_target_modules and not optimizer.startswith(_LOW_RANK):
        yield f"training.optim_target_modules: has no effect with optim: {optimizer}"
    if schedule == "constant" and written.get("warmup_steps"):
        yield "training.warmup_steps: has no effect with lr_scheduler_type: constant; take constant_with_warmup"
    if written.get("liger_kernel_config") and not args.use_liger_kernel:
        yield "training.liger_kernel_config: has no effect without use_liger_kernel: true"
    if not args.push_to_hub:
        for name in ("hub_model_id", "hub_token", "hub_private_repo", "hub_revision"):
            if written.get(name) is not None:
                yield f"training.{name}: has no effect without push_to_hub: true"
    settings = cast(Mapping[str, Any], args.deepspeed or {})
    yield from (f"DeepSpeed settings: {key}" for key in engine.unread_keys(settings))
    for part, names in _INSTEAD.items():
        for name in names if part in settings else ():
            if written.get(name) not in (None, {}, _name(TrainingArguments.__dataclass_fields__[name].default)):
                yield f"training.{name}: has no effect: the DeepSpeed settings have '{part}'"
    for name in _OF_COMPUTE_METRICS:
        if written.get(name) not in (None, [], TrainingArguments.__dataclass_fields__[name].default):
            yield f"training.{name}: has no effect: it is for compute_metrics, which Trainer takes in Python"
    if written.get("length_column_name", "length") != "length":
        yield "training.length_column_name: has no effect: lengths are those of the tokens; see data.sampler: by_length"
    for name in ("activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"):
        if written.get(name) and not args.activation_checkpointing:
            yield f"training.{name}: has no effect without activation_checkpointing: true"
    if written.get("fsdp_config") and not args.fsdp:
        yield "training.fsdp_config: has no effect without fsdp: true"


def _optimizer(args: Any) -> Iterator[str]:
    tried = copy.copy(args)
    if args.optim.value.startswith(_LOW_RANK):
        if args.optim_target_modules is None:
            yield f"training.optim_target_modules: required by optim: {args.optim.value}, for example all-linear"
        tried.optim_target_modules = "all-linear"  # whether names match is for the real model to say
    key = "training.optim"
    if args.optim_args is not None:
        wrong = [item for item in args.optim_args.replace(" ", "").split(",") if item.count("=") != 1]
        if wrong:
            yield f"training.optim_args: expected name=value, several with commas between, not '{wrong[0]}'"
            tried.optim_args = None
        elif args.optim_args:
            key = "training.optim_args"
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    try:
        made, options = Trainer.get_optimizer_cls_and_kwargs(tried, model)
        # Others may refuse a parameter on the CPU.
        if isinstance(made, type) and made.__module__.startswith(("torch.optim", "transformers.")):
            options = {name: value for name, value in options.items() if name not in ("params", "model")}
            made([{"params": list(model.parameters()), "weight_decay": args.weight_decay}], **options)
    except Exception as error:
        yield f"{key if _fails_without_options(tried, model) is None else 'training.optim'}: {_said(error)}"


def _fails_without_options(args: Any, model: Any) -> Exception | None:
    plain = copy.copy(args)
    plain.optim_args = None
    try:
        Trainer.get_optimizer_cls_and_kwargs(plain, model)
    except Exception as error:
        return error
    return None


def _is_read(item: str, args: Any) -> bool:
    """Whether an entry of `optim_args` changes how the optimizer is made, with its value or, where that is the default,
    with another."""
    name, _, value = item.partition("=")
    try:
        other = str(float(value) + 1) if "." in value or "e" in value.lower() else str(int(value) + 1)
    except ValueError:
        other = {"true": "False", "false": "True"}.get(value.lower(), f"{value}x")
    model: Any = nn.Sequential(nn.Linear(2, 2, bias=False))
    made = []
    for optim_args in (item, f"{name}={other}", None):
        tried = copy.copy(args)
        tried.optim_args = optim_args
        try:
            made.append(repr(Trainer.get_optimizer_cls_and_kwargs(tried, model)[1]))
        except Exception:  # it was read, if only to be refused
            return True
    return len(set(made)) > 1


def _schedule(args: Any) -> Iterator[str]:
    name, options = args.lr_scheduler_type.value, args.lr_scheduler_kwargs or {}
    if name in _WITHOUT_OPTIONS:
        yield from (f"training.lr_scheduler_kwargs: unknown option '{o}'; {name} takes no options" for o in options)
        return
    function: Callable[..., Any] = cast(Any, TYPE_TO_SCHEDULER_FUNCTION)[args.lr_scheduler_type]
    takes = inspect.signature(function).parameters
    found = option_problems(function, options, given=_GIVEN_BY_TRAINER) if "kwargs" not in takes else []
    if found:
        yield from (f"training.lr_scheduler_kwargs: {name}: {problem}" for problem in found)
        return
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=args.learning_rate)
    steps = args.max_steps if args.max_steps > 0 else 1000
    try:
        schedule = get_scheduler(name, optimizer, args.get_warmup_steps(steps), steps, options)
        for _ in range(min(steps, _STEPS_TRIED)):
            optimizer.step()
            schedule.step(*([1.0] if name in ("reduce_lr_on_plateau", "greedy") else []))
    except Exception as error:
        yield f"training.lr_scheduler_kwargs: {name}: {_said(error)}"


def _trackers(args: Any, written: Mapping[str, Any]) -> Iterator[str]:
    asked = written.get("report_to") or []
    for name in [asked] if isinstance(asked, str) else asked:
        if name in ("all", "none") or name in get_available_reporting_integrations():  # type: ignore[no-untyped-call]
            continue
        if name not in INTEGRATION_TO_CALLBACK:
            hint = did_you_mean(name, INTEGRATION_TO_CALLBACK)
            listed = ", ".join(["all", "none", *INTEGRATION_TO_CALLBACK])
            yield f"training.report_to: unknown tracker '{name}'{hint} (known: {listed})"
            continue
        package, module = _PACKAGES.get(name, (name, name))
        if importlib.util.find_spec(module) is None:
            yield f"training.report_to: {name} needs a package that is not installed: pip install {package}"


def _compiler(args: Any) -> Iterator[str]:
    if not args.torch_compile:
        return
    # accelerate knows some of torch's backends only, and the others by an enum.
    accepted = {backend.value.lower() for backend in DynamoBackend}
    known = [name for name in torch.compiler.list_backends(exclude_tags=()) if name in accepted]
    if args.torch_compile_backend not in known:
        hint = did_you_mean(str(args.torch_compile_backend), known)
        yield f"training.torch_compile_backend: '{args.torch_compile_backend}' is none of {', '.join(known)}{hint}"
        return
    try:
        torch.compile(nn.Linear(1, 1), backend=args.torch_compile_backend or "inductor", mode=args.torch_compile_mode)
    except Exception as error:
        yield f"training.torch_compile_mode: {_said(error)}"


def _kernels(args: Any) -> Iterator[str]:
    if args.tf32 and not is_torch_tf32_available():
        yield "training.tf32: needs a GPU that has it (Ampere or newer)"
    if "tpu_metrics_debug" in args.debug and not is_torch_xla_available():
        yield "training.debug: tpu_metrics_debug needs torch_xla"
    if args.use_liger_kernel and not is_liger_kernel_available():
        yield "training.use_liger_kernel: needs a package that is not installed: pip install liger-kernel"


def _loss(args: Any) -> Iterator[str]:
    """Three tokens of a vocabulary of five through the objective: what it returns must be a loss per token."""
    from sft_toolkit.loss.objectives import resolve_objective

    try:
        objective = resolve_objective(args.loss, args.label_smoothing_factor)
    except ConfigError as error:
        yield from (f"training.{problem}" for problem in error.problems)
        return
    if objective is None:
        return
    logits, targets = torch.zeros(3, 5, requires_grad=True), torch.zeros(3, dtype=torch.long)
    try:
        losses = objective(logits, targets, None)
    except Exception as error:  # a function of the user: anything may be wrong with it
        yield f"training.loss: '{args.loss}' fails as a function of (logits, targets, weights): {_said(error)}"
        return
    if not isinstance(losses, torch.Tensor) or losses.shape != targets.shape or not losses.requires_grad:
        found = f"{type(losses).__name__} {tuple(getattr(losses, 'shape', ()))}".rstrip("() ")
        yield (
            f"training.loss: '{args.loss}' must return a loss per token, differentiable in the logits: for 3 tokens "
            f"a tensor of shape (3,), not {found}"
        )


def _ours(args: Any) -> Iterator[str]:
    from sft_toolkit.training.gradients import gradient_transform_of
    from sft_toolkit.training.intake import refuse_unsupported
    from sft_toolkit.training.saving_behind import async_save_problems

    yield from (f"training.{problem}" for problem in async_save_problems(args))
    if args.label_names is not None and "labels" not in args.label_names:
        yield "training.label_names: prepared rows have their labels in 'labels'; leave it out"
    try:
        gradient_transform_of(args.gradient_transform)
        refuse_unsupported(args)
    except ConfigError as error:
        yield from (f"training.{problem}" for problem in error.problems)


def _hub(args: Any) -> Iterator[str]:
    if not args.push_to_hub:
        return
    from huggingface_hub import constants, get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE or os.environ.get("TRANSFORMERS_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        yield "training.push_to_hub: true, but HF_HUB_OFFLINE forbids the hub; take one of them out"
    if not args.hub_token and get_token() is None:
        yield "training.push_to_hub: needs a token: run `hf auth login`, or set HF_TOKEN"
    try:
        validate_repo_id(args.hub_model_id or os.path.basename(os.path.abspath(args.output_dir or "")))
    except HFValidationError as error:
        yield f"training.hub_model_id: {_said(error)}"


def _name(choice: Any) -> str:
    """TrainingArguments turns the text of a choice into an enum."""
    return str(getattr(choice, "value", choice))


def _said(error: Exception) -> str:
    """What an exception says, on one line; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__
