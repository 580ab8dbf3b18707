"""What a configuration names outside section `training`: callbacks, metrics, losses, an attention, fields of peft."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from transformers import AttentionInterface, EarlyStoppingCallback, TrainerCallback
from transformers.utils.import_utils import (
    is_flash_attn_2_available,
    is_flash_attn_3_available,
    is_kernels_available,
)

from sft_toolkit.callbacks.unfreeze import TAKEN_STOCK, UnfreezeCallback
from sft_toolkit.config import RunConfig
from sft_toolkit.engines.deepspeed_rules import value_of
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import at_home, did_you_mean
from sft_toolkit.model.loading import FLOAT16_IN_FULL
from sft_toolkit.model.source import source_of
from sft_toolkit.options import option_problems
from sft_toolkit.registry import BUILT_IN, bound, build, lookup, takes_keywords

if TYPE_CHECKING:
    from sft_toolkit.args import CallbackArguments, LoraArguments, ModelArguments, SweepArguments
    from sft_toolkit.rehearsal.draft import Draft

_DECOMPOSE = ("pissa", "olora", "loftq")
# Set by the run itself; see `run_callbacks`.
_WIRED = {"manifest": ("info", "interrupted", "finish"), "samples": ("score", "interrupted", "log")}
# In every run, named or not; the others of ours are there where they are named, as the user's are.
_ALWAYS = {"complete", "curve", "health", "interrupt", "metrics_file", "progress", "stall", *_WIRED}


def user_callbacks(config: RunConfig, problems: list[str]) -> list[TrainerCallback]:
    """The callbacks that are not in every run, built; of those that are, only the options are checked."""
    built: list[TrainerCallback] = []
    seen: set[str] = set()
    for index, entry in enumerate(config.callbacks):
        key = f"callbacks.{index}: callback '{entry.name}'"
        if entry.name not in BUILT_IN["callback"]:
            built += _built(entry, problems)
            continue
        if entry.name in seen:
            problems.append(f"{key} stands here twice; keep one of them")
        if entry.name == "samples" and not config.evaluation.generate:
            problems.append(f"{key} needs evaluation.generate, a number of held-out rows")
        seen.add(entry.name)
        found = option_problems(lookup("callback", entry.name), entry.options, _WIRED.get(entry.name, ()))
        problems += [f"{key}: {problem}" for problem in found]
        made = _built(entry, problems) if not found and entry.name not in _WIRED else []  # it may refuse a value
        built += made if entry.name not in _ALWAYS else []
    return built


def _built(entry: CallbackArguments, problems: list[str]) -> list[TrainerCallback]:
    try:
        callback = build("callback", entry.name, entry.options)
    except ConfigError as error:
        problems += [f"callbacks: {problem}" for problem in error.problems]
        return []
    if isinstance(callback, TrainerCallback):
        return [callback]
    kind = type(callback).__name__
    problems.append(f"callbacks: callback '{entry.name}' is a {kind}; expected a transformers.TrainerCallback")
    return []


def early_stopping(callbacks: Iterable[TrainerCallback], args: Draft) -> Iterator[str]:
    """What EarlyStoppingCallback asserts when training begins."""
    if not any(isinstance(callback, EarlyStoppingCallback) for callback in callbacks):
        return
    if args.eval_strategy == "no":
        yield "callbacks: EarlyStoppingCallback needs training.eval_strategy: steps or epoch, and held-out rows"
    if args.metric_for_best_model is None:
        yield "callbacks: EarlyStoppingCallback needs training.metric_for_best_model, such as loss"


def unfreezing(callbacks: Iterable[TrainerCallback], args: Draft) -> Iterator[str]:
    """Engines that the schedule of `unfreeze` would come too late for."""
    if (args.deepspeed or args.fsdp) and any(isinstance(callback, UnfreezeCallback) for callback in callbacks):
        yield f"callbacks: {TAKEN_STOCK}"


def registered(config: RunConfig) -> Iterator[str]:
    """Metrics, losses and row formats that can't be imported."""
    asked: list[tuple[str, str, str]] = [("evaluation.metrics", "metric", name) for name in config.evaluation.metrics]
    sources = [*config.data.train, *(source for group in config.data.eval.values() for source in group)]
    asked += [("data.format", "format", source.format) for source in sources if source.format != "auto"]
    for key, kind, name in dict.fromkeys(asked):
        yield from (f"{key}: {problem}" for problem in _lookup_problems(kind, name))


def _lookup_problems(kind: str, name: str) -> list[str]:
    try:
        thing = lookup(kind, name)
        if kind == "format" and callable(thing) and name not in BUILT_IN[kind]:
            bound(kind, name, places=1)
        elif kind == "metric" and not isinstance(thing, type) and not hasattr(thing, "compute") and callable(thing):
            takes_keywords(kind, name, thing, ("predictions", "references"))
    except ConfigError as error:
        return error.problems
    if callable(thing) or hasattr(thing, "compute"):
        return []
    return [f"{kind} '{name}': {thing!r} can't be called; expected a class or a function"]


def base_model(model: ModelArguments, trains_all_weights: bool) -> Iterator[str]:
    """A folder that holds no model, and weights in a dtype that can't be trained."""
    try:
        if at_home(model.name_or_path).is_dir():  # a hub id is asked for when it is needed
            source_of(model)
    except ConfigError as error:
        yield from error.problems
    if trains_all_weights and model.dtype == "float16":
        yield FLOAT16_IN_FULL


def attention(name: str) -> Iterator[str]:
    """An attention that transformers does not have, or whose package is not installed."""
    names: list[str] = AttentionInterface().valid_keys()  # type: ignore[no-untyped-call]
    known = ["auto", "eager", *(known for known in names if not known.startswith(("paged|", "sft_toolkit")))]
    if name.count("/") == 1:  # a kernel of the hub: org/name
        if not is_kernels_available():
            yield f"model.attn_implementation: '{name}' is a kernel of the hub; it needs: pip install kernels"
    elif name.startswith("paged|"):
        yield f"model.attn_implementation: '{name}' serves generation only; take {name.removeprefix('paged|')}"
    elif name not in known:
        yield f"model.attn_implementation: unknown '{name}'{did_you_mean(name, known)} (known: {', '.join(known)})"
    elif name.startswith("flash_attention") and not _flash_is_there(name):
        yield f"model.attn_implementation: {name} needs a package that is not installed: flash-attn or kernels"


def attention_on_cpu(name: str, use_cpu: bool) -> Iterator[str]:
    """An attention that has no CPU version, or none that can be differentiated."""
    if use_cpu and name.startswith(("flex_attention", "flash_attention")):
        yield f"model.attn_implementation: {name} can't train on a CPU; take sdpa or eager"


def _flash_is_there(name: str) -> bool:
    installed = {"flash_attention_2": is_flash_attn_2_available, "flash_attention_3": is_flash_attn_3_available}
    return bool(is_kernels_available() or installed.get(name, lambda: True)())


def search(sweep: SweepArguments | None, processes: int) -> Iterator[str]:
    """What a search needs beside its values."""
    if sweep is None:
        return
    if find_spec("optuna") is None:
        yield "sweep: needs Optuna, which is not installed: pip install 'sft-toolkit[sweep]'"
    if processes > 1:
        yield f"sweep: searches in one process, and {processes} were started; start train.py with python"


def adapter(lora: LoraArguments | None) -> Iterator[str]:
    """Fields of peft that contradict one another or that peft refuses."""
    if lora is None:
        return
    from sft_toolkit.lora.config import check_fields

    try:
        check_fields(lora)
    except ConfigError as error:
        yield from error.problems


def adapter_in_training(lora: LoraArguments | None, args: Draft) -> Iterator[str]:
    """Starts that take whole weights apart; an adapter that begins at a token of each row, which it does by hooks that
    see neither second forwards nor bins."""
    if lora is None:
        return
    start = str(lora.extra.get("init_lora_weights", lora.variant))
    if value_of(cast(Any, args.deepspeed) or {}, "zero_optimization.stage") == 3 and start.startswith(_DECOMPOSE):
        yield f"lora: {start} decomposes whole weights, and ZeRO-3 has spread them: use zero2, or variant: lora"
    if not lora.extra.get("alora_invocation_tokens"):
        return
    if args.activation_checkpointing:
        yield "lora.alora_invocation_tokens: needs training.activation_checkpointing: false"
    if args.packing:
        yield "lora.alora_invocation_tokens: begins once in a row, and data.packing: true puts several into one"


def idle_adapter(lora: LoraArguments | None) -> Iterator[str]:
    """Fields of peft that have no effect."""
    if lora is not None:
        from sft_toolkit.lora.fields import idle_fields

        yield from idle_fields(lora.extra)
