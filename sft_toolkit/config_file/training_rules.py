"""Which values of section `training` go together; transformers says it one at a time, much later, without a line."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from multiprocessing import get_all_start_methods
from typing import Any

from sft_toolkit.args import CallbackArguments, DataArguments, EvaluationArguments
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.hints import did_you_mean
from sft_toolkit.registry import BUILT_IN

# The defaults of transformers and of SFTArguments that the rules depend on.
_STEPS = {"eval_steps": None, "save_steps": 500, "logging_steps": 10}
_NEED_EVALUATION = ("reduce_lr_on_plateau", "greedy")
# What every evaluation reports: of the tokens first, docs/metrics.md names all keys.
_OF_TOKENS = ("loss", "token_accuracy", "entropy")
_OF_AN_EVALUATION = (*_OF_TOKENS, "runtime", "samples_per_second", "steps_per_second", "model_preparation_time")


def check_updates(training: Mapping[str, Any], findings: Findings) -> None:
    """There is at least one update to make."""
    if training.get("max_steps") == 0:
        findings.add("training.max_steps", "0 trains nothing; leave it out to go by num_train_epochs")
    if training.get("num_train_epochs") == 0 and training.get("max_steps", -1) <= 0:
        findings.add("training.num_train_epochs", "0 trains nothing")


def check_loader(training: Mapping[str, Any], findings: Findings) -> None:
    """What only worker processes can do has some."""
    context = training.get("dataloader_multiprocessing_context")
    methods = get_all_start_methods()
    if context is not None and context not in methods:
        hint = did_you_mean(context, methods)
        findings.add(
            "training.dataloader_multiprocessing_context", f"expected {' or '.join(methods)}, not {context}{hint}"
        )
    if training.get("dataloader_num_workers", 0) > 0:
        return
    for key in ("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"):
        if training.get(key):
            findings.add(f"training.{key}", "needs worker processes; set training.dataloader_num_workers")


def check_strategies(
    data: DataArguments,
    training: Mapping[str, Any],
    evaluation: EvaluationArguments,
    callbacks: Sequence[CallbackArguments],
    findings: Findings,
) -> None:
    """`eval_strategy`, `save_strategy` and what reads the result of an evaluation agree."""
    evaluates = training.get("eval_strategy", "epoch" if data.eval or data.val_split else "no")
    saves = training.get("save_strategy", "steps")
    schedule = training.get("lr_scheduler_type")
    if training.get("eval_on_start") and not (data.eval or data.val_split):
        findings.add("training.eval_on_start", "needs held-out rows (data.eval or data.val_split)")
    if evaluates == "no":
        if schedule in _NEED_EVALUATION:
            findings.add("training.lr_scheduler_type", f"{schedule} follows the evaluation loss; {_HOW_TO_EVALUATE}")
        if saves == "best":
            findings.add("training.save_strategy", f"best compares evaluations; {_HOW_TO_EVALUATE}")
        elif training.get("load_best_model_at_end"):
            findings.add("training.load_best_model_at_end", f"compares evaluations; {_HOW_TO_EVALUATE}")
        return
    if saves == "best" and training.get("metric_for_best_model") is None:
        findings.add("training.save_strategy", "best needs training.metric_for_best_model, such as loss")
    if training.get("load_best_model_at_end") and saves != "best":
        _check_same_rhythm(evaluates, saves, training, findings)
    scores = evaluation.metrics if evaluation.generate and evaluation.while_training else []
    # Others than ours and those of transformers may report what they like.
    if all(c.name in BUILT_IN["callback"] or c.name.startswith("transformers.") for c in callbacks):
        _check_metric(data, training, scores, findings)
    _check_steps(evaluates, saves, training, findings)


_HOW_TO_EVALUATE = "needs held-out rows (data.eval or data.val_split) and training.eval_strategy: steps or epoch"


def _check_same_rhythm(evaluates: str, saves: str, training: Mapping[str, Any], findings: Findings) -> None:
    key = "training.load_best_model_at_end"
    if evaluates != saves:
        findings.add(
            key,
            f"needs checkpoints where it evaluates: training.eval_strategy is {evaluates}, save_strategy is {saves}; "
            "write the same for both, or save_strategy: best",
        )
        return
    every, saved = _eval_steps(training), training.get("save_steps", _STEPS["save_steps"])
    if evaluates == "steps" and every and saved:
        mixed = (every < 1) != (saved < 1)
        rest = math.remainder(saved, every)
        if mixed or not math.isclose(rest, 0, abs_tol=1e-9):
            findings.add(key, f"needs training.save_steps ({saved:g}) to be a multiple of eval_steps ({every:g})")


def _check_metric(data: DataArguments, training: Mapping[str, Any], scores: Sequence[str], findings: Findings) -> None:
    """The metric is one that an evaluation of these sets reports."""
    metric = training.get("metric_for_best_model")
    compared = training.get("load_best_model_at_end") or training.get("save_strategy") == "best"
    if metric is None and not compared:
        return
    key = "training.metric_for_best_model" if metric is not None else "training.load_best_model_at_end"
    check_reported(key, metric or "loss", data, scores, findings)


def check_reported(key: str, metric: str, data: DataArguments, scores: Sequence[str], findings: Findings) -> None:
    """An evaluation of these sets reports this metric."""
    names = list(data.eval) or ["eval"]
    prefixes = [""] if names == ["eval"] else [f"{name}_" for name in names]
    known = [f"{prefix}{what}" for what in _OF_AN_EVALUATION for prefix in prefixes] + list(scores)
    parts = any(len(sources) > 1 for sources in data.eval.values())  # each source has a loss of its own beside the sum
    asked = metric.removeprefix("eval_")
    if any(name not in BUILT_IN["metric"] for name in scores):
        return  # a metric of the user's may report under any name
    if asked not in known and not (parts and asked.endswith(("_loss", *(f"_{name}" for name in scores)))):
        losses = ", ".join(name for name in known if name.endswith("loss") or name in scores)
        findings.add(key, f"an evaluation reports no '{asked}'{did_you_mean(asked, known)} (reported: {losses})")


def _check_steps(evaluates: str, saves: str, training: Mapping[str, Any], findings: Findings) -> None:
    for key, strategy in (
        ("eval_steps", evaluates),
        ("save_steps", saves),
        ("logging_steps", training.get("logging_strategy", "steps")),
    ):
        steps = training.get(key, _STEPS[key])
        if strategy != "steps" or steps is None:
            continue
        if steps == 0 and key != "eval_steps":
            findings.add(f"training.{key}", "0 is no interval; write the number of updates, or a share of all below 1")
        elif steps > 1 and steps != int(steps):
            findings.add(f"training.{key}", f"{steps:g} is neither a number of updates nor a share of all below 1")


def _eval_steps(training: Mapping[str, Any]) -> float:
    return float(training.get("eval_steps") or training.get("logging_steps", _STEPS["logging_steps"]))
