"""What an unknown keyword of a Python call was meant to be; `names.py` says the same of a YAML."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields

from sft_toolkit.args import PreparationArguments
from sft_toolkit.config_file.habits import ELSEWHERE, NOT_HERE
from sft_toolkit.config_file.names import REMOVED, RENAMED
from sft_toolkit.config_file.schema import section_keys
from sft_toolkit.hints import did_you_mean, near

# Keys of the YAML that are something else in Python: parameters of SFTTrainer, in the order of its constructor.
_TRAINER = {
    "model.name_or_path": "model",
    "data.train": "train_dataset",
    "data.eval": "eval_dataset",
    "lora": "peft_config",
}
_PROCESSING_CLASS = ("tokenizer", "processor", "feature_extractor", "image_processor")
_TRAINER_PARAMETERS = (
    *("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init"),
    *("compute_loss_func", "compute_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs"),
    *("preprocess_logits_for_metrics", "peft_config"),
)
_ROWS = {
    "formatting_func": "map the rows before: train_dataset.map(...)",
    "dataset_text_field": "rename the column to 'text': train_dataset.rename_column(...)",
    "dataset_kwargs": "rows are rendered and tokenised by the trainer; SFTArguments says how",
}


def explain_keyword(cls: type, known: Iterable[str], name: str) -> str:
    """The message for a keyword that `cls` does not take.

    Args:
        known: the keywords that it takes.
    """
    where = f"{cls.__name__}({name}=...): unknown keyword"
    own = [parameter for parameter in known if parameter not in ("self", "args", "kwargs") or parameter == "args"]
    if name in _PROCESSING_CLASS:
        return f"{where}; {_call('processing_class', own, 'SFTTrainer')}"
    if name in _ROWS:
        return f"{where}; {_ROWS[name]}"
    target, remark = {**RENAMED, **ELSEWHERE}.get(name, (name, ""))
    meant = _in_python(target)
    if meant != name and meant in own:
        return f"{where}; write {meant}={f' ({remark})' if remark else ''}"
    for home, theirs in (("SFTTrainer", _TRAINER_PARAMETERS), ("SFTArguments", _arguments())):
        if meant in theirs and meant not in own:
            return f"{where}; write {home}({meant}=...){f' ({remark})' if remark else ''}"
    if name in REMOVED or name in NOT_HERE:
        return f"{where}; {REMOVED.get(name) or NOT_HERE[name]}"
    if near(name, own):
        return f"{where}{did_you_mean(name, own)}"
    found = near(name, [*_TRAINER_PARAMETERS, *_arguments()], cutoff=0.8)
    home = "SFTTrainer" if found in _TRAINER_PARAMETERS else "SFTArguments"
    return f"{where}; did you mean {home}({found}=...)?" if found else where


def _call(parameter: str, own: list[str], home: str) -> str:
    return f"write {parameter}=" if parameter in own else f"write {home}({parameter}=...)"


def _in_python(target: str) -> str:
    """The keyword for a key `section.key` of the YAML."""
    section, _, key = target.partition(".")
    if target in _TRAINER:
        return _TRAINER[target]
    return _TRAINER["lora"] if section == "lora" and key not in section_keys("lora") else key or target


def _arguments() -> list[str]:
    return [*section_keys("training"), *(field.name for field in fields(PreparationArguments))]
