"""Files that are not there, keys that contradict one another."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.config_file.texts import DATA, MINIMAL, MODEL, TRAINING, Load, Problems, training


class TestChecks:
    def test_what_is_required(self, problems: Problems) -> None:
        assert problems("model: {}\n") == [
            "run.yaml:1: model.name_or_path: required: the folder or hub id of the base model",
            "run.yaml: data.train: required: a file, a glob or a hub id, or a list of those",
            "run.yaml: training.output_dir: required: the folder of checkpoints, logs and the final model",
        ]

    @pytest.mark.parametrize("empty", ["", '""', "null"])
    def test_what_is_required_but_empty(self, problems: Problems, empty: str) -> None:
        name, out = problems(f"model: {{name_or_path: {empty}}}\n{DATA}training: {{output_dir: {empty}}}\n")
        assert name.startswith("run.yaml:1: model.name_or_path: ")
        assert out == "run.yaml:3: training.output_dir: required: the folder of checkpoints, logs and the final model"

    def test_the_model(self, problems: Problems, load: Load, folder: Path) -> None:
        for name in ("smollm2", "weights.gguf"):
            (folder / name).mkdir() if name == "smollm2" else (folder / name).write_text("x")
        (folder / "smollm2" / "model.Q4_1.gguf").write_text("x")
        model = "model: {name_or_path: %s}\n" + DATA + TRAINING
        assert load(model % "./smollm2").model.name_or_path == "./smollm2"
        assert problems(model % "./smolm2") == [
            "run.yaml:1: model.name_or_path: './smolm2': no such file or folder; did you mean 'smollm2'?"
        ]
        assert problems(model % "a/b/c") == [
            "run.yaml:1: model.name_or_path: 'a/b/c': no such file or folder; the folder 'a/b' does not exist"
        ]
        assert problems(model % "weights.gguf") == [
            "run.yaml:1: model.name_or_path: 'weights.gguf' is a file; expected a folder or a hub id; "
            "write name_or_path: . and gguf_file: weights.gguf"
        ]
        assert problems(model % "smollm2, gguf_file: model.Q4.gguf") == [
            "run.yaml:1: model.gguf_file: 'model.Q4.gguf' is not in smollm2; did you mean 'model.Q4_1.gguf'?"
        ]
        assert problems(model % "org/name, chat_template: chat.jinja") == [
            "run.yaml:1: model.chat_template: 'chat.jinja': no such file or folder"
        ]

    def test_data_files(self, problems: Problems, load: Load) -> None:
        text = MODEL + TRAINING + "data:\n  train: %s\n"
        for there in ("train.jsonl", '"*.jsonl"', "org/dataset", "hf://datasets/a/b.csv", "."):
            load(text % there)
        assert problems(text % "trian.jsonl") == [
            "run.yaml:4: data.train: 'trian.jsonl': no such file or folder; did you mean 'train.jsonl'?"
        ]
        assert problems(text % "[train.jsonl, x/y.csv]") == [
            "run.yaml:4: data.train.1: 'x/y.csv': no such file or folder; the folder 'x' does not exist"
        ]
        assert problems(text % '"*.csv"') == ["run.yaml:4: data.train: no file matches '*.csv'"]
        assert problems(text % "train.jsonl\n  eval: {dev: dev.jsonl}") == [
            "run.yaml:5: data.eval.dev: 'dev.jsonl': no such file or folder"
        ]

    def test_held_out_rows(self, problems: Problems, load: Load) -> None:
        data = MODEL + TRAINING + "data: {train: train.jsonl, %s}\n"
        assert load(data % "val_split: 0.02").data.val_split == 0.02
        assert load(data % "val_split: 200").data.val_split == 200
        assert problems(data % "val_split: 2.5") == [
            "run.yaml:3: data.val_split: expected a share below 1 or a number of rows, not 2.5"
        ]
        assert problems(data % "val_split: 5, eval: train.jsonl") == [
            "run.yaml:3: data.val_split: contradicts data.eval: held-out rows come from one of them"
        ]
        assert problems(training("eval_strategy: steps") + "evaluation: {generate: 5}\n") == [
            "run.yaml:5: training.eval_strategy: needs held-out rows; set data.eval or data.val_split",
            "run.yaml:6: evaluation.generate: needs held-out rows; set data.eval or data.val_split",
        ]

    def test_output_dir(self, problems: Problems, load: Load, folder: Path) -> None:
        (folder / "file").write_text("x")
        text = MODEL + DATA + "training: {output_dir: %s}\n"
        assert load(text % "new/er").training["output_dir"] == "new/er"
        assert problems(text % "file") == [
            "run.yaml:3: training.output_dir: 'file' is a file; expected a folder, new or existing"
        ]
        assert problems(text % "file/out") == [
            "run.yaml:3: training.output_dir: 'file/out' can't be made: file is a file; "
            "expected a folder, new or existing"
        ]

    def test_the_home_of_nobody(self, problems: Problems, folder: Path) -> None:
        assert problems(MODEL + DATA + "training: {output_dir: ~0/out}\n") == [
            "run.yaml:3: training.output_dir: '~0/out': no user '0' has a home here; "
            "for a folder of that name write ./~0/out"
        ]
        (folder / "~0").mkdir()
        (problem,) = problems(MODEL + DATA + "training: {output_dir: out}\nlora: {adapter: ~0}\n")
        assert "~0" in problem

    def test_resume(self, problems: Problems, load: Load, folder: Path) -> None:
        (folder / "out" / "checkpoint-10").mkdir(parents=True)
        for value in ("auto", "never", "out/checkpoint-10"):
            assert load(training(f"resume: {value}")).training["resume"] == value
        expected = "run.yaml:5: training.resume: expected auto, never or the folder of a checkpoint, not "
        assert problems(training("resume: train.jsonl")) == [f"{expected}'train.jsonl', a file"]
        assert problems(training("resume: nevr")) == [f"{expected}'nevr'; did you mean 'never'?"]
        assert problems(training("resume: out/checkpoint-11")) == [
            f"{expected}'out/checkpoint-11': no such file or folder; did you mean 'out/checkpoint-10'?"
        ]

    def test_two_names_for_one_thing(self, problems: Problems) -> None:
        found = problems(training("gradient_checkpointing: true\n  activation_checkpointing: true"))
        message = "training.gradient_checkpointing: the same as training.activation_checkpointing; keep one of them"
        assert found == [f"run.yaml:5: {message}"]

    def test_an_adapter_that_could_learn_nothing(self, problems: Problems) -> None:
        text = training("lora_plus_ratio: 0") + "lora: {alpha: 0, dropout: 1, targets: '(.*'}\n"
        assert problems(text) == [
            "run.yaml:5: training.lora_plus_ratio: 0 keeps the B matrices at zero; leave it out to learn as the others "
            "do",
            "run.yaml:6: lora.dropout: 1 is not below 1",
            "run.yaml:6: lora.targets: '(.*' is no regular expression: missing ), unterminated subpattern at position "
            "0",
            "run.yaml:6: lora.alpha: 0 takes the adapter out of the model; leave it out for a scale of 2",
        ]

    def test_adapter(self, problems: Problems, folder: Path) -> None:
        (folder / "adapter").mkdir()
        assert problems(MINIMAL + "lora: {adapter: adaptr}\n") == [
            "run.yaml:4: lora.adapter: 'adaptr': no such file or folder; did you mean 'adapter'?"
        ]
        assert problems(MINIMAL + "lora: {adapter: adapter}\n") == [
            "run.yaml:4: lora.adapter: 'adapter' is no saved adapter: it has no adapter_config.json"
        ]

    @pytest.mark.parametrize(
        ("targets", "message"),
        [
            ("[]", "names nothing; leave it out for auto, or leave out section lora to train all weights"),
            ("all", "no module has the name 'all'; did you mean 'all-linear'?"),
        ],
    )
    def test_targets(self, problems: Problems, targets: str, message: str) -> None:
        assert problems(MINIMAL + f"lora: {{targets: {targets}}}\n") == [f"run.yaml:4: lora.targets: {message}"]

    def test_fsdp_words(self, problems: Problems) -> None:
        assert problems(training("fsdp: ful_shard")) == [
            "run.yaml:5: training.fsdp: unknown 'ful_shard' (write true, and options in fsdp_config); "
            "did you mean 'full_shard'?"
        ]
        assert problems(training("fsdp: true") + "distributed: {strategy: zero2}\n") == [
            "run.yaml:5: training.fsdp: contradicts distributed.strategy: zero2; keep one of them"
        ]

    def test_distributed(self, problems: Problems, load: Load, folder: Path) -> None:
        (folder / "ds.json").write_text("{}")
        distributed = MINIMAL + "distributed: {%s}\n"
        assert problems(distributed % "deepspeed: ds.jsn") == [
            "run.yaml:4: distributed.deepspeed: 'ds.jsn': no such file or folder; did you mean 'ds.json'?"
        ]
        assert problems(distributed % "deepspeed: ds.json, strategy: ddp, offload_optimizer: cpu") == [
            "run.yaml:4: distributed.deepspeed: contradicts distributed.strategy: ddp; leave one of them out",
            "run.yaml:4: distributed.offload_optimizer: contradicts distributed.deepspeed: "
            "that file decides about offload",
        ]
        assert problems(distributed % "strategy: zero2, offload_param: nvme") == [
            "run.yaml:4: distributed.offload_param: needs distributed.strategy zero3, not zero2",
            "run.yaml:4: distributed.offload_param: nvme needs distributed.nvme_path, a folder on a local disk",
        ]
        assert problems(training("on_nonfinite: skip") + "distributed: {strategy: zero2}\n") == [
            "run.yaml:5: training.on_nonfinite: skip can't reach the gradients of zero2"
        ]
        assert load(training("ddp_backend: gloo")).distributed.backend == "gloo"
        assert load(training("ddp_backend: gloo")).training == {"output_dir": "out"}
        assert problems(training("ddp_backend: glo")) == [
            "run.yaml:5: training.ddp_backend: expected one of auto, nccl, gloo, mpi, xccl, hccl, cncl, mccl, not glo; "
            "did you mean 'gloo'?"
        ]
        both = training("{a: b}").replace("  {a: b}", "  ddp_backend: nccl\n  deepspeed: {a: 1}")
        assert problems(both + "distributed: {backend: gloo, deepspeed: ds.json}\n") == [
            "run.yaml:5: training.ddp_backend: contradicts distributed.backend; keep one of them",
            "run.yaml:6: training.deepspeed: contradicts distributed.deepspeed; keep one of them",
        ]
