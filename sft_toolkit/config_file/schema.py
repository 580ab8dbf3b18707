"""Which keys each section takes, and of what type.

The fields of `transformers.TrainingArguments` and `peft.LoraConfig` are read from the SOURCE of the installed packages
with `ast`: a new release's options work at once, and a wrong key is reported without importing torch (importing
TrainingArguments takes 9 s, reading its source 0.1 s).
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Optional, Union, get_args, get_type_hints

from sft_toolkit.args import (
    TRAINING_LIMITS,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SweepArguments,
    TrainingExtras,
)
from sft_toolkit.errors import ConfigError

SECTION_CLASSES: dict[str, type] = {
    "model": ModelArguments,
    "data": DataArguments,
    "lora": LoraArguments,
    "distributed": DistributedArguments,
    "evaluation": EvaluationArguments,
    "sweep": SweepArguments,
}
SECTIONS = ["model", "data", "lora", "training", "distributed", "callbacks", "evaluation", "sweep"]
# The names of peft for three of our fields; both spellings are read.
LORA_ALIASES = {"lora_alpha": "alpha", "lora_dropout": "dropout", "target_modules": "targets"}
# What the toolkit itself writes into an adapter's configuration: the same value is no mistake, as it stands in every
# snippet and in every adapter_config.json; another one is refused (see `habits.NOT_HERE`).
SET_BY_US: dict[str, tuple[Any, ...]] = {
    "task_type": ("CAUSAL_LM", None),
    "peft_type": ("LORA", None),
    "inference_mode": (False,),
    "base_model_name_or_path": (None,),
    "auto_mapping": (None,),
    "peft_version": (None,),
}
# Where upstream's annotation is not what it takes: `fsdp: true` is the way to ask for it since transformers 5, and a
# wrong log level is a KeyError deep inside Trainer.
_CORRECTED: dict[str, Any] = {
    # As text, these are JSON of a command line; here they are written out.
    "activation_checkpointing_kwargs": dict[str, Any] | None,
    "gradient_checkpointing_kwargs": dict[str, Any] | None,
    "lr_scheduler_kwargs": dict[str, Any] | None,
    "fsdp": bool | str | None,
    "include_num_input_tokens_seen": bool | Literal["all", "non_padding", "no"],
    "alpha_pattern": dict[str, float] | None,
    "rank_pattern": dict[str, int] | None,
    "layer_replication": list[list[int]] | None,
    "log_level": Literal["detail", "debug", "info", "warning", "error", "critical", "passive"],
    "log_level_replica": Literal["detail", "debug", "info", "warning", "error", "critical", "passive"],
}
_BUILTINS: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "dict": dict[str, Any],
    "list": list[Any],
    "tuple": list[Any],
    "None": NoneType,
    "Any": Any,
}


@dataclass(frozen=True)
class Key:
    """One key of a section: its type as a `typing` hint and its limits (see `knobs.knob`)."""

    hint: Any
    limits: Mapping[str, Any] = field(default_factory=dict)


def keys_of(cls: type) -> dict[str, Key]:
    """The keys of one of the dataclasses in `args`, in the order of the documentation."""
    hints = get_type_hints(cls)
    return {knob.name: Key(hints[knob.name], knob.metadata) for knob in fields(cls)}


@cache
def section_keys(section: str) -> Mapping[str, Key]:
    """The keys of a section, those that come from transformers and peft included."""
    if section == "training":
        upstream = _source_fields("transformers", "training_args.py", "TrainingArguments")
        from_source = {
            name: Key(_CORRECTED.get(name, hint), TRAINING_LIMITS.get(name, {})) for name, hint in upstream.items()
        }
        return {**from_source, **keys_of(TrainingExtras)}
    if section == "lora":
        own = keys_of(LoraArguments)
        del own["extra"]
        aliases = {theirs: own[ours] for theirs, ours in LORA_ALIASES.items()}
        upstream = _source_fields("peft", "tuners/lora/config.py", "LoraConfig")
        return {**{name: Key(_CORRECTED.get(name, hint)) for name, hint in upstream.items()}, **aliases, **own}
    return keys_of(SECTION_CLASSES[section]) if section in SECTION_CLASSES else {}


def _source_fields(package: str, file: str, cls: str) -> dict[str, Any]:
    """Field name -> type of a dataclass in an installed package, read without importing it."""
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"the package {package} is not installed; run: pip install {package}")
    path = Path(spec.submodule_search_locations[0]) / file
    body = _class_bodies(path)
    if cls not in body:
        raise ConfigError(f"the installed {package} has no {cls} in {file}; this release of {package} is not supported")
    names = _names_in(path)
    return {
        line.target.id: _hint(line.annotation, names)
        for line in body[cls].body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
    }


@cache
def _module(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def _class_bodies(path: Path) -> dict[str, ast.ClassDef]:
    return {node.name: node for node in _module(path).body if isinstance(node, ast.ClassDef)}


def _names_in(path: Path) -> dict[str, Any]:
    """What the annotations of a module refer to: the builtins, and its enums as the literals of their values."""
    classes = _class_bodies(path)
    for node in _module(path).body:
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module:
            neighbour = path.parent / f"{node.module.replace('.', '/')}.py"
            wanted = {alias.name for alias in node.names if alias.name[:1].isupper()}
            if wanted and neighbour.is_file():
                classes |= {name: found for name, found in _class_bodies(neighbour).items() if name in wanted}
    values = {name: _enum_values(node) for name, node in classes.items()}
    return {**_BUILTINS, **{name: Literal[tuple(found)] for name, found in values.items() if found}}


def _enum_values(node: ast.ClassDef) -> list[str]:
    if not any("Enum" in ast.unparse(base) for base in node.bases):
        return []
    assigned = [line.value for line in node.body if isinstance(line, ast.Assign)]
    return [value.value for value in assigned if isinstance(value, ast.Constant) and isinstance(value.value, str)]


def _hint(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """An annotation as a `typing` hint; a class that isn't known here is written as a mapping."""
    if isinstance(node, ast.Constant):
        return NoneType if node.value is None else _hint(ast.parse(str(node.value), mode="eval").body, names)
    if isinstance(node, ast.BinOp):
        return _union([_hint(node.left, names), _hint(node.right, names)])
    if isinstance(node, ast.Subscript):
        return _generic(node, names)
    return names.get(ast.unparse(node).rpartition(".")[2], dict[str, Any])


def _generic(node: ast.Subscript, names: Mapping[str, Any]) -> Any:
    inner = list(node.slice.elts) if isinstance(node.slice, ast.Tuple) else [node.slice]
    kind = ast.unparse(node.value).rpartition(".")[2]
    if kind == "Literal":
        values = [ast.literal_eval(value) for value in inner]
        # 'pissa_niter_[number of iters]' documents a pattern, it is no value.
        return str if any("[" in str(value) for value in values) else Literal[tuple(values)]
    if kind == "Optional":
        return Optional[_hint(inner[0], names)]  # noqa: UP045  (the operand is a value here)
    if kind == "Union":
        return _union([_hint(member, names) for member in inner])
    if kind in ("list", "List", "set", "Sequence"):
        return list[_hint(inner[0], names)]  # type: ignore[misc]
    if kind in ("dict", "Dict", "Mapping"):
        return dict[str, _hint(inner[1], names)]  # type: ignore[misc]
    return names.get(kind, dict[str, Any])


def _union(found: list[Any]) -> Any:
    """The union; text beside an enum's values is dropped: transformers turns that text into the enum, or fails."""
    has_choices = any(str in map(type, get_args(hint)) for hint in found)
    kept = [hint for hint in found if not (has_choices and hint is str)]
    return Union[tuple(kept)]  # noqa: UP007  (the members are values here)
