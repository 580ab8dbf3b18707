"""What can be wrong with the file before the first key is read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sft_toolkit.config import load_config
from sft_toolkit.errors import ConfigError
from tests.unit.config_file.texts import DATA, MINIMAL, MODEL, TRAINING, Load, Problems, training


class TestTheFile:
    def test_missing_with_a_near_name(self, folder: Path) -> None:
        (folder / "run.yaml").write_text(MINIMAL)
        assert self.refused("run.yml") == ["run.yml: no such file or folder; did you mean 'run.yaml'?"]
        assert self.refused("x/run.yml") == ["x/run.yml: no such file or folder; the folder 'x' does not exist"]

    def test_a_folder(self, folder: Path) -> None:
        (folder / "configs").mkdir()
        assert self.refused("configs") == ["configs: a folder; expected a YAML or JSON file"]
        (folder / "configs" / "a.yaml").write_text(MINIMAL)
        (folder / "configs" / "b.json").write_text("{}")
        held = "; it holds a.yaml, b.json"
        assert self.refused("configs") == [f"configs: a folder; expected a YAML or JSON file{held}"]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "run.yaml: the file is empty; expected the sections model, data and training"),
            ("# nothing\n\n", "run.yaml: the file is empty; expected the sections model, data and training"),
            ("- a\n- b\n", "run.yaml: not a mapping but a list; expected the sections model, data and training"),
            ("train it\n", "run.yaml: not a mapping but train it; expected the sections model, data and training"),
            ("null\n", "run.yaml: not a mapping but null; expected the sections model, data and training"),
            ("model:\n\tname_or_path: x\n",
             "run.yaml:2: not valid YAML: a tab where only spaces are allowed; indent with spaces"),
            ("model: {a: [1}\n",
             "run.yaml:1: not valid YAML: while parsing a flow sequence expected ',' or ']', but got '}'"),
            ("model: a: b\n", "run.yaml:1: not valid YAML: a second ': ' in this line, or a wrong indentation; "
             "quote a text that holds ': '"),
            ("model: {}\ndata:\n  train: *.jsonl\n",
             "run.yaml:3: not valid YAML: a text that starts with '*' or '&' needs quotes"),
            ("model: {}\n---\ndata: {}\n", "run.yaml:2: not valid YAML: a second document ('---'); expected one"),
            ("model: {}\nx: \x07\n", "run.yaml:2: not valid YAML: the character U+0007"),
        ],
    )  # fmt: skip
    def test_no_configuration_in_it(self, problems: Problems, text: str, message: str) -> None:
        assert problems(text) == [message]

    def test_no_text(self, folder: Path) -> None:
        (folder / "run.yaml").write_bytes(b"model: {}\nx: \xff\n")
        assert self.refused("run.yaml") == ["run.yaml:2: not UTF-8 text (byte 0xff)"]

    def test_byte_order_mark_and_windows_lines(self, folder: Path) -> None:
        (folder / "run.yaml").write_bytes(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())
        assert load_config("run.yaml").training == {"output_dir": "out"}

    def test_duplicate_keys(self, problems: Problems) -> None:
        text = f"{MODEL}{DATA}training:\n  output_dir: out\n  seed: 1\n  seed: 2\n{MODEL}"
        assert problems(text) == [
            "run.yaml:6: training.seed: duplicate key; first written in line 5",
            "run.yaml:7: model: duplicate key; first written in line 1",
        ]

    def test_duplicate_keys_in_a_nested_mapping(self, problems: Problems) -> None:
        found = problems(training("lr_scheduler_kwargs: {a: 1, a: 2}"))
        assert found == ["run.yaml:5: training.lr_scheduler_kwargs.a: duplicate key; first written in line 5"]

    def test_keys_that_are_no_text(self, problems: Problems) -> None:
        assert problems(MINIMAL + "[a]: 1\n") == ["run.yaml:4: top level: a key must be plain text, not a list"]

    def test_aliases_and_merge_keys(self, load: Load) -> None:
        text = (
            f"{MODEL}{TRAINING}data:\n  train: &base {{path: train.jsonl, max_rows: 3}}\n"
            "  eval: {a: *base, b: {<<: *base, max_rows: 5}}\n"
        )
        data = load(text, "data.eval.a.max_rows=4").data
        rows = [data.train[0].max_rows, data.eval["a"][0].max_rows, data.eval["b"][0].max_rows]
        assert rows == [3, 4, 5]

    def test_an_alias_of_itself(self, problems: Problems) -> None:
        found = problems(MINIMAL + "callbacks: [{curve: &x {a: *x}}]\n")
        assert found == ["run.yaml:4: callbacks.0.curve.a: an alias that contains itself"]

    def test_a_section_that_is_no_mapping(self, problems: Problems) -> None:
        assert problems(MODEL + DATA + "training: [a]\n") == [
            "run.yaml:3: training: expected a mapping of keys, not a list",
            "run.yaml:3: training.output_dir: required: the folder of checkpoints, logs and the final model",
        ]

    @staticmethod
    def refused(path: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load_config(path)
        return error.value.problems


class TestJson:
    def test_read(self, folder: Path) -> None:
        text = json.dumps(
            {
                "model": {"name_or_path": "org/name"},
                "data": {"train": ["train.jsonl"]},
                "training": {"output_dir": "out/\u00e9\U0001f600", "learning_rate": 5e-5, "bf16": False},
            },
            indent="\t",
        )
        (folder / "run.json").write_text(text)
        config = load_config("run.json", ["training.seed=7"])
        assert config.training == {"output_dir": "out/é😀", "learning_rate": 5e-5, "bf16": False, "seed": 7}

    def test_refused(self, folder: Path) -> None:
        (folder / "run.json").write_text('{\n "model": {"name_or_path": "org/name"},\n "training": {"bf16": "true"}\n}')
        assert TestTheFile.refused("run.json") == [
            'run.json:3: training.bf16: expected true or false, not the text "true"; remove the quotes',
            "run.json:3: training.output_dir: required: the folder of checkpoints, logs and the final model",
            "run.json: data.train: required: a file, a glob or a hub id, or a list of those",
        ]

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ('{\n "model": {},\n}', "run.json:3: not valid JSON: Expecting property name enclosed in double quotes"),
            ("model: {}", "run.json:1: not valid JSON: Expecting value"),
            (" ", "run.json: the file is empty; expected the sections model, data and training"),
            ("[]", "run.json: not a mapping but a list; expected the sections model, data and training"),
        ],
    )  # fmt: skip
    def test_no_json(self, folder: Path, text: str, message: str) -> None:
        (folder / "run.json").write_text(text)
        (found,) = TestTheFile.refused("run.json")
        # The wording of json.loads differs between Python releases.
        assert found.startswith(message.split("Expecting")[0])
