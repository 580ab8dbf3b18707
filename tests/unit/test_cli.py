"""The command line itself: options, overrides and exit codes, without a run."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from sft_toolkit.cli import main

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_are_quick_and_load_no_torch(option: str) -> None:
    code = (
        f"import sys, sft_toolkit.cli as cli\n"
        f"try: cli.main(['{option}'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('LOADED', sorted({'torch', 'transformers', 'numpy', 'datasets'} & set(sys.modules)))"
    )
    began = time.process_time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.endswith("LOADED []\n")
    assert time.process_time() - began < 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "the following arguments are required: COMMAND"),
        ("trian --config run.yaml", "invalid choice: 'trian'"),
        ("train", "the following arguments are required: --config"),
        ("train --config run.yaml --training.seed=3",
         "unrecognized arguments: --training.seed=3; overrides are written without dashes: training.seed=3"),
        ("train --config run.yaml --seed 3", "unrecognized arguments: --seed"),
        ("preview --config run.yaml --rows 0", "argument --rows: expected a whole number from 1 on, not 0"),
        ("preview --config run.yaml --rows=-1", "argument --rows: expected a whole number from 1 on, not -1"),
        ("merge --adapter a", "the following arguments are required: --output"),
    ],
)  # fmt: skip
def test_a_line_that_is_wrong(line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(line.split())
    streams = capsys.readouterr()
    assert end.value.code == 2
    assert streams.out == ""
    assert message in streams.err


@pytest.mark.parametrize("line", ["check --config {} a.b=1 c.d=2", "check a.b=1 --config {} c.d=2"])
def test_overrides_stand_anywhere(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("training: {output_dir: out}\n")
    assert main(line.format(file).split()) == 2
    message = capsys.readouterr().err
    assert "override 'a.b=1': a: unknown section" in message
    assert "override 'c.d=2': c: unknown section" in message


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("none.yaml", None, "none.yaml: no such file or folder"),
        ("empty.yaml", "", "empty.yaml: the file is empty; expected the sections model, data and training"),
        (
            "list.yaml",
            "- model\n",
            "list.yaml: not a mapping but a list; expected the sections model, data and training",
        ),
        ("text.yaml", "model\n", "text.yaml: not a mapping but model; expected the sections model, data and training"),
        ("bad.json", "{", "bad.json:1: not valid JSON"),
    ],
)
def test_a_file_that_is_no_configuration(
    name: str, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    assert main(["train", "--config", str(tmp_path / name)]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_is_no_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.yaml").write_text("")
    assert main(["check", "--config", str(tmp_path)]) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: a folder; expected a YAML or JSON file; it holds run.yaml\n"
