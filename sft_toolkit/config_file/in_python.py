"""What an unknown keyword of the Python API was meant to be: the tables of `names` and `habits`, in Python's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import fields

import yaml

from sft_toolkit.args import LoraArguments, PreparationArguments
from sft_toolkit.config_file.habits import ELSEWHERE, NOT_HERE
from sft_toolkit.config_file.names import REMOVED, RENAMED
from sft_toolkit.config_file.schema import LORA_ALIASES, section_keys
from sft_toolkit.hints import did_you_mean, near

_TRAINER, _ARGUMENTS, _LORA = "SFTTrainer", "SFTArguments", "LoraArguments"
OF_TRAINER = (
    "model",
    "args",
    "data_collator",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "model_init",
    "compute_loss_func",
    "compute_metrics",
    "callbacks",
    "optimizers",
    "optimizer_cls_and_kwargs",
    "preprocess_logits_for_metrics",
    "peft_config",
)
_LISTED = 20  # more names than these are no help in a message
_SPELT = {
    "packing: true": "packing=True",
    "strategy: zero3": "zero_stage=3",
    "strategy: fsdp": "fsdp=True",
    "report_to: wandb": "report_to='wandb'",
}
_ENGINE = ("zero_stage", "offload_optimizer", "offload_param", "nvme_path")

# What people hand to a trainer, and the keyword of SFTTrainer.
_KEYWORDS: dict[str, str] = {
    **dict.fromkeys(
        ("tokenizer", "processor", "feature_extractor", "image_processor", "tokenizer_or_processor"), "processing_class"
    ),
    **dict.fromkeys(("lora", "lora_config", "peft", "lora_args", "adapter_config"), "peft_config"),
    **dict.fromkeys(("arguments", "config", "sft_config", "train_args", "training_args", "training_arguments"), "args"),
    **dict.fromkeys(("dataset", "data", "train_data", "training_dataset", "train_ds"), "train_dataset"),
    **dict.fromkeys(
        ("eval_data", "eval_ds", "test_dataset", "val_dataset", "valid_dataset", "validation_dataset"), "eval_dataset"
    ),
    **dict.fromkeys(("collate_fn", "collator", "data_collate_fn"), "data_collator"),
    **dict.fromkeys(("criterion", "loss_fn", "loss_func", "loss_function", "compute_loss"), "compute_loss_func"),
    **dict.fromkeys(("metrics", "metric", "compute_metric", "eval_metrics"), "compute_metrics"),
    "callback": "callbacks",
}
# What has no place of its own, and the way to it.
_WAYS: dict[str, str] = {
    "formatting_func": "write its result into a column: dataset.map(lambda row: {'text': formatting_func(row)}), or "
    "into 'messages' or 'prompt' and 'completion'",
    "dataset_text_field": "call the column text: dataset.rename_column(field, 'text')",
    "dataset_kwargs": "rows with input_ids and labels are left as they are; text rows are tokenised",
    "skip_prepare_dataset": "rows with input_ids and labels are left as they are; text rows are tokenised",
    "response_template": "answers of messages are found by the tokenizer's own template; see supervise of SFTArguments",
    "model_init_kwargs": "load the model with them and pass it as model=",
    "optimizer": "write optimizers=(optimizer, scheduler) of SFTTrainer, or optim='name' of SFTArguments",
    **dict.fromkeys(
        ("lr_scheduler", "scheduler"),
        "write optimizers=(optimizer, scheduler) of SFTTrainer, or lr_scheduler_type='name' of SFTArguments",
    ),
    "overwrite_output_dir": "train() starts anew, unless it is called with resume_from_checkpoint=True",
    "auto_resume_from_checkpoints": "call train(resume_from_checkpoint=True)",
    "early_stopping_patience": "write callbacks=[transformers.EarlyStoppingCallback(...)] of SFTTrainer",
    "eval_packing": "packing of SFTArguments holds for held-out rows too",
    "dataset_num_proc": "rows are tokenised once, in one process",
    "dataset_dir": "load the files: datasets.load_dataset('json', data_files=...)",
    "export_dir": "call save_model(dir) after the training",
    "ref_model": "this toolkit does supervised fine-tuning only",
    "val_split": "split the rows: dataset.train_test_split(test_size=...), and pass eval_dataset= of SFTTrainer",
    "strategy": "write zero_stage=1, 2 or 3 or fsdp of SFTArguments; DDP is what the launcher starts",
    "num_processes": "it is the launcher's: accelerate launch --num_processes",
    "backend": "write ddp_backend of SFTArguments",
    "dtype": "load the model with it and pass it as model=",
    "quantize": "load the model with quantization_config=BitsAndBytesConfig(...) and pass it as model=",
    "chat_template": "set tokenizer.chat_template",
    "streaming": "pass a datasets.IterableDataset as train_dataset",
    "mixing": "mix the rows by datasets.concatenate_datasets or datasets.interleave_datasets",
    "cache_dir": "rows in memory are tokenised once and not cached; a run from a YAML has data.cache_dir",
    "max_rows": "take the first rows: dataset.select(range(n))",
}
# A section of the YAML that another toolkit's name leads to -> the keyword that takes its place.
_SECTIONS = {
    "lora": "write peft_config=LoraArguments(...) of SFTTrainer",
    "callbacks": "write callbacks=[...] of SFTTrainer",
    "evaluation": "write compute_metrics of SFTTrainer, or run a YAML with section evaluation",
    "data.train": "write train_dataset of SFTTrainer",
    "data.eval": "write eval_dataset of SFTTrainer",
    "model.name_or_path": "write model of SFTTrainer",
}


def explain_keyword(owner: str, known: Sequence[str], name: str) -> str:
    """The message for a keyword that a class does not take.

    Args:
        owner: the class.
        known: the keywords that it takes.
        name: the one that it was given.

    Looked for in this order: the same name spelt otherwise, names that transformers, TRL or we moved, keywords of the
    other classes, the nearest spelling.
    """
    key = name.replace("-", "_").lower()
    return f"{owner}: unknown keyword '{name}'{_meant(owner, known, key)}"


def _meant(owner: str, known: Sequence[str], key: str) -> str:
    if key in known:
        return f"; did you mean '{key}'?"
    for other in (_TRAINER, _ARGUMENTS, _LORA):
        if other != owner and key in _names(other):
            return f"; {_written(LORA_ALIASES.get(key, key), owner, other)}"
    if moved := _moved(owner, known, key):
        return f"; {moved}"
    if near(key, known):
        return did_you_mean(key, known)
    for other in (_TRAINER, _ARGUMENTS, _LORA):
        if meant := near(key, _names(other), 0.8):
            return f"; did you mean '{meant}', which belongs to {other}?"
    return f" (it takes {', '.join(known)})" if len(known) <= _LISTED else ""


def _moved(owner: str, known: Sequence[str], key: str) -> str | None:
    target, remark = RENAMED.get(key) or ELSEWHERE.get(key) or ("", "")
    renamed = "renamed in transformers 5; " if key in RENAMED else ""
    if (ours := target.partition(".")[2]) in known:
        return f"{renamed}{_assigned(ours, remark)}"
    if key in _KEYWORDS:
        return _written(_KEYWORDS[key], owner, _TRAINER)
    if key in _WAYS:
        return _WAYS[key]
    if owner == _LORA and key in LORA_ALIASES:
        return f"write {LORA_ALIASES[key]}"
    if owner == _LORA and key in section_keys("lora"):
        return f"a field of peft.LoraConfig: write extra={{'{key}': ...}}"
    if key in REMOVED:
        return f"removed in transformers 5; {_plain(REMOVED[key])}"
    if key in NOT_HERE:
        return _plain(NOT_HERE[key])
    return f"{renamed}{_place(target, remark, owner)}" if target else None


def _place(target: str, remark: str, owner: str) -> str:
    """Where the value of a key `section.key` of the YAML goes in Python."""
    section, _, key = target.partition(".")
    if way := _SECTIONS.get(target) or _SECTIONS.get(section) if not key or section != "lora" else None:
        return way
    if key in _WAYS:
        return _WAYS[key]
    if section == "model":
        return f"load the model with {key} and pass it as model="
    home = _LORA if section == "lora" else _ARGUMENTS
    return _assigned(key, remark, lambda value: _written(value, owner, home))


def _assigned(key: str, remark: str, written: Callable[[str], str] = "write {}".format) -> str:
    """`write sampler='by_length'` where the remark is such a line of a YAML, else `write sampler (remark)`."""
    line = re.fullmatch(r"write (\w+): (.+)", remark)
    if line and line[1] == key:
        return written(f"{key}={yaml.safe_load(line[2])!r}")
    return written(key) + (f" ({_plain(remark)})" if remark else "")


def _written(key: str, owner: str, home: str) -> str:
    """`write max_length`, and where, if it is another class that takes it."""
    if owner == home:
        return f"write {key}"
    value = key if "=" in key else f"{key}=..."
    if owner == _TRAINER:
        return f"write {'args' if home == _ARGUMENTS else 'peft_config'}={home}({value})"
    return f"it belongs to {home}: {home}({value})"


def _names(owner: str) -> list[str]:
    if owner == _TRAINER:
        return list(OF_TRAINER)
    if owner == _LORA:
        return [*(field.name for field in fields(LoraArguments)), *LORA_ALIASES]
    preparation = [field.name for field in fields(PreparationArguments)]
    return [*section_keys("training"), *preparation, *_ENGINE]


def _plain(remark: str) -> str:
    """A remark without the sections and the spelling of the YAML."""
    for yaml_says, python_says in _SPELT.items():
        remark = remark.replace(yaml_says, python_says)
    return re.sub(r"\b(?:training|data|model|lora)\.(?=\w)", "", remark)
