"""The message of an unknown key names key, section and what to write instead."""

from __future__ import annotations

import pytest

from sft_toolkit.args import (
    SourceArguments,
    field_names,
)
from tests.unit.config_file.texts import MINIMAL, MODEL, TRAINING, Problems, training


class TestUnknownKeys:
    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("learning_rat: 5e-5", "training.learning_rat: unknown key; did you mean 'learning_rate'?"),
            ("learning-rate: 5e-5", "training.learning-rate: unknown key; did you mean 'learning_rate'?"),
            ("num-epochs: 3", "training.num-epochs: unknown key; write 'num_train_epochs'"),
            ("num_train_epoch: 3", "training.num_train_epoch: unknown key; did you mean 'num_train_epochs'?"),
            ("lr: 5e-5", "training.lr: unknown key; write 'learning_rate'"),
            ("evaluation_strategy: steps",
             "training.evaluation_strategy: renamed in transformers 5; write 'eval_strategy'"),
            ("tokenizer: org/name", "training.tokenizer: removed in transformers 5; "
             "Trainer calls it processing_class; here it is loaded from model.name_or_path"),
            ("warmup_ratio: 0.1", "training.warmup_ratio: renamed in transformers 5; "
             "write 'warmup_steps' (a value below 1 is a share of all steps)"),
            ("no_cuda: true", "training.no_cuda: renamed in transformers 5; write 'use_cpu'"),
            ("group_by_length: true", "training.group_by_length: renamed in transformers 5; "
             "write 'data.sampler' (write sampler: by_length)"),
            ("overwrite_output_dir: true", "training.overwrite_output_dir: renamed in transformers 5; "
             "write 'resume' (write resume: never to start anew)"),
            ("save_safetensors: true", "training.save_safetensors: removed in transformers 5; "
             "weights are always saved as safetensors"),
            ("xpu_backend: ccl", "training.xpu_backend: renamed in transformers 5; write 'distributed.backend'"),
            ("packing: true", "training.packing: unknown key; 'packing' belongs to section 'data': write data.packing"),
            ("max_seq_length: 12", "training.max_seq_length: unknown key; write 'data.max_length'"),
            ("lora_alpha: 12",
             "training.lora_alpha: unknown key; 'lora_alpha' belongs to section 'lora': write lora.lora_alpha"),
            ("zero_stage: 3", "training.zero_stage: unknown key; write 'distributed.strategy'"),
            ("supervisee: all", "training.supervisee: unknown key; did you mean 'data.supervise'?"),
            ("xyzzy: 1", "training.xyzzy: unknown key "
             "(sections: model, data, lora, training, distributed, callbacks, evaluation)"),
        ],
    )  # fmt: skip
    def test_in_a_section(self, problems: Problems, line: str, message: str) -> None:
        assert problems(training(line)) == [f"run.yaml:5: {message}"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("r: 16", "r: unknown section; 'r' belongs to section 'lora': write lora.r"),
            ("target_modules: [q_proj]", "target_modules: unknown section; "
             "'target_modules' belongs to section 'lora': write lora.target_modules"),
            ("seed: 1", "seed: unknown section; 'seed' belongs to section 'training': write training.seed"),
            ("trainig: {}", "trainig: unknown section; did you mean 'training'?"),
            ("Lora: {}", "Lora: unknown section; did you mean 'lora'?"),
            ("evaluation_strategy: steps",
             "evaluation_strategy: renamed in transformers 5; write 'training.eval_strategy'"),
            ("tokenizer: org/name", "tokenizer: removed in transformers 5; "
             "Trainer calls it processing_class; here it is loaded from model.name_or_path"),
            ("num-epochs: 3", "num-epochs: unknown section; write 'training.num_train_epochs'"),
            ("base_model: org/name", "base_model: unknown section; write 'model.name_or_path'"),
            ("dtype: auto", "dtype: unknown section; 'dtype' belongs to section 'model': write model.dtype"),
        ],
    )  # fmt: skip
    def test_at_the_top_level(self, problems: Problems, line: str, message: str) -> None:
        assert problems(MINIMAL + line + "\n") == [f"run.yaml:4: {message}"]

    def test_in_a_source(self, problems: Problems) -> None:
        found = problems(
            MODEL + TRAINING + "data:\n  train:\n    - {path: train.jsonl, formt: text}\n    - {file: x}\n"
        )
        keys = ", ".join(field_names(SourceArguments))
        assert found == [
            "run.yaml:5: data.train.0.formt: unknown key; did you mean 'format'?",
            f"run.yaml:6: data.train.1.file: unknown key (keys: {keys})",
            "run.yaml:6: data.train.1.path: required: a file, a glob or a hub id",
        ]
