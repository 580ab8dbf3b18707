"""Keys that the user wrote and that nothing reads beside the rest of the configuration: said, not refused.

An override often switches off what a file goes on describing (`training.save_strategy=no`), so that these are warnings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sft_toolkit.args import DataArguments, DistributedArguments, EvaluationArguments, ModelArguments
from sft_toolkit.config_file.findings import Findings


def warn_of_idle_keys(
    model: ModelArguments,
    data: DataArguments,
    training: Mapping[str, Any],
    distributed: DistributedArguments,
    evaluation: EvaluationArguments,
    findings: Findings,
) -> None:
    """Add a warning for each."""
    for key, message in [
        *_model(model),
        *_sources(findings),
        *_data(data),
        *_training(training),
        *_distributed(distributed),
        *_evaluation(evaluation),
    ]:
        if findings.wrote(key):
            findings.warn(key, f"has no effect: {message}")


def _model(model: ModelArguments) -> Iterator[tuple[str, str]]:
    if Path(model.name_or_path).expanduser().is_dir():
        yield "model.revision", "model.name_or_path is a local folder"


def _sources(findings: Findings) -> Iterator[tuple[str, str]]:
    for key, source in findings.sources.items():
        if Path(source).expanduser().exists() or any(sign in source for sign in "*?["):
            for name in ("split", "subset", "revision"):
                yield f"{key}.{name}", "that is for hub data sets, and the path is local"


def _data(data: DataArguments) -> Iterator[tuple[str, str]]:
    if data.mixing != "interleave":
        yield "data.stopping_strategy", "it belongs to data.mixing: interleave"
    if data.on_bad_row != "drop":
        yield "data.max_refused", "it belongs to data.on_bad_row: drop"


def _training(training: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, strategy, others in (
        ("save_steps", "save_strategy", ("no", "epoch", "best")),
        ("eval_steps", "eval_strategy", ("no", "epoch")),
        ("logging_steps", "logging_strategy", ("no", "epoch")),
    ):
        if training.get(strategy) in others:
            yield f"training.{key}", f"training.{strategy} is {training[strategy]}"
    if training.get("max_steps", -1) > 0:
        yield "training.num_train_epochs", f"training.max_steps: {training['max_steps']} decides"


def _distributed(distributed: DistributedArguments) -> Iterator[tuple[str, str]]:
    if "nvme" not in (distributed.offload_optimizer, distributed.offload_param):
        yield "distributed.nvme_path", "nothing is offloaded to nvme"


def _evaluation(evaluation: EvaluationArguments) -> Iterator[tuple[str, str]]:
    if evaluation.generate == 0:
        for name in ("metrics", "max_new_tokens", "batch_size", "show"):
            yield f"evaluation.{name}", "evaluation.generate is 0"
