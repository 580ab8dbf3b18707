"""What is checked of a run before its model is loaded: the start, the configuration, the held-out answers."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from sft_toolkit.config import RunConfig
from sft_toolkit.engines.deepspeed_config import check_settings_in_use
from sft_toolkit.engines.distributed import asked_by, check_launch, check_section, start_problems
from sft_toolkit.errors import ConfigError

if TYPE_CHECKING:
    from sft_toolkit.data.prepare import Prepared
    from sft_toolkit.rehearsal import Rehearsal
    from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


def refuse_start(config: RunConfig) -> None:
    """`check_launch`; where it finds something, everything else that is wrong is told with it."""
    try:
        check_launch(config.distributed, os.environ)
    except ConfigError as error:
        try:
            check_run(config)
        except ConfigError as others:
            raise ConfigError(list(dict.fromkeys([*error.problems, *others.problems]))) from error
        raise


def check_run(config: RunConfig) -> Rehearsal:
    """Everything that can be found without data and model, all at once; what was built for it is kept."""
    from sft_toolkit.data.prepare import check_options  # seconds of imports, not owed to a typo
    from sft_toolkit.data.streaming import check_stream
    from sft_toolkit.rehearsal import rehearse, together

    rehearsal: Rehearsal = together(
        lambda: check_section(config.distributed, os.environ),
        lambda: check_options(config.data),
        lambda: rehearse(config),
    )
    check_stream(rehearsal.args, config.data.streaming)
    given = "training.deepspeed" if config.training.get("deepspeed") else config.distributed.deepspeed
    check_settings_in_use(rehearsal.args, os.environ, given)
    for warning in config.warnings:
        logger.warning("%s", warning)
    return rehearsal


def check_start(args: SFTArguments, config: RunConfig, env: Mapping[str, str]) -> None:
    """`check_launch` knows section `distributed`; section `training` may ask for strategies and processes too."""
    from sft_toolkit.training_args import processes_started

    parallel = args.parallelism_config
    if parallel is not None and parallel.total_size not in (1, processes_started()):
        raise ConfigError(
            f"training.parallelism_config: its sizes multiply to {parallel.total_size} processes, and "
            f"{processes_started()} run"
        )
    if args.deepspeed and config.distributed.strategy == "auto" and config.distributed.deepspeed is None:
        strategy = asked_by(args).strategy
        problems = start_problems(strategy, f"training.deepspeed (strategy {strategy})", env)
        if problems:
            raise ConfigError(problems)


def check_evaluation(config: RunConfig, tokenizer: Any, prepared: Prepared) -> None:
    """The metrics can score the held-out answers; found out before a model is loaded."""
    if config.evaluation.generate:
        from sft_toolkit.evaluation.score import check_references

        check_references(tokenizer, cast(Any, next(iter(prepared.evals.values()))), config.evaluation)
