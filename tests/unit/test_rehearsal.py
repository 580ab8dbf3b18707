"""What Trainer would fail on with the model in memory is found beforehand, with its key, and nothing is left behind."""

from __future__ import annotations

import inspect
import os
import sys
import types
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import PreTrainedModel, TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from sft_toolkit.args import (
    CallbackArguments,
    DataArguments,
    DistributedArguments,
    EvaluationArguments,
    LoraArguments,
    ModelArguments,
    SourceArguments,
)
from sft_toolkit.config import RunConfig
from sft_toolkit.engines.deepspeed_config import build_deepspeed_config
from sft_toolkit.errors import ConfigError
from sft_toolkit.rehearsal import Rehearsal, mappings, rehearse
from sft_toolkit.rehearsal.engine import key_problems, resolved_settings, unread_keys
from sft_toolkit.running.arguments import arguments_from, as_written
from sft_toolkit.training_args import SFTArguments


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "HF_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def config(training: dict[str, Any] | None = None, **sections: Any) -> RunConfig:
    data = DataArguments(train=[SourceArguments("x.jsonl")], eval={"eval": [SourceArguments("y.jsonl")]})
    parts = {"model": ModelArguments("m"), "data": data, "lora": None, **sections}
    return RunConfig(training={"output_dir": "out", **(training or {})}, **parts)


def problems(training: dict[str, Any] | None = None, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        rehearse(config(training, **sections))
    return caught.value.problems


def named(name: str, **options: Any) -> dict[str, Any]:
    return {"callbacks": [CallbackArguments(name, options)]}


@pytest.mark.parametrize(
    ("training", "key", "words"),
    [
        ({"report_to": "nonexist"}, "report_to", "unknown tracker 'nonexist'"),
        ({"report_to": ["wandbb"]}, "report_to", "did you mean 'wandb'"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "lr_scheduler_kwargs", "min_lr or min_lr_rate should be set"),
        ({"lr_scheduler_type": "warmup_stable_decay"}, "lr_scheduler_kwargs", "missing option 'num_decay_steps'"),
        ({"lr_scheduler_kwargs": {"foo": 1}}, "lr_scheduler_kwargs", "linear: unknown option 'foo' (it takes"),
        ({"lr_scheduler_type": "cosine", "lr_scheduler_kwargs": {"num_cycle": 1}}, "lr_scheduler_kwargs",
         "cosine: unknown option 'num_cycle'; did you mean 'num_cycles'?"),
        ({"lr_scheduler_type": "constant", "lr_scheduler_kwargs": {"a": 1}}, "lr_scheduler_kwargs", "takes no options"),
        ({"lr_scheduler_type": "polynomial", "lr_scheduler_kwargs": {"lr_end": "x"}}, "lr_scheduler_kwargs", "'str'"),
        ({"lr_scheduler_type": "polynomial", "learning_rate": 0.0}, "lr_scheduler_kwargs", "lr_end"),
        ({"optim_args": "foo"}, "optim_args", "expected name=value, several with commas between, not 'foo'"),
        ({"optim": "adamw_torch_xla"}, "optim", "torch_xla"),
        ({"torch_compile_backend": "inducto"}, "torch_compile_backend", "did you mean 'inductor'"),
        ({"torch_compile_mode": "fast"}, "torch_compile_mode", "should be one of: default"),
        ({"accelerator_config": {"nope": 1}}, "accelerator_config", "nope"),
        ({"tf32": True}, "tf32", "Ampere"),
        ({"fp16": True}, "precision fp16", "needs a GPU"),
        ({"bf16": True, "fp16": True}, "bf16", "contradicts fp16: true"),
        ({"bf16_full_eval": True, "fp16_full_eval": True}, "", "At most one of fp16 and bf16"),
        ({"global_batch_size": 3, "per_device_train_batch_size": 2}, "global_batch_size", "no multiple of 2"),
        ({"parallelism_config": {"nope": 1}}, "parallelism_config", "nope"),
        ({"accelerator_config": {"use_configured_state": True}}, "accelerator_config", "use_configured_state"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"a": 1}}}, "accelerator_config",
         "unknown option 'a'"),
        ({"accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 2}}}, "accelerator_config", "num_steps"),
        ({"accelerator_config": {"split_batches": "maybe"}}, "accelerator_config",
         "option 'split_batches': expected true or false, not 'maybe'"),
        ({"parallelism_config": {"foo": 1}}, "parallelism_config", "unknown option 'foo'"),
        ({"activation_checkpointing_kwargs": {"foo": 1}}, "activation_checkpointing_kwargs",
         "unknown option 'foo' (accepted: every_n_layers, offload, use_reentrant, preserve_rng_state"),
        ({"gradient_checkpointing_kwargs": {"use_reentrant": "maybe"}}, "gradient_checkpointing_kwargs",
         "option 'use_reentrant': expected true or false, not 'maybe'"),
        ({"activation_checkpointing_kwargs": {"every_n_layers": 0}}, "activation_checkpointing_kwargs",
         "every_n_layers: 0 is below the minimum, 1"),
        ({"fsdp_config": {"fsdp_cpu_offlod": True}}, "fsdp_config",
         "unknown option 'fsdp_cpu_offlod'; did you mean 'cpu_offload'?"),
        ({"fsdp_config": {"version": 3}}, "fsdp_config", "option 'version': expected one of 1, 2, not 3"),
        ({"fsdp_config": {"min_num_params": "x"}}, "fsdp_config", "expected a whole number, not 'x'"),
        ({"fsdp_config": "nope.json"}, "fsdp_config", "'nope.json': no such file or folder"),
        ({"accelerator_config": "pyproject.toml"}, "accelerator_config", "'pyproject.toml' is no JSON file"),
        ({"parallelism_config": {"cp_size": 2}}, "parallelism_config", "context and sequence parallelism"),
        ({"fsdp_config": {"cpu_offload": "maybe"}}, "fsdp_config", "expected true or false, not 'maybe'"),
        ({"label_names": ["x"]}, "label_names", "in 'labels'"),
        ({"train_sampling_strategy": "group_by_length"}, "train_sampling_strategy", "sampler: by_length"),
        ({"debug": "tpu_metrics_debug"}, "debug", "needs torch_xla"),
        ({"loss": "math.sqrt"}, "loss", "it is called with 3 arguments, but: too many positional arguments"),
        ({"gradient_transform": "math.sqrt"}, "gradient_transform", "it is called with 3 arguments"),
        ({"gradient_transform": "collections.Counter"}, "gradient_transform", "Counter() can't be called"),
        ({"loss": "torch.cat"}, "loss", "fails as a function of (logits, targets, weights)"),
        ({"loss": {"focal": {"gamma": -1}}}, "loss", "gamma is -1; from 0 on"),
        ({"loss": {"focal": {"gamma": "x"}}}, "loss", "option 'gamma': expected a number, not 'x'"),
        ({"loss": "os.path.join"}, "loss", "fails as a function"),
        ({"loss": "builtins.print"}, "loss", "for 3 tokens a tensor of shape (3,), not NoneType"),
        ({"loss": "focal", "label_smoothing_factor": 0.1}, "label_smoothing_factor", "belongs to loss"),
        ({"gradient_transform": "os.nope"}, "gradient_transform", "has no 'nope'"),
        ({"gradient_transform": {"noise": {"zz": 1}}}, "gradient_transform", "unknown option 'zz'"),
        ({"use_liger_kernel": True}, "use_liger_kernel", "pip install liger-kernel"),
        ({"push_to_hub": True, "hub_model_id": "a/b/c", "hub_token": "t"}, "hub_model_id", "a/b/c"),
    ],
)  # fmt: skip
def test_a_key_of_training(training: dict[str, Any], key: str, words: str) -> None:
    if key == "tf32" and torch.cuda.is_available():
        pytest.skip("this machine may have TF32")
    (problem,) = problems(training)
    assert problem.startswith(f"training.{key}" if key else "training")
    assert words in problem


def maybe_problems(training: dict[str, Any]) -> list[str]:
    try:
        rehearse(config(training))
    except ConfigError as error:
        return error.problems
    return []


def test_trackers_whose_package_is_missing() -> None:
    for name in INTEGRATION_TO_CALLBACK:
        found = maybe_problems({"report_to": [name]})
        assert all(problem.startswith(f"training.report_to: {name} needs a package") for problem in found)
    assert maybe_problems({"report_to": "comet_ml"}) == [
        "training.report_to: comet_ml needs a package that is not installed: pip install comet-ml"
    ]


def test_every_optimizer_is_there_or_is_refused_by_name() -> None:
    from transformers.training_args import OptimizerNames

    for optimizer in OptimizerNames:
        found = maybe_problems({"optim": optimizer.value, "optim_target_modules": "all-linear"})
        assert [problem.partition(":")[0] for problem in found] in ([], ["training.optim"])


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (named("os.nope"), "callbacks: callback 'os.nope': os has no 'nope'"),
        (named("collections.Counter"),
         "callbacks: callback 'collections.Counter' is a Counter; expected a transformers.TrainerCallback"),
        (named("curve", zz=1), "callbacks.0: callback 'curve': unknown option 'zz'"),
        (named("curve", every_seconds="x"),
         "callbacks.0: callback 'curve': option 'every_seconds': expected a number, not 'x'"),
        (named("health", stop_after=0), "callbacks: callback 'health': "),
        ({"model": ModelArguments("m", dtype="float16")}, "model.dtype: float16 weights can't be trained in full; use"),
        ({"model": ModelArguments(".")}, "model.name_or_path: '.' holds no model (no config.json); it holds "),
        ({"model": ModelArguments("m", quantize="nf4")}, "model.quantize: nf4: "),
        (named("samples"), "callbacks.0: callback 'samples' needs evaluation.generate, a number of held-out rows"),
        (named("transformers.EarlyStoppingCallback"),
         "callbacks: EarlyStoppingCallback needs training.metric_for_best_model, such as loss"),
        (named("transformers.EarlyStoppingCallback", patience=1),
         "callbacks: callback 'transformers.EarlyStoppingCallback': unknown option 'patience'"),
        ({"callbacks": [CallbackArguments("curve"), CallbackArguments("curve")]},
         "callbacks.1: callback 'curve' stands here twice; keep one of them"),
        ({"evaluation": EvaluationArguments(metrics=["os.nope"])}, "evaluation.metrics: metric 'os.nope': os "),
        ({"evaluation": EvaluationArguments(metrics=["math.pi"])}, "evaluation.metrics: metric 'math.pi': 3.14"),
        ({"evaluation": EvaluationArguments(metrics=["os.getcwd"])},
         "evaluation.metrics: metric 'os.getcwd': it is called with predictions and references, but: got"),
        ({"data": DataArguments(train=[SourceArguments("x.jsonl", format=cast(Any, "os.getcwd"))])},
         "data.format: format 'os.getcwd': it is called with 1 argument, but: too many positional arguments"),
        (named("transformers.EarlyStoppingCallback", early_stopping_patience="abc"),
         "callbacks: callback 'transformers.EarlyStoppingCallback': option 'early_stopping_patience': expected a "),
        (named("unfreeze", schedule="abc"),
         "callbacks.0: callback 'unfreeze': option 'schedule': expected a mapping, not 'abc'"),
        ({**named("unfreeze", schedule={"0": "x"}), "distributed": DistributedArguments("zero2")},
         "callbacks: unfreeze: DeepSpeed, FSDP and DDP take stock of the trainable weights once"),
        ({"lora": LoraArguments(variant="pissa"), "distributed": DistributedArguments("zero3")},
         "lora: pissa decomposes whole weights, and ZeRO-3 has spread them"),
        ({"lora": LoraArguments(extra={"alora_invocation_tokens": [3]})},
         "lora.alora_invocation_tokens: needs training.activation_checkpointing: false"),
        ({"model": ModelArguments("m", attn_implementation="flash")}, "model.attn_implementation: unknown 'flash'"),
        ({"model": ModelArguments("m", attn_implementation="paged|sdpa")},
         "model.attn_implementation: 'paged|sdpa' serves generation only; take sdpa"),
        ({"lora": LoraArguments(extra={"use_dora": True, "eva_config": 3}, variant="rslora")}, "lora"),
    ],
)  # fmt: skip
def test_a_name_outside_of_training(sections: dict[str, Any], problem: str) -> None:
    found = problems(**sections)
    assert found[0].startswith(problem)


def test_a_loss_that_is_null_is_the_default() -> None:
    rehearse(config({"loss": None}))


def test_everything_at_once() -> None:
    found = problems(
        {"report_to": "nope", "optim_args": "x", "lr_scheduler_kwargs": {"foo": 1}},
        **named("os.nope"),
        model=ModelArguments("m", attn_implementation="flash"),
    )
    assert [problem.split(":")[0] for problem in found] == [
        "callbacks",
        "model.attn_implementation",
        "training.optim_args",
        "training.lr_scheduler_kwargs",
        "training.report_to",
    ]


def test_a_callback_is_built_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(
        "from transformers import TrainerCallback\n"
        "class Mine(TrainerCallback):\n    def __init__(self, word): self.word = word\n"
        "class Broken(TrainerCallback):\n    def __init__(self): raise RuntimeError('no key given')\n"
    )
    (tmp_path / "typo.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    two = [CallbackArguments("mine.Mine", {"word": "a"}), CallbackArguments("mine.Mine", {"word": "b"})]
    built = rehearse(config(callbacks=two)).callbacks
    assert [vars(callback)["word"] for callback in built] == ["a", "b"]
    assert all(isinstance(callback, TrainerCallback) for callback in built)
    assert problems(**named("mine.Broken")) == ["callbacks: callback 'mine.Broken': RuntimeError: no key given"]
    (problem,) = problems(**named("typo.Mine"))
    assert problem.startswith("callbacks: callback 'typo.Mine': typo can't be imported: SyntaxError")
    sys.modules.pop("mine", None)


def test_the_hub_needs_a_way_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert problems({"push_to_hub": True}) == [
        "training.push_to_hub: true, but HF_HUB_OFFLINE forbids the hub; take one of them out",
        "training.push_to_hub: needs a token: run `hf auth login`, or set HF_TOKEN",
    ]


@pytest.mark.parametrize(
    ("training", "warning"),
    [
        ({"optim_args": "a=1"},
         "training.optim_args: a has no effect: optim: adamw_torch_fused does not read it"),
        ({"optim_args": "rank=128,a=1", "optim": "sgd"}, "training.optim_args: rank has no effect: optim: sgd"),
        ({"include_for_metrics": ["inputs"]}, "training.include_for_metrics: has no effect: it is for compute_metrics"),
        ({"eval_do_concat_batches": False}, "training.eval_do_concat_batches: has no effect: it is for "),
        ({"length_column_name": "n"}, "training.length_column_name: has no effect"),
        ({"activation_checkpointing": False, "activation_checkpointing_kwargs": {"use_reentrant": True}},
         "training.activation_checkpointing_kwargs: has no effect without activation_checkpointing: true"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}, "gradient_cliping": 1}},
         "DeepSpeed settings: gradient_cliping: has no effect: DeepSpeed has no such key; did you mean"),
        ({"deepspeed": {"zero_optimization": {"stage": 1}, "scheduler": {}}, "lr_scheduler_type": "cosine"},
         "training.lr_scheduler_type: has no effect: the DeepSpeed settings have 'scheduler'"),
        ({"warmup_steps": 3, "lr_scheduler_type": "constant"},
         "training.warmup_steps: has no effect with lr_scheduler_type: constant; take constant_with_warmup"),
        ({"hub_model_id": "a/b"}, "training.hub_model_id: has no effect without push_to_hub: true"),
        ({"optim_target_modules": ["x"]}, "training.optim_target_modules: has no effect with optim: adamw_torch_fused"),
    ],
)  # fmt: skip
def test_what_has_no_effect_is_said(training: dict[str, Any], warning: str, caplog: pytest.LogCaptureFixture) -> None:
    rehearse(config(training))
    assert any(message.startswith(warning) for message in caplog.messages)


def test_nothing_is_started_and_nothing_is_changed() -> None:
    before = dict(os.environ)
    rehearsed = rehearse(config({"torch_compile": True, "tf32": False}, distributed=DistributedArguments("zero2")))
    assert isinstance(rehearsed, Rehearsal)
    assert dict(os.environ) == before
    assert not torch.distributed.is_initialized()
    from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled

    rehearse(config(distributed=DistributedArguments("zero3")))
    assert not is_deepspeed_zero3_enabled()


def test_a_draft_is_what_the_run_will_have() -> None:
    training = {"output_dir": "out", "eval_steps": 3, "eval_strategy": "steps", "global_batch_size": 16}
    run = config(training)
    real = arguments_from(run.training, run.data, run.distributed, SFTArguments)
    assert as_written(rehearse(run).args, run.training) == as_written(real, run.training)


def test_the_deepspeed_settings_are_resolved_by_the_arguments() -> None:
    training = {"global_batch_size": 16, "learning_rate": 3e-4, "max_grad_norm": 0.5}
    args = rehearse(config(training, distributed=DistributedArguments("zero2"))).args
    settings = resolved_settings(args)
    assert settings is not None
    assert settings["zero_optimization"]["stage"] == 2
    assert [
        settings[key] for key in ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    ] == [16, 8, 2]
    assert settings["gradient_clipping"] == 0.5
    assert resolved_settings(rehearse(config()).args) is None


def test_every_key_of_the_ready_deepspeed_settings_is_one_of_deepspeeds() -> None:
    found = build_deepspeed_config(3, "cpu", "cpu")
    assert [*key_problems(found), *unread_keys(found)] == []
    zero = {"stage": 3, "stage3_gather_16bit_weights_on_model_sav": True}
    (problem,) = key_problems({"zero_optimization": zero})
    assert problem.endswith("DeepSpeed has no such key; did you mean 'stage3_gather_16bit_weights_on_model_save'?")


def test_kernels_that_liger_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def apply(rope: bool = True, rms_norm: bool = True, model: Any = None) -> None: ...

    stand_in = types.SimpleNamespace(MODEL_TYPE_TO_APPLY_LIGER_FN={"llama": apply})
    monkeypatch.setattr(mappings, "import_module", lambda name: stand_in)
    monkeypatch.setattr(mappings, "is_liger_kernel_available", lambda: True)
    written = {"use_liger_kernel": True, "liger_kernel_config": {"rope": True, "rms_nrm": False}}
    args = rehearse(config()).args
    assert list(mappings.mapping_problems(args, written)) == [
        "training.liger_kernel_config: unknown kernel 'rms_nrm'; did you mean 'rms_norm'? (known: rms_norm, rope)"
    ]


def test_the_signature_of_checkpointing_is_that_of_torch_and_trainer() -> None:
    ours = set(inspect.signature(mappings._checkpoint).parameters)
    layers = inspect.signature(PreTrainedModel.activation_checkpointing_enable).parameters
    of_torch = inspect.signature(torch.utils.checkpoint.checkpoint).parameters
    not_from_a_file = {"self", "activation_checkpointing_kwargs", "function", "args", "kwargs", "context_fn"}
    assert (
        ours == {*layers, *of_torch, "preserve_rng_state"} - not_from_a_file
    )  # torch takes that one out of its kwargs
