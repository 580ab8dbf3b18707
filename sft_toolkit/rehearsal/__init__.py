"""A run tried before it starts: everything that needs neither data nor model, so that no mistake waits for them.

Trainer builds its optimizer, scheduler, trackers and callbacks when the model is loaded and the data is tokenised. Here
each is built beforehand, on one parameter, without a device, a process group or a variable of the environment, and what
fails is reported with its key, all at once. `check` and every run begin with it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

from transformers import TrainerCallback

from sft_toolkit.config import RunConfig
from sft_toolkit.engines.environment import environment_kept
from sft_toolkit.errors import ConfigError
from sft_toolkit.model.loading import quantisation_problems
from sft_toolkit.rehearsal import names, parts
from sft_toolkit.rehearsal.draft import Draft
from sft_toolkit.running.arguments import arguments_from

logger = logging.getLogger(__name__)


@dataclass
class Rehearsal:
    """What was built on the way and needs no second time.

    Attributes:
        args: the arguments as they will be, on no device.
        callbacks: those of the user, in the order of the configuration.
    """

    args: Draft
    callbacks: list[TrainerCallback] = field(default_factory=list)


def rehearse(config: RunConfig) -> Rehearsal:
    """Try the run.

    Raises:
        ConfigError: everything that is wrong, each with its key.
    """
    with environment_kept():  # the first optimizer of a process imports torch's compiler, which sets a variable
        return _rehearsed(config)


def _rehearsed(config: RunConfig) -> Rehearsal:
    problems: list[str] = []
    callbacks = names.user_callbacks(config, problems)
    problems += names.registered(config)
    problems += names.attention(config.model.attn_implementation)
    problems += names.adapter(config.lora)
    problems += names.search(config.sweep, int(os.environ.get("WORLD_SIZE", "1")))
    problems += quantisation_problems(config.model, config.lora is None)
    problems += names.base_model(config.model, config.lora is None)
    args = _draft(config, problems)
    if args is not None:
        problems += parts.training_problems(args, config.training)
        problems += names.early_stopping(callbacks, args)
        problems += names.unfreezing(callbacks, args)
        problems += names.attention_on_cpu(config.model.attn_implementation, args.use_cpu)
        problems += names.adapter_in_training(config.lora, args)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    assert args is not None
    for warning in (*parts.without_effect(args, config.training), *names.idle_adapter(config.lora)):
        logger.warning("%s", warning)
    return Rehearsal(args, callbacks)


def _draft(config: RunConfig, problems: list[str]) -> Draft | None:
    try:
        return cast(Draft, arguments_from(config.training, config.data, config.distributed, Draft))
    except ConfigError as error:
        problems += error.problems
        return None


def together(*checks: Callable[[], Any]) -> Any:
    """Run all checks, where the first one that raises would hide the others; what the last one returns.

    Raises:
        ConfigError: the problems of all.
    """
    problems: list[str] = []
    results = [_collected(check, problems) for check in checks]
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return results[-1]


def _collected(check: Callable[[], Any], problems: list[str]) -> Any:
    try:
        return check()
    except ConfigError as error:
        problems += error.problems
        return None
