"""What an unknown key was meant to be: renamed by transformers, of another section, of another toolkit, or misspelt."""

from __future__ import annotations

from sft_toolkit.args import SourceArguments
from sft_toolkit.config_file.habits import ELSEWHERE, NOT_HERE
from sft_toolkit.config_file.schema import SECTIONS, keys_of, section_keys
from sft_toolkit.hints import did_you_mean, near

# transformers 4 -> 5: what to write instead, as `section.key` and a remark.
RENAMED: dict[str, tuple[str, str]] = {
    "adafactor": ("training.optim", "write optim: adafactor"),
    "evaluation_strategy": ("training.eval_strategy", ""),
    "fp16_backend": ("training.precision", ""),
    "fsdp_min_num_params": ("training.fsdp_config", "write min_num_params in it"),
    "fsdp_transformer_layer_cls_to_wrap": ("training.fsdp_config", "write transformer_layer_cls_to_wrap in it"),
    "group_by_length": ("data.sampler", "write sampler: by_length"),
    "half_precision_backend": ("training.precision", ""),
    "include_inputs_for_metrics": ("training.include_for_metrics", "write include_for_metrics: [inputs]"),
    "no_cuda": ("training.use_cpu", ""),
    "overwrite_output_dir": ("training.resume", "write resume: never to start anew"),
    "per_gpu_eval_batch_size": ("training.per_device_eval_batch_size", ""),
    "per_gpu_train_batch_size": ("training.per_device_train_batch_size", ""),
    "push_to_hub_model_id": ("training.hub_model_id", ""),
    "push_to_hub_token": ("training.hub_token", ""),
    "torch_dtype": ("model.dtype", ""),
    "tpu_metrics_debug": ("training.debug", "write debug: tpu_metrics_debug"),
    "warmup_ratio": ("training.warmup_steps", "a value below 1 is a share of all steps"),
    "xpu_backend": ("distributed.backend", ""),
}
REMOVED: dict[str, str] = {
    "dispatch_batches": "write it in training.accelerator_config",
    "fp16_opt_level": "it belonged to apex",
    "jit_mode_eval": "use training.torch_compile",
    "logging_dir": "the log is metrics.jsonl in training.output_dir; TensorBoard reads TENSORBOARD_LOGGING_DIR",
    "past_index": "it has no successor",
    "ray_scope": "it has no successor",
    "save_safetensors": "weights are always saved as safetensors",
    "split_batches": "write it in training.accelerator_config",
    "tokenizer": "Trainer calls it processing_class; here it is loaded from model.name_or_path",
    "torchdynamo": "use training.torch_compile_backend",
    "tpu_num_cores": "use the launcher",
    "use_ipex": "it has no successor",
    "use_legacy_prediction_loop": "it has no successor",
    "use_mps_device": "an available device is used without asking",
}


def explain_unknown(section: str, name: str) -> str:
    """The message for a key that a section does not take; section "" is the top level.

    Looked for in this order: a key of this section (hyphens), a name that transformers or we moved, a key of another
    section, the nearest spelling here, the nearest spelling anywhere.
    """
    key = name.replace("-", "_").lower()
    own = list(section_keys(section)) if section else SECTIONS
    if key in own:
        return f"unknown {_kind(section)}; did you mean '{key}'?"
    moved = _moved(section, key)
    if moved:
        return moved
    if section == "data" and key in keys_of(SourceArguments):
        return f"unknown key; it belongs to an entry of data.train or data.eval: {{path: ..., {key}: ...}}"
    homes = [other for other in SECTIONS if other != section and key in section_keys(other)]
    if homes:
        listed = " or ".join(f"'{home}'" for home in homes)
        written = " or ".join(f"{home}.{key}" for home in homes)
        return f"unknown {_kind(section)}; '{key}' belongs to section {listed}: write {written}"
    if near(key, own):
        return f"unknown {_kind(section)}{did_you_mean(key, own)}"
    return f"unknown {_kind(section)}{_anywhere(key)}"


def _kind(section: str) -> str:
    return "key" if section else "section"


def _moved(section: str, key: str) -> str | None:
    if key in RENAMED:
        target, remark = RENAMED[key]
        return f"renamed in transformers 5; write {_local(target, section)}{f' ({remark})' if remark else ''}"
    if key in REMOVED:
        return f"removed in transformers 5; {REMOVED[key]}"
    if key in ELSEWHERE:
        target, remark = ELSEWHERE[key]
        return f"unknown {_kind(section)}; write {_local(target, section)}{f' ({remark})' if remark else ''}"
    return f"unknown {_kind(section)}; {NOT_HERE[key]}" if key in NOT_HERE else None


def _local(target: str, section: str) -> str:
    """`training.eval_strategy` is written `eval_strategy` inside its own section."""
    home, _, key = target.partition(".")
    return f"'{key}'" if home == section and key else f"'{target}'"


def _anywhere(key: str) -> str:
    candidates = [f"{section}.{name}" for section in SECTIONS for name in section_keys(section)]
    by_name = {candidate.partition(".")[2]: candidate for candidate in reversed(candidates)}
    found = near(key, by_name, cutoff=0.8)
    return f"; did you mean '{by_name[found]}'?" if found else f" (sections: {', '.join(SECTIONS)})"
