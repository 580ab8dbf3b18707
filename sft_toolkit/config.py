"""A YAML or JSON file and the overrides of the command line -> checked arguments; and back to text.

Strict: an unknown key, a value of the wrong type, a missing file are errors that name the place and what would be
right; all are reported at once, before torch or transformers is imported. How it is read: `config_file/`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from typing import Any

import yaml

from sft_toolkit._version import __version__
from sft_toolkit.args import (
    CallbackArguments,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SweepArguments,
)
from sft_toolkit.config_file import checks, idle, search_space, sections, training_rules
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.config_file.overrides import apply_override
from sft_toolkit.config_file.tree import read_tree
from sft_toolkit.config_file.written import callbacks_as_written, lora_as_written, to_yaml
from sft_toolkit.errors import ConfigError


@dataclass
class RunConfig:
    """A whole run. `lora` is None for a full fine-tune; `training` holds what the user wrote, typed, and no defaults;
    `warnings` names keys without effect.

    Paths stand as written: relative to the working directory, `~` unexpanded.
    """

    model: ModelArguments
    data: DataArguments
    lora: LoraArguments | None
    training: dict[str, Any]
    distributed: DistributedArguments = field(default_factory=DistributedArguments)
    callbacks: list[CallbackArguments] = field(default_factory=list)
    evaluation: EvaluationArguments = field(default_factory=EvaluationArguments)
    sweep: SweepArguments | None = None
    path: str = field(default="", compare=False)
    warnings: list[str] = field(default_factory=list, compare=False)


def load_config(path: str | PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read and check a configuration.

    Args:
        path: a YAML file, or JSON where the name ends in `.json`.
        overrides: `section.key=value`, applied in order; the value is read as the field's type.

    Raises:
        ConfigError: with all problems, each as `run.yaml:12: training.learning_rat: what is wrong; what is right`.
    """
    _refuse_other_types(path, overrides)
    findings = Findings(str(path))
    tree = read_tree(str(path), findings)
    for override in overrides:
        apply_override(tree, override, findings)
    config = _read(tree, findings)
    if config.sweep is not None:
        search_space.check_sweep(config.sweep, config.data, config.training, config.evaluation, tree, _read, findings)
    findings.raise_any()
    config.warnings = findings.warnings
    return config


def _read(tree: yaml.MappingNode, findings: Findings) -> RunConfig:
    nodes = sections.split_sections(tree, findings)
    distributed = sections.read_plain(nodes.get("distributed"), "distributed", DistributedArguments, findings)
    config = RunConfig(
        model=sections.read_plain(nodes.get("model"), "model", ModelArguments, findings),
        data=sections.read_data(nodes.get("data"), findings),
        lora=sections.read_lora(nodes.get("lora"), findings),
        training=sections.read_training(nodes.get("training"), distributed, findings),
        distributed=distributed,
        callbacks=sections.read_callbacks(nodes.get("callbacks"), findings),
        evaluation=sections.read_plain(nodes.get("evaluation"), "evaluation", EvaluationArguments, findings),
        sweep=sections.read_optional(nodes.get("sweep"), "sweep", SweepArguments, findings),
        path=findings.source,
    )
    checks.check_model(config.model, findings)
    checks.check_data(config.data, findings)
    checks.check_lora(config.lora, findings)
    checks.check_training(config.training, findings)
    checks.check_what_trains(config.lora, config.training, findings)
    checks.check_distributed(config.distributed, config.training, findings)
    checks.check_held_out(config.data, config.training, config.evaluation, findings)
    checks.check_homes(config.model, config.data, config.training, config.lora, findings)
    training_rules.check_updates(config.training, findings)
    training_rules.check_loader(config.training, findings)
    training_rules.check_strategies(config.data, config.training, config.evaluation, config.callbacks, findings)
    idle.warn_of_idle_keys(
        config.model, config.data, config.lora, config.training, config.distributed, config.evaluation, findings
    )
    return config


def _refuse_other_types(path: Any, overrides: Any) -> None:
    """What a call from Python may hand over: a mapping for the file, one text for the list of overrides."""
    problems = []
    if not isinstance(path, (str, PathLike)):
        problems.append(f"the configuration is a {type(path).__name__}; expected the path of a YAML or JSON file")
    if isinstance(overrides, Mapping):
        shown = ", ".join(f"'{key}={value}'" for key, value in overrides.items())
        problems.append(f"overrides are a mapping; expected a list: [{shown}]")
    elif isinstance(overrides, str) or not isinstance(overrides, Sequence):
        problems.append(f"overrides are {overrides!r}; expected a list, such as ['training.max_steps=10']")
    elif any(not isinstance(override, str) for override in overrides):
        problems.append(f"overrides are {list(overrides)!r}; each is a text: section.key=value")
    if problems:
        raise ConfigError(problems)


def resolved_yaml(config: RunConfig, training: Mapping[str, Any] | None = None) -> str:
    """The full configuration as YAML: loading it again gives an equal RunConfig (a hub token apart, which is left out).

    Args:
        config: what was loaded.
        training: the training section that really ran (`training_args.as_written`), instead of what the user wrote.
    """
    ran = dict(config.training if training is None else training)
    ran.pop("hub_token", None)
    document = {
        "model": asdict(config.model),
        "data": asdict(config.data),
        "lora": lora_as_written(config.lora),
        "training": ran,
        "distributed": asdict(config.distributed),
        "callbacks": callbacks_as_written(config.callbacks),
        "evaluation": asdict(config.evaluation),
    }
    if config.sweep is not None:
        document["sweep"] = asdict(config.sweep)
    header = f"# The whole run, written by sft_toolkit {__version__}. Running this file again is the same run.\n"
    return header + to_yaml(document)
