"""What each section makes of its keys."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_toolkit.args import (
    CallbackArguments,
    DistributedArguments,
    LoraArguments,
    SourceArguments,
)
from sft_toolkit.registry import known
from tests.unit.config_file.texts import DATA, MINIMAL, MODEL, TRAINING, Load, Problems, training

KNOWN = ", ".join(known("callback"))


class TestSections:
    def test_sources_of_every_shape(self, load: Load) -> None:
        plain, other = SourceArguments("train.jsonl"), SourceArguments("org/other", split="all")
        text = MODEL + TRAINING + "data: {train: %s, eval: %s}\n"
        mapping = "{path: org/other, split: all}"
        assert load(text % ("train.jsonl", mapping)).data.eval == {"eval": [other]}
        assert load(text % (mapping, "train.jsonl")).data.train == [other]
        assert load(text % (f"[train.jsonl, {mapping}]", "null")).data.train == [plain, other]
        assert load(text % ("train.jsonl", f"{{dev: train.jsonl, test: [{mapping}, train.jsonl]}}")).data.eval == {
            "dev": [plain],
            "test": [other, plain],
        }

    def test_the_format_of_the_section_is_that_of_its_sources(self, load: Load) -> None:
        text = MODEL + TRAINING + "data: {format: text, train: [train.jsonl, {path: train.jsonl, format: alpaca}]}\n"
        assert [source.format for source in load(text).data.train] == ["text", "alpaca"]

    @pytest.mark.parametrize(
        ("sources", "found"),
        [("", "null"), ("{}", None), ("[]", None), ("[[a]]", "a list"), ('""', 'the text ""')],
    )
    def test_sources_that_are_none(self, problems: Problems, sources: str, found: str | None) -> None:
        shapes = "expected a path, a list of paths, or a list of {path: ..., ...}"
        expected = {
            "{}": "run.yaml:3: data.train.path: required: a file, a glob or a hub id",
            "[]": f"run.yaml:3: data.train: an empty list; {shapes}",
            "[[a]]": f"run.yaml:3: data.train.0: {shapes}, not {found}",
        }
        message = expected.get(sources, f"run.yaml:3: data.train: {shapes}, not {found}")
        assert problems(f"{MODEL}{TRAINING}data: {{train: {sources}}}\n") == [message]

    def test_lora_takes_the_fields_and_the_names_of_peft(self, load: Load) -> None:
        text = "lora: {r: 8, lora_alpha: 32, target_modules: [q_proj], use_dora: true, rank_pattern: {q_proj: 4}}\n"
        assert load(MINIMAL + text).lora == LoraArguments(
            r=8, alpha=32, targets=["q_proj"], extra={"use_dora": True, "rank_pattern": {"q_proj": 4}}
        )
        assert load(MINIMAL + "lora: {init_lora_weights: pissa_niter_16}\n").lora == LoraArguments(
            extra={"init_lora_weights": "pissa_niter_16"}
        )
        assert load(MINIMAL + "lora: {}\n").lora == LoraArguments()

    def test_lora_with_what_the_toolkit_sets_itself(self, load: Load, problems: Problems) -> None:
        text = "lora: {task_type: CAUSAL_LM, peft_type: LORA, inference_mode: false, base_model_name_or_path: null}\n"
        assert load(MINIMAL + text).lora == LoraArguments()
        assert problems(MINIMAL + "lora: {task_type: SEQ_CLS, inference_mode: true}\n") == [
            "run.yaml:4: lora.task_type: unknown key; the toolkit sets it: CAUSAL_LM",
            "run.yaml:4: lora.inference_mode: unknown key; the toolkit sets it: false, as the adapter is trained",
        ]
        assert problems(MINIMAL + "lora: {rank_pattern: {q_proj: abc}}\n") == [
            "run.yaml:4: lora.rank_pattern: expected a whole number, not abc"
        ]

    def test_lora_under_two_names(self, problems: Problems) -> None:
        found = problems(MINIMAL + "lora: {alpha: 1, lora_alpha: 2}\n")
        assert found == ["run.yaml:4: lora.lora_alpha: the same as lora.alpha; keep one of them"]

    def test_callbacks(self, load: Load) -> None:
        text = "callbacks:\n  - curve\n  - metrics_file: {every: 5, name: '5', rate: 1e-3}\n  - json.JSONDecoder:\n"
        assert load(MINIMAL + text).callbacks == [
            CallbackArguments("curve"),
            CallbackArguments("metrics_file", {"every": 5, "name": "5", "rate": 1e-3}),
            CallbackArguments("json.JSONDecoder"),
        ]

    @pytest.mark.parametrize(
        ("callbacks", "message"),
        [
            ("curve", "callbacks: expected a list of names, or of {name: {option: value}}, not curve"),
            ("[{curve: , every: 5}]",
             "callbacks.0: expected one name, with its options below it: {name: {option: value}}, not curve, every"),
            ("[curve: 5]", "callbacks.0.curve: expected a mapping of options, not 5"),
            ("[[curve]]", "callbacks.0: expected text, not a list"),
            ("[curv]", f"callbacks.0: unknown callback 'curv'; did you mean 'curve'? (known: {KNOWN}; or a dotted path "
             "such as my.module.Thing)"),
            ("[nowhere.Thing]",
             "callbacks.0: callback 'nowhere.Thing': no module named 'nowhere'; is its folder on PYTHONPATH?"),
        ],
    )  # fmt: skip
    def test_callbacks_refused(self, problems: Problems, callbacks: str, message: str) -> None:
        assert problems(f"{MINIMAL}callbacks: {callbacks}\n") == [f"run.yaml:4: {message}"]

    def test_metrics_and_formats_are_looked_up(self, load: Load, problems: Problems) -> None:
        own = MODEL + TRAINING + "data: {train: train.jsonl, format: json.loads}\nevaluation: {metrics: [json.loads]}\n"
        assert vars(load(own).data)["format"] == "json.loads"
        assert load(own).evaluation.metrics == ["json.loads"]
        (metric,) = problems(MINIMAL + "evaluation: {metrics: [exact]}\n")
        assert metric.startswith(
            "run.yaml:4: evaluation.metrics: unknown metric 'exact'; did you mean 'exact_match'? ("
        )
        (row_format,) = problems(MODEL + TRAINING + "data: {train: train.jsonl, format: alpca}\n")
        assert row_format.startswith("run.yaml:3: data.format: unknown format 'alpca'; did you mean 'alpaca'? (known: ")
        (no_list,) = problems(MINIMAL + "evaluation: {metrics: exact_match}\n")
        assert no_list == "run.yaml:4: evaluation.metrics: expected a list of texts, not exact_match"

    def test_fields_of_transformers_that_are_ours_by_another_name(self, load: Load, folder: Path) -> None:
        (folder / "ds.json").write_text("{}")
        (folder / "checkpoint-3").mkdir()
        config = load(
            f"{MODEL}{DATA}training: {{output_dir: out, deepspeed: ds.json, resume_from_checkpoint: checkpoint-3}}\n"
        )
        assert config.distributed == DistributedArguments(deepspeed="ds.json")
        assert config.training == {"output_dir": "out", "resume": "checkpoint-3"}
        assert load(training("resume_from_checkpoint: true")).training["resume"] == "auto"
        assert "resume" not in load(training("resume_from_checkpoint: false")).training
        assert load(training("deepspeed: {a: 1}")).training["deepspeed"] == {"a": 1}
