"""What is wrong with values that are each well-formed: files that aren't there, keys that contradict one another.

Only what is cheap and certain is checked here: a name that may be a hub id is left to the loader.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Mapping
from typing import Any, get_args

from sft_toolkit.args import (
    Backend,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SourceArguments,
)
from sft_toolkit.config_file.findings import Findings
from sft_toolkit.hints import at_home, did_you_mean, missing, near

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_DATA_SUFFIX = re.compile(r"\.(jsonl?|ndjson|csv|tsv|parquet)(\.(gz|zst|bz2|xz))?$", re.IGNORECASE)
_FSDP = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2", "offload", "auto_wrap")
_ZERO = ("zero1", "zero2", "zero3")


def check_model(model: ModelArguments, findings: Findings) -> None:
    """`model`: the folder, the GGUF file and the template are there."""
    if not model.name_or_path:
        _require("model.name_or_path", "the folder or hub id of the base model", findings)
        return
    folder = at_home(model.name_or_path)
    if folder.is_file():
        gguf = f"; write name_or_path: {folder.parent} and gguf_file: {folder.name}" if folder.suffix == ".gguf" else ""
        findings.add("model.name_or_path", f"'{model.name_or_path}' is a file; expected a folder or a hub id{gguf}")
    elif not folder.is_dir() and not _may_be_hub_id(model.name_or_path):
        findings.add("model.name_or_path", f"'{model.name_or_path}': {missing(model.name_or_path)}")
    elif folder.is_dir() and model.gguf_file and not (folder / model.gguf_file).is_file():
        held = sorted(entry.name for entry in folder.glob("*.gguf"))
        hint = did_you_mean(model.gguf_file, held) or (f" (it holds {', '.join(held)})" if held else "")
        findings.add("model.gguf_file", f"'{model.gguf_file}' is not in {model.name_or_path}{hint}")
    if model.chat_template is not None:
        _need_file("model.chat_template", model.chat_template, findings)


def check_data(data: DataArguments, findings: Findings) -> None:
    """`data`: local files are there; the held-out part is given once."""
    if not data.train:
        _require("data.train", "a file, a glob or a hub id, or a list of those", findings)
    for key, source in _all_sources(data):
        while not findings.wrote(key):
            key = key.rpartition(".")[0]
        _check_source(key, source, findings)
    if data.val_split is not None:
        if data.eval:
            findings.add("data.val_split", "contradicts data.eval: held-out rows come from one of them")
        if data.val_split <= 0 or (data.val_split > 1 and data.val_split != int(data.val_split)):
            findings.add("data.val_split", f"expected a share below 1 or a number of rows, not {data.val_split}")
    if data.cache_dir is not None and at_home(data.cache_dir).is_file():
        findings.add("data.cache_dir", f"'{data.cache_dir}' is a file; expected a folder")


def check_lora(lora: LoraArguments | None, findings: Findings) -> None:
    """`lora.targets` may match something; `lora.adapter` is the folder of a saved adapter."""
    if lora is None:
        return
    if lora.targets in ("", []):
        findings.add(
            "lora.targets", "names nothing; leave it out for auto, or leave out section lora to train all weights"
        )
    elif lora.targets in ("all", "linear", "all_linear"):
        findings.add("lora.targets", f"no module has the name '{lora.targets}'; did you mean 'all-linear'?")
    elif isinstance(lora.targets, str):
        try:
            re.compile(lora.targets)
        except re.error as error:
            findings.add("lora.targets", f"'{lora.targets}' is no regular expression: {error}")
    if lora.alpha == 0:
        findings.add("lora.alpha", "0 takes the adapter out of the model; leave it out for a scale of 2")
    if lora.adapter is None:
        return
    folder = at_home(lora.adapter)
    if not folder.exists():
        findings.add("lora.adapter", f"'{lora.adapter}': {missing(lora.adapter)}")
    elif not (folder / "adapter_config.json").is_file():
        findings.add("lora.adapter", f"'{lora.adapter}' is no saved adapter: it has no adapter_config.json")


def check_what_trains(lora: LoraArguments | None, training: dict[str, Any], findings: Findings) -> None:
    """One section decides what is trained: an adapter, or the parameters that patterns name."""
    if lora is not None and training.get("trainable"):
        findings.add("training.trainable", "lora trains its adapter and nothing else; see lora.modules_to_save")
    if lora is None and training.get("lora_plus_ratio") is not None:
        findings.add("training.lora_plus_ratio", "it is the learning rate of an adapter, and there is no section lora")
    if training.get("lora_plus_ratio") == 0:
        findings.add(
            "training.lora_plus_ratio", "0 keeps the B matrices at zero; leave it out to learn as the others do"
        )


def check_training(training: dict[str, Any], findings: Findings) -> None:
    """`training`: the output folder can be one, `resume` is there, no key is written twice under two names."""
    if not training.get("output_dir"):
        _require("training.output_dir", "the folder of checkpoints, logs and the final model", findings)
    else:
        _check_output_dir(training["output_dir"], findings)
    for old, new in (
        ("gradient_checkpointing", "activation_checkpointing"),
        ("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs"),
        ("resume_from_checkpoint", "resume"),
    ):
        if old in training and new in training:
            findings.add(f"training.{old}", f"the same as training.{new}; keep one of them")
    resume = training.get("resume", "auto")
    if resume not in ("auto", "never") and not at_home(resume).is_dir():
        looks_like = near(resume, ["auto", "never"])
        hint = f"; did you mean '{looks_like}'?" if looks_like else f": {missing(resume)}"
        hint = ", a file" if at_home(resume).exists() else hint
        findings.add("training.resume", f"expected auto, never or the folder of a checkpoint, not '{resume}'{hint}")


def check_distributed(distributed: DistributedArguments, training: dict[str, Any], findings: Findings) -> None:
    """`distributed`: offload has a strategy that can do it, the DeepSpeed file is there and is the only source."""
    backend = distributed.backend
    if backend not in get_args(Backend) and not findings.wrote("distributed.backend"):
        names = ", ".join(get_args(Backend))
        hint = did_you_mean(backend, get_args(Backend))
        findings.add("training.ddp_backend", f"expected one of {names}, not {backend}{hint}")
    for key, ours in (("deepspeed", "deepspeed"), ("ddp_backend", "backend")):
        if training.get(key) is not None and getattr(distributed, ours) not in (None, "auto", training[key]):
            findings.add(f"training.{key}", f"contradicts distributed.{ours}; keep one of them")
    strategy, file = distributed.strategy, distributed.deepspeed
    words = training["fsdp"].replace(",", " ").split() if isinstance(training.get("fsdp"), str) else []
    for word in set(words) - set(_FSDP):
        findings.add(
            "training.fsdp", f"unknown '{word}' (write true, and options in fsdp_config){did_you_mean(word, _FSDP)}"
        )
    if training.get("fsdp") and strategy != "fsdp":
        findings.add("training.fsdp", f"contradicts distributed.strategy: {strategy}; keep one of them")
    if file is not None:
        _need_file("distributed.deepspeed", file, findings)
        if strategy not in ("auto", *_ZERO):
            findings.add(
                "distributed.deepspeed", f"contradicts distributed.strategy: {strategy}; leave one of them out"
            )
    for key, stages in (("offload_optimizer", _ZERO), ("offload_param", ("zero3",))):
        place = getattr(distributed, key)
        if not place:
            continue
        if file is not None:
            findings.add(f"distributed.{key}", "contradicts distributed.deepspeed: that file decides about offload")
        elif strategy not in stages:
            findings.add(f"distributed.{key}", f"needs distributed.strategy {' or '.join(stages)}, not {strategy}")
        if place == "nvme" and distributed.nvme_path is None:
            findings.add(f"distributed.{key}", "nvme needs distributed.nvme_path, a folder on a local disk")
    engine = strategy if strategy in (*_ZERO, "fsdp") else "DeepSpeed" if file or training.get("deepspeed") else None
    if engine and training.get("gradient_transform") is not None:
        findings.add("training.gradient_transform", f"can't reach the gradients of {engine}")
    if engine and training.get("on_nonfinite") == "skip":
        findings.add("training.on_nonfinite", f"skip can't reach the gradients of {engine}")


def check_held_out(
    data: DataArguments, training: dict[str, Any], evaluation: EvaluationArguments, findings: Findings
) -> None:
    """What reads held-out rows has some."""
    if data.eval or data.val_split or findings.blames("data.eval") or findings.blames("data.val_split"):
        return
    if evaluation.generate > 0:
        findings.add("evaluation.generate", "needs held-out rows; set data.eval or data.val_split")
    if training.get("eval_strategy", "no") != "no":
        findings.add("training.eval_strategy", "needs held-out rows; set data.eval or data.val_split")


def check_homes(
    model: ModelArguments,
    data: DataArguments,
    training: Mapping[str, Any],
    lora: LoraArguments | None,
    findings: Findings,
) -> None:
    """A path that begins with the home of a user names one that is there."""
    paths = {
        "model.name_or_path": model.name_or_path,
        "data.cache_dir": data.cache_dir,
        "training.output_dir": training.get("output_dir"),
        "lora.adapter": None if lora is None else lora.adapter,
        **{key: source.path for key, source in _all_sources(data)},
    }
    for key, path in paths.items():
        if path and path.startswith("~") and str(at_home(path)) == path and not findings.blames(key):
            user = path.partition("/")[0].removeprefix("~")
            findings.add(key, f"'{path}': no user '{user}' has a home here; for a folder of that name write ./{path}")


def _require(key: str, what: str, findings: Findings) -> None:
    if not findings.blames(key):
        findings.add(key, f"required: {what}")


def _all_sources(data: DataArguments) -> Iterator[tuple[str, SourceArguments]]:
    for key, sources in (
        ("data.train", data.train),
        *((f"data.eval.{name}", found) for name, found in data.eval.items()),
    ):
        for index, source in enumerate(sources):
            yield f"{key}.{index}", source


def _check_source(key: str, source: SourceArguments, findings: Findings) -> None:
    path = source.path
    if not path or "://" in path or at_home(path).exists():
        return
    if glob.has_magic(path):
        if not glob.glob(str(at_home(path)), recursive=True):
            findings.add(key, f"no file matches '{path}'")
    elif _DATA_SUFFIX.search(path) or not _may_be_hub_id(path):
        findings.add(key, f"'{path}': {missing(path)}")


def _may_be_hub_id(name: str) -> bool:
    return not name.startswith((".", "/", "~")) and _HUB_ID.fullmatch(name) is not None


def _need_file(key: str, path: str, findings: Findings) -> None:
    file = at_home(path)
    if file.is_dir():
        findings.add(key, f"'{path}' is a folder; expected a file")
    elif not file.exists():
        findings.add(key, f"'{path}': {missing(path)}")


def _check_output_dir(path: str, findings: Findings) -> None:
    folder = at_home(path)
    for above in (folder, *folder.parents):
        if above.is_dir():
            return
        if above.exists():
            what = "is a file" if above == folder else f"can't be made: {above} is a file"
            findings.add("training.output_dir", f"'{path}' {what}; expected a folder, new or existing")
            return
