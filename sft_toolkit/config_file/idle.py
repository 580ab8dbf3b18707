"""Keys that the user set and that nothing reads beside the rest of the configuration: said, not refused.

An override often switches off what a file goes on describing (`training.save_strategy=no`), so that these are warnings.
A key at its default says nothing and is passed over: `config.resolved.yaml` holds all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sft_toolkit.args import DataArguments, DistributedArguments, EvaluationArguments, LoraArguments, ModelArguments
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.hints import at_home

# Of transformers; a value that is written out changes nothing.
_TRAINING_DEFAULTS = {"save_steps": 500, "eval_steps": None, "logging_steps": 10, "num_train_epochs": 3}


def warn_of_idle_keys(
    model: ModelArguments,
    data: DataArguments,
    lora: LoraArguments | None,
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
        *_lora(lora),
        *_training(training, bool(data.eval or data.val_split)),
        *_distributed(distributed),
        *_evaluation(evaluation),
    ]:
        if findings.wrote(key):
            findings.warn(key, f"has no effect: {message}")


def _set(section: Any, *names: str) -> Iterator[str]:
    """Which of these fields differ from their default."""
    plain = type(section)()
    return (name for name in names if getattr(section, name) != getattr(plain, name))


def _lora(lora: LoraArguments | None) -> Iterator[tuple[str, str]]:
    if lora is not None and lora.adapter is None:
        for name in _set(lora, "allow_other_base"):
            yield f"lora.{name}", "it belongs to lora.adapter"


def _model(model: ModelArguments) -> Iterator[tuple[str, str]]:
    if at_home(model.name_or_path).is_dir():
        for name in _set(model, "revision"):
            yield f"model.{name}", "model.name_or_path is a local folder"


def _sources(findings: Findings) -> Iterator[tuple[str, str]]:
    for key, source in findings.sources.items():
        is_local = at_home(source.path).exists() or any(sign in source.path for sign in "*?[")
        for name in _set(source, "split", "subset", "revision") if is_local else ():
            yield f"{key}.{name}", "that is for hub data sets, and the path is local"


def _data(data: DataArguments) -> Iterator[tuple[str, str]]:
    for name in _set(data, "stopping_strategy") if data.mixing != "interleave" else ():
        yield f"data.{name}", "it belongs to data.mixing: interleave"
    for name in _set(data, "max_refused") if data.on_bad_row != "drop" else ():
        yield f"data.{name}", "it belongs to data.on_bad_row: drop"


def _training(training: Mapping[str, Any], held_out: bool) -> Iterator[tuple[str, str]]:
    idle = [
        (key, f"training.{strategy} is {training[strategy]}")
        for key, strategy, others in (
            ("save_steps", "save_strategy", ("no", "epoch", "best")),
            ("eval_steps", "eval_strategy", ("no", "epoch")),
            ("logging_steps", "logging_strategy", ("no", "epoch")),
        )
        if training.get(strategy) in others
    ]
    if training.get("max_steps", -1) > 0:
        idle.append(("num_train_epochs", f"training.max_steps: {training['max_steps']} decides"))
    evaluates = training.get("eval_strategy", "epoch" if held_out else "no") != "no"
    trackers = training.get("report_to") or []
    if not {"all", "trackio"} & {*([trackers] if isinstance(trackers, str) else trackers)}:
        names = (name for name, value in training.items() if name.startswith("trackio_") and value is not None)
        idle += [(name, "it needs training.report_to: trackio") for name in names]
    if training.get("local_rank", -1) != -1:
        yield "training.local_rank", "the launcher says it"
    if training.get("do_train") is False:
        yield "training.do_train", "train trains; prepare and check do not"
    if training.get("do_eval", evaluates) != evaluates:
        yield "training.do_eval", f"training.eval_strategy decides, and is {'set' if evaluates else 'no'}"
    if training.get("do_predict"):
        yield "training.do_predict", "nothing predicts here; evaluation.generate answers held-out rows"
    for key, message in idle:
        if training.get(key) not in (None, _TRAINING_DEFAULTS.get(key)):
            yield f"training.{key}", message


def _distributed(distributed: DistributedArguments) -> Iterator[tuple[str, str]]:
    if "nvme" not in (distributed.offload_optimizer, distributed.offload_param):
        for name in _set(distributed, "nvme_path"):
            yield f"distributed.{name}", "nothing is offloaded to nvme"


def _evaluation(evaluation: EvaluationArguments) -> Iterator[tuple[str, str]]:
    if evaluation.generate == 0:
        for name in _set(evaluation, "metrics", "max_new_tokens", "batch_size", "show", "while_training"):
            yield f"evaluation.{name}", "evaluation.generate is 0"
