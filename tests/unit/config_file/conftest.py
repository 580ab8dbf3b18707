"""A working directory with a data file in it, and two ways to load a configuration there."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_toolkit.config import RunConfig, load_config
from sft_toolkit.errors import ConfigError
from tests.unit.config_file.texts import Load, Problems


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the tests, with a data file in it."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    return tmp_path


@pytest.fixture
def load(folder: Path) -> Load:
    """Writes run.yaml and loads it."""

    def write_and_load(text: str, *overrides: str) -> RunConfig:
        (folder / "run.yaml").write_text(text, encoding="utf-8")
        return load_config("run.yaml", overrides)

    return write_and_load


@pytest.fixture
def problems(load: Load) -> Problems:
    """The error messages of a configuration."""

    def load_and_fail(text: str, *overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as error:
            load(text, *overrides)
        return error.value.problems

    return load_and_fail
