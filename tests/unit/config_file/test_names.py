"""The message of an unknown key names key, section and what to write instead."""

from __future__ import annotations

import pytest

from sft_toolkit.args import (
    SourceArguments,
    field_names,
)
from sft_toolkit.config_file.habits import ELSEWHERE, NOT_HERE
from sft_toolkit.config_file.schema import SECTIONS, section_keys
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
            ("zero_stage: 3", "training.zero_stage: unknown key; write 'distributed.strategy' (zero1, zero2 or zero3)"),
            ("supervisee: all", "training.supervisee: unknown key; did you mean 'data.supervise'?"),
            ("xyzzy: 1", "training.xyzzy: unknown key "
             "(sections: model, data, lora, training, distributed, callbacks, evaluation, sweep)"),
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


class TestOtherToolkits:
    def test_every_name_leads_to_a_key_that_is_there_and_hides_none(self) -> None:
        for name, (target, _) in ELSEWHERE.items():
            section, _, key = target.partition(".")
            assert section in SECTIONS
            assert not key or key in section_keys(section), target
            # In its own section it would never be reached.
            assert name not in section_keys(section), name
        own = {key for section in SECTIONS for key in section_keys(section)}
        assert own & NOT_HERE.keys() == set()
        assert ELSEWHERE.keys() & NOT_HERE.keys() == set()

    @pytest.mark.parametrize(
        ("text", "messages"),
        [
            ("sequence_len: 2048\nsample_packing: true\nmicro_batch_size: 2\nadapter: lora\n", [
                "sequence_len: unknown section; write 'data.max_length'",
                "sample_packing: unknown section; write 'data.packing'",
                "micro_batch_size: unknown section; write 'training.per_device_train_batch_size'",
                "adapter: unknown section; 'adapter' belongs to section 'lora': write lora.adapter",
            ]),
            ("finetuning_type: lora\nlora_target: all\ncutoff_len: 2048\nstage: sft\n", [
                "finetuning_type: unknown section; write 'lora' (leave the section out for a full fine-tune)",
                "lora_target: unknown section; write 'lora.targets' ('all' is written all-linear)",
                "cutoff_len: unknown section; write 'data.max_length'",
                "stage: unknown section; this toolkit does supervised fine-tuning only",
            ]),
            ("dataset_name: org/set\nassistant_only_loss: true\nload_in_4bit: true\n", [
                "dataset_name: unknown section; write 'data.train'",
                "assistant_only_loss: unknown section; write 'data.supervise' (assistant, which is the default)",
                "load_in_4bit: unknown section; write 'model.quantize' (nf4)",
            ]),
            ("attn_impl: sdpa\nsplit_dataset_ratio: 0.1\ntarget_regex: x\n", [
                "attn_impl: unknown section; write 'model.attn_implementation'",
                "split_dataset_ratio: unknown section; write 'data.val_split'",
                "target_regex: unknown section; write 'lora.targets'",
            ]),
        ],
    )  # fmt: skip
    def test_a_file_of_another_toolkit(self, problems: Problems, text: str, messages: list[str]) -> None:
        found = problems(MINIMAL + text)
        assert [problem.partition(" ")[2] for problem in found] == messages

    def test_options_of_a_source(self, problems: Problems) -> None:
        assert problems(MODEL + TRAINING + "data: {train: train.jsonl, roles: {a: user}}\n") == [
            "run.yaml:3: data.roles: unknown key; it belongs to an entry of data.train or data.eval: "
            "{path: ..., roles: ...}"
        ]
