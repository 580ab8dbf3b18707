"""Every knob of a run, with its unit and its limits. Imports no torch.

One dataclass per YAML section. A field's `metadata["help"]` is its documentation: `docs/config.md`
is generated from it. Values are checked by `config.py` (from YAML) and when a section is made (in Python).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from sft_toolkit.knobs import Checked, knob

if TYPE_CHECKING:
    from sft_toolkit.training_args import SFTArguments as SFTArguments

Format = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized"]
Supervise = Literal["assistant", "last_assistant", "completion", "all"]
TooLong = Literal["drop", "error", "truncate_right", "truncate_prompt_left", "cut_at_turn"]
OnBadRow = Literal["error", "drop"]
Mixing = Literal["concatenate", "interleave"]
StoppingStrategy = Literal["first_exhausted", "all_exhausted"]
Named = dict[str, Any] | str | None
"""A name, or `{name: {option: value}}`; None is "not given"."""
Precision = Literal["auto", "fp32", "bf16", "fp16"]
Strategy = Literal["auto", "none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
Offload = Literal[False, "cpu", "nvme"]
Backend = Literal["auto", "nccl", "gloo", "mpi", "xccl", "hccl", "cncl", "mccl"]


@dataclass
class ModelArguments(Checked):
    """Section `model`: which weights, tokenizer and template."""

    name_or_path: str = knob("", "Folder or hub id of the base model.", required=True)
    revision: str | None = knob(None, "Branch, tag or commit of a hub model.")
    gguf_file: str | None = knob(None, "File name of a GGUF inside `name_or_path`; weights are dequantised on load.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = knob(
        "auto", "Dtype of the loaded weights. auto: fp32 when all weights are trained, else the training precision."
    )
    attn_implementation: str = knob("auto", "Attention of transformers (sdpa, eager, flash_attention_2, ...).")
    quantize: Literal["nf4", "int8"] | None = knob(
        None, "Quantise the frozen base below an adapter (QLoRA) with bitsandbytes; merging takes the whole weights."
    )
    trust_remote_code: bool = knob(False, "Run Python code that the model folder ships. Only if you read it.")
    chat_template: str | None = knob(
        None, "Jinja file that replaces the tokenizer's chat template; saved with the model."
    )


@dataclass
class SourceArguments(Checked):
    """One entry of `data.train` or `data.eval`."""

    path: str = knob(
        "", "File, glob or hub id. JSONL, JSON, CSV and Parquet are recognised by their suffix.", required=True
    )
    split: str = knob("train", "Split of a hub data set.")
    subset: str | None = knob(None, "Configuration (subset) of a hub data set, e.g. main.")
    revision: str | None = knob(None, "Branch, tag or commit of a hub data set.")
    format: Format = knob("auto", "Row layout; auto looks at the columns of all rows.", kind="format")
    columns: dict[str, str] = knob(dict, "Column names: {ours: theirs}.")
    roles: dict[str, str] = knob(dict, "Role names of this file: {theirs: ours}.")
    weight: float = knob(1.0, "Sampling weight of this source; 1.0 keeps every row once. See `mixing`.", minimum=0.0)
    max_rows: int | None = knob(None, "Read at most this many rows.", minimum=1)


@dataclass
class PreparationArguments:
    """How a row becomes tokens; shared by the YAML section `data` and by `SFTArguments`."""

    supervise: Supervise = knob("assistant", "Which text is learned.")
    max_length: int = knob(2048, "Longest row, in tokens.", minimum=2)
    too_long: TooLong = knob("drop", "What happens to a longer row; always counted.")
    on_bad_row: OnBadRow = knob("error", "A row that can't be read or rendered: stop, or drop and count it.")
    max_refused: float | None = knob(
        None,
        "Largest share of a source's rows that on_bad_row: drop may refuse; more stop the run. Default: half, once 20 "
        "rows were read.",
        minimum=0.0,
        maximum=1.0,
    )
    packing: bool = knob(False, "Fill each row of max_length with several documents that never see one another.")
    sampler: Named = knob(
        None,
        "Order of the rows: shuffle (default), sequential, by_length, curriculum, staged; or {name: {option: value}}.",
        kind="sampler",
    )
    transform: Named = knob(
        None,
        "Changes a row each time it is trained on: a dotted path, or {path: {option: value}}.",
        kind="transform",
    )


@dataclass
class DataArguments(Checked, PreparationArguments):
    """Section `data`: the sources and how they are prepared."""

    train: list[SourceArguments] = knob(list, "Training data: a path, a list of paths, or a list of mappings.")
    eval: dict[str, list[SourceArguments]] = knob(dict, "Held-out data, by name; a single source is named 'eval'.")
    val_split: float | None = knob(None, "Held-out part of `train`: a share below 1 or a number of rows.", minimum=0.0)
    group_by: str | None = knob(
        None, "Column of the files; rows of equal value stay on one side of `val_split`, and so do equal rows."
    )
    mixing: Mixing = knob(
        "concatenate",
        "concatenate: one source behind the other, each weighing its rows. interleave: the weights are the "
        "probabilities with which a source gives the next row.",
    )
    stopping_strategy: StoppingStrategy = knob(
        "first_exhausted", "Interleaving ends when the first source is used up, or when all are (rows repeat)."
    )
    format: Format = knob("auto", "Row layout of every source that names none.", kind="format")
    streaming: bool = knob(False, "Tokenise on the fly instead of once into the cache.")
    cache_dir: str | None = knob(None, "Token cache; default ~/.cache/sft_toolkit.")


@dataclass
class LoraArguments(Checked):
    """Section `lora`. Any further field of `peft.LoraConfig` may stand beside these; see `extra`."""

    r: int | None = knob(None, "Rank of the update matrices; default 16, or the rank of `adapter`.", minimum=1)
    alpha: float | None = knob(
        None,
        "Scale numerator; the update is scaled by alpha / r. Default: a scale of 2, or that of `adapter`.",
        minimum=0.0,
    )
    dropout: float = knob(0.0, "Dropout on the adapter's input.", minimum=0.0, below=1.0)
    targets: str | list[str] = knob("auto", "auto, all-linear, a regular expression, or module names.")
    modules_to_save: list[str] = knob(list, "Modules trained in full and saved with the adapter.")
    variant: Literal["lora", "rslora", "dora", "pissa", "olora", "loftq"] = knob("lora", "Kind of adapter.")
    adapter: str | None = knob(None, "Folder of a saved adapter to continue from.")
    allow_other_base: bool = knob(False, "Continue `adapter` although it was trained on another base.")
    save_merged: bool = knob(False, "After training, also write the merged plain model to `merged/`.")
    extra: dict[str, Any] = knob(dict, "Other fields of peft.LoraConfig, passed through unchanged.")


@dataclass
class DistributedArguments(Checked):
    """Section `distributed`: what the launcher is expected to have started."""

    strategy: Strategy = knob("auto", "auto takes what the launcher started.")
    offload_optimizer: Offload = knob(False, "Where ZeRO keeps the optimizer state.")
    offload_param: Offload = knob(False, "Where ZeRO-3 keeps the parameters.")
    nvme_path: str | None = knob(None, "Folder on a local NVMe disk, for offload to nvme.")
    deepspeed: str | None = knob(None, "DeepSpeed JSON file; replaces the one built from `strategy`.")
    backend: str = knob("auto", "Backend of torch.distributed (nccl, gloo, hccl, ...).")
    num_processes: int | None = knob(None, "Expected world size; a different one is an error.", minimum=1)


@dataclass
class EvaluationArguments(Checked):
    """Section `evaluation`: answers generated for held-out rows, before and after training."""

    generate: int = knob(0, "Held-out rows to answer, of each source as many; 0 generates nothing.", minimum=0)
    metrics: list[str] = knob(lambda: ["exact_match", "token_f1"], "Metrics by registered name.", kind="metric")
    max_new_tokens: int = knob(128, "Longest answer, in tokens.", minimum=1)
    batch_size: int = knob(8, "Rows answered at once.", minimum=1)
    show: int = knob(3, "Answers printed.", minimum=0)
    while_training: bool = knob(False, "Also at each evaluation, as eval_<metric>, which may choose the best model.")


@dataclass
class SweepArguments(Checked):
    """Section `sweep`: the run is tried with other values, each trial a run in a folder of its own."""

    search: dict[str, Any] = knob(
        dict, "What is tried: `section.key: [values]`, or `section.key: {min: , max: , log: true}` for a number."
    )
    trials: int | None = knob(None, "Most trials; default 20 where `minutes` is not given.", minimum=1)
    minutes: float | None = knob(None, "No trial starts after this many, earlier starts included.", minimum=0.0)
    metric: str = knob("eval_loss", "What an evaluation reports and trials are compared by.")
    direction: Literal["auto", "minimize", "maximize"] = knob("auto", "auto minimises losses and maximises the rest.")
    sampler: Literal["tpe", "random", "grid"] = knob("tpe", "Sampler of Optuna; grid takes lists only.")
    pruner: Literal["median", "halving", "none"] = knob("median", "Ends trials that fall behind at an evaluation.")
    sampler_seed: int = knob(42, "The same file tries the same values.", minimum=0)


@dataclass
class CallbackArguments(Checked):
    """One entry of `callbacks`: a registered name or a dotted path, with its options."""

    name: str = knob("", "Registered name or dotted path of a class.", kind="callback")
    options: dict[str, Any] = knob(dict, "Keyword arguments of its constructor.")


@dataclass
class TrainingExtras:
    """What section `training` takes beside every field of `transformers.TrainingArguments`."""

    global_batch_size: int | None = knob(
        None, "Rows (packed: bins) of one update over all ranks; accumulation is computed from it.", minimum=1
    )
    precision: Precision = knob(
        "auto", "auto: bf16 where the device is fast in it, else fp16 with a notice, fp32 on CPU."
    )
    resume: str = knob("auto", "auto continues from the newest good checkpoint, never starts anew, or a folder.")
    trainable: list[str] | None = knob(
        None, "Without lora: train only the parameters that match one of these patterns, such as '*.layers.31.*'."
    )
    lora_plus_ratio: float | None = knob(None, "LoRA+: B matrices learn this many times faster; 16 fits.", minimum=0.0)
    loss: Named = knob(
        "nll",
        "What is optimised: nll, label_smoothing (share: 0.1), focal (gamma: 2), dft, a registered name, or the dotted "
        "path of a function of (logits, targets, weights); {name: {option: value}} as well. The logged `loss` stays "
        "the NLL; this stands beside it as `objective`.",
        kind="loss",
    )
    loss_chunk: int | None = knob(
        None,
        "Supervised tokens that are projected to the vocabulary at once. Default: by vocabulary and device; less takes "
        "less memory, more may be faster on a GPU.",
        minimum=1,
    )
    gradient_transform: Named = knob(
        None,
        "Changes gradients after unscaling and before clipping: clip_each, freeze, noise, a registered name or dotted "
        "path; or {name: {option: value}}. Not under DeepSpeed and FSDP.",
        kind="gradient_transform",
    )
    log_entropy: bool = knob(
        False, "Also log the mean entropy of the predictions, in nats; costs a softmax over the vocabulary."
    )
    packed_attention: Literal["auto", "as_loaded"] = knob(
        "auto",
        "auto: packed rows attend per document, without a mask over the row, where that is proven on the model. "
        "as_loaded: by the attention that the model has; a `model.attn_implementation` other than auto says this too.",
    )
    on_nonfinite: Literal["stop", "skip"] = knob(
        "stop", "skip leaves out updates whose gradient is NaN or infinite (not under DeepSpeed or FSDP)."
    )
    save_on_error: bool = knob(
        True, "Save the last whole update when an error ends the training: in one process, or of all ranks under DDP."
    )
    async_save: bool = knob(
        False,
        "Write checkpoints in a thread while training goes on; takes their size in host memory. Not under DeepSpeed, "
        "FSDP and tensor parallelism.",
    )
    stop_after_nonfinite: int = knob(
        3, "Stop after this many consecutive updates with a NaN or infinite loss or gradient.", minimum=1
    )


# Limits of fields that transformers.TrainingArguments takes unchecked and fails on, or worse trains on, much later.
TRAINING_LIMITS: dict[str, dict[str, float]] = {
    "per_device_train_batch_size": {"minimum": 1},
    "per_device_eval_batch_size": {"minimum": 1},
    "gradient_accumulation_steps": {"minimum": 1},
    "num_train_epochs": {"minimum": 0},
    "max_steps": {"minimum": -1},
    "learning_rate": {"minimum": 0},
    "warmup_steps": {"minimum": 0},
    "weight_decay": {"minimum": 0},
    "adam_beta1": {"minimum": 0, "below": 1},
    "adam_beta2": {"minimum": 0, "below": 1},
    "adam_epsilon": {"minimum": 0},
    "max_grad_norm": {"minimum": 0, "infinite": True},
    "label_smoothing_factor": {"minimum": 0, "maximum": 1},
    "logging_steps": {"minimum": 0},
    "eval_steps": {"minimum": 0},
    "save_steps": {"minimum": 0},
    "save_total_limit": {"minimum": 1},
    "seed": {"minimum": 0, "maximum": 2**32 - 1},
    "data_seed": {"minimum": 0, "maximum": 2**32 - 1},
    "dataloader_num_workers": {"minimum": 0},
    "dataloader_prefetch_factor": {"minimum": 1},
    "ddp_bucket_cap_mb": {"minimum": 1},
    "ddp_timeout": {"minimum": 1},
    "eval_accumulation_steps": {"minimum": 1},
    "eval_delay": {"minimum": 0},
    "neftune_noise_alpha": {"minimum": 0},
    "torch_empty_cache_steps": {"minimum": 1},
}


def field_names(section: type) -> list[str]:
    """Names of a section's fields, in the order of the documentation."""
    return [f.name for f in fields(section)]


def __getattr__(name: str) -> Any:
    # SFTArguments inherits from TrainingArguments, whose import takes seconds; --help must not pay for it.
    if name == "SFTArguments":
        from sft_toolkit.training_args import SFTArguments

        return SFTArguments
    raise AttributeError(f"module 'sft_toolkit.args' has no attribute '{name}'")
