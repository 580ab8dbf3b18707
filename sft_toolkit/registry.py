"""Things that a configuration names: callbacks, metrics, row formats, samplers, losses.

A name is looked up among what `@register` recorded, what ships with the toolkit, what installed packages declare under
the entry point group `sft_toolkit.<kind>`, and last as a dotted path. Nothing is imported before it is asked for.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any, TypeVar

from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean
from sft_toolkit.options import option_problems

Registered = TypeVar("Registered")

KINDS = ("callback", "metric", "format", "sampler", "loss", "transform", "gradient_transform")
BUILT_IN: dict[str, dict[str, str]] = {
    "callback": {
        "complete": "sft_toolkit.callbacks.complete.CompleteCallback",
        "curve": "sft_toolkit.callbacks.curve.CurveCallback",
        "ema": "sft_toolkit.callbacks.ema.EmaCallback",
        "health": "sft_toolkit.callbacks.health.NonFiniteGuard",
        "interrupt": "sft_toolkit.callbacks.interrupt.InterruptCallback",
        "layers": "sft_toolkit.callbacks.layers.LayersCallback",
        "live_curve": "sft_toolkit.callbacks.live_curve.LiveCurveCallback",
        "manifest": "sft_toolkit.callbacks.manifest.ManifestCallback",
        "memory": "sft_toolkit.callbacks.memory.MemoryCallback",
        "metrics_file": "sft_toolkit.callbacks.metrics_file.MetricsFileCallback",
        "progress": "sft_toolkit.callbacks.progress.ProgressCallback",
        "samples": "sft_toolkit.callbacks.samples.SamplesCallback",
        "stall": "sft_toolkit.callbacks.stall.StallWatch",
        "unfreeze": "sft_toolkit.callbacks.unfreeze.UnfreezeCallback",
    },
    "metric": {
        "bleu": "sft_toolkit.evaluation.metrics.Bleu",
        "exact_match": "sft_toolkit.evaluation.metrics.ExactMatch",
        "json_fields": "sft_toolkit.evaluation.metrics.JsonFields",
        "json_validity": "sft_toolkit.evaluation.metrics.JsonValidity",
        "rouge_l": "sft_toolkit.evaluation.metrics.RougeL",
        "token_f1": "sft_toolkit.evaluation.metrics.TokenF1",
    },
    "format": {
        "alpaca": "sft_toolkit.data.layouts.alpaca.from_alpaca",
        "messages": "sft_toolkit.data.layouts.messages.from_messages",
        "prompt_completion": "sft_toolkit.data.layouts.plain.from_prompt_completion",
        "sharegpt": "sft_toolkit.data.layouts.sharegpt.from_sharegpt",
        "text": "sft_toolkit.data.layouts.plain.from_text",
        "tokenized": "sft_toolkit.data.layouts.tokenized.from_tokenized",
    },
    "sampler": {
        "by_length": "sft_toolkit.data.orders.ByLength",
        "curriculum": "sft_toolkit.data.orders.Curriculum",
        "sequential": "sft_toolkit.data.orders.Sequential",
        "shuffle": "sft_toolkit.data.orders.Shuffle",
        "staged": "sft_toolkit.data.staged.Staged",
    },
    "loss": {
        "dft": "sft_toolkit.loss.objectives.dft",
        "focal": "sft_toolkit.loss.objectives.focal",
        "label_smoothing": "sft_toolkit.loss.objectives.label_smoothing",
        "nll": "sft_toolkit.loss.objectives.nll",
    },
    "transform": {},
    "gradient_transform": {
        "clip_each": "sft_toolkit.training.gradient_transforms.ClipEach",
        "freeze": "sft_toolkit.training.gradient_transforms.Freeze",
        "noise": "sft_toolkit.training.gradient_transforms.Noise",
    },
}
_registered: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}


def register(kind: str, name: str) -> Callable[[Registered], Registered]:
    """Decorator that makes a class or function known by a name: `@register("metric", "bleu")`.

    Registering the same thing again (a notebook cell that is run twice) replaces it.

    Raises:
        ConfigError: an unknown kind, or a name that another object has.
    """
    _check_kind(kind)

    def record(thing: Registered) -> Registered:
        holder = _registered[kind].get(name)
        taken_by = BUILT_IN[kind].get(name) if holder is None else _path_of(holder)
        if taken_by is not None and taken_by != _path_of(thing):
            raise ConfigError(f"{kind} '{name}': the name is taken by {taken_by}; choose another one")
        _registered[kind][name] = thing
        return thing

    return record


def lookup(kind: str, name: str) -> Any:
    """The object of a name; imports it where it is not yet imported.

    Raises:
        ConfigError: nothing has this name (with the known names), or what it names can't be imported.
    """
    _check_kind(kind)
    if name in _registered[kind]:
        return _registered[kind][name]
    if name in BUILT_IN[kind]:
        return _from_path(kind, BUILT_IN[kind][name])
    plugin = _plugins(kind).get(name)
    if plugin is not None:
        return _from_plugin(kind, plugin)
    if "." in name:
        return _from_path(kind, name)
    raise ConfigError(str(unknown(kind, name)))


def known(kind: str) -> list[str]:
    """All names of a kind, sorted; dotted paths work beside them."""
    _check_kind(kind)
    return sorted({*_registered[kind], *BUILT_IN[kind], *_plugins(kind)})


def unknown(kind: str, name: str) -> str | None:
    """Why a name can't be looked up, found out without importing it; None where nothing speaks against it."""
    names = known(kind)
    if name in names:
        return None
    parts = name.split(".")
    if len(parts) == 1 or not all(part.isidentifier() for part in parts):
        listed = ", ".join(names) or "none"
        others = f"(known: {listed}; or a dotted path such as my.module.Thing)"
        return f"unknown {kind} '{name}'{did_you_mean(name, names)} {others}"
    if parts[0] != "__main__" and find_spec(parts[0]) is None:
        return _no_module(kind, name, parts[0])
    return None


def build(kind: str, name: str, options: Mapping[str, Any]) -> Any:
    """The object of a name, called with its options.

    Raises:
        ConfigError: an unknown name; an option that it does not take, that it misses, or whose value it refuses.
    """
    thing = lookup(kind, name)
    if not callable(thing):
        raise ConfigError(f"{kind} '{name}': {thing!r} can't be called; expected a class or a function")
    problems = option_problems(thing, options)
    if problems:
        raise ConfigError([f"{kind} '{name}': {problem}" for problem in problems])
    try:
        return thing(**options)
    except ConfigError:
        raise
    except Exception as error:  # whatever a constructor makes of a wrong option
        said = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{kind} '{name}': {said}") from error


def bound(kind: str, named: str | Mapping[str, Any], places: int) -> Any:
    """A function with its options filled in, or what a class makes of its options.

    Args:
        named: a name, a dotted path, or `{name: {option: value}}`.
        places: how many arguments the function gets by place when it is called; its options stand behind them.

    Raises:
        ConfigError: as `build`.
    """
    name, options = (named, {}) if isinstance(named, str) else next(iter(named.items()))
    options, thing = options or {}, lookup(kind, name)
    if inspect.isclass(thing) or not callable(thing):
        return _takes(kind, name, build(kind, name, options), places)
    problems = option_problems(thing, options, given=_by_place(thing, places))
    if problems:
        raise ConfigError([f"{kind} '{name}': {problem}" for problem in problems])
    return _takes(kind, name, partial(thing, **options) if options else thing, places)


def _by_place(thing: Callable[..., Any], places: int) -> list[str]:
    try:
        return list(inspect.signature(thing).parameters)[:places]
    except ValueError:  # some functions written in C have no signature
        return []


def takes_keywords(kind: str, name: str, thing: Callable[..., Any], keywords: Collection[str]) -> None:
    """Raise ConfigError for a thing that can't be called with these keywords and nothing else."""
    problem = _why_not(thing, (), keywords)
    if problem:
        raise ConfigError(f"{kind} '{name}': it is called with {' and '.join(keywords)}, but: {problem}")


def _takes(kind: str, name: str, thing: Any, places: int) -> Any:
    """The thing, if it can be called with so many arguments."""
    if not callable(thing):
        raise ConfigError(f"{kind} '{name}': {thing!r} can't be called; expected a function or a class that makes one")
    problem = _why_not(thing, [None] * places)
    if problem:
        counted = "1 argument" if places == 1 else f"{places} arguments"
        raise ConfigError(f"{kind} '{name}': it is called with {counted}, but: {problem}")
    return thing


def _why_not(thing: Callable[..., Any], places: Collection[None], keywords: Collection[str] = ()) -> str | None:
    """Why a thing can't be called so; None where it can, or has no signature, as some functions written in C."""
    try:
        inspect.signature(thing).bind(*places, **dict.fromkeys(keywords))
    except TypeError as error:
        return str(error)
    except ValueError:
        pass
    return None


def _check_kind(kind: str) -> None:
    if kind not in KINDS:
        raise ConfigError(f"unknown kind '{kind}'{did_you_mean(kind, KINDS)} (kinds: {', '.join(KINDS)})")


def _plugins(kind: str) -> dict[str, EntryPoint]:
    return {plugin.name: plugin for plugin in entry_points(group=f"sft_toolkit.{kind}")}


def _from_plugin(kind: str, plugin: EntryPoint) -> Any:
    try:
        return plugin.load()
    except (ImportError, AttributeError) as error:
        package = plugin.dist.name if plugin.dist else "an installed package"
        raise ConfigError(f"{kind} '{plugin.name}' of {package}: {plugin.value} can't be imported: {error}") from error


def _from_path(kind: str, path: str) -> Any:
    """`package.module.Class` or `package.module.Class.method`."""
    parts = path.split(".")
    module: ModuleType | None = None
    for depth in range(len(parts) - 1, 0, -1):
        module_name = ".".join(parts[:depth])
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            # Only the module looked for may be missing; one that it imports itself is another mistake.
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise ConfigError(f"{kind} '{path}': {module_name} can't be imported: {error}") from error
            continue
        except Exception as error:  # a module of the user: anything may be wrong with it
            said = str(error) if isinstance(error, ImportError) else f"{type(error).__name__}: {error}"
            raise ConfigError(f"{kind} '{path}': {module_name} can't be imported: {said}") from error
        return _attribute(kind, path, module, parts[depth:])
    raise ConfigError(_no_module(kind, path, parts[0]))


def _attribute(kind: str, path: str, module: ModuleType, names: list[str]) -> Any:
    thing: Any = module
    for name in names:
        if not hasattr(thing, name):
            public = [candidate for candidate in dir(thing) if not candidate.startswith("_")]
            raise ConfigError(f"{kind} '{path}': {module.__name__} has no '{name}'{did_you_mean(name, public)}")
        thing = getattr(thing, name)
    return thing


def _no_module(kind: str, path: str, module: str) -> str:
    return f"{kind} '{path}': no module named '{module}'; is its folder on PYTHONPATH?"


def _path_of(thing: Any) -> str:
    return f"{getattr(thing, '__module__', '?')}.{getattr(thing, '__qualname__', repr(thing))}"
