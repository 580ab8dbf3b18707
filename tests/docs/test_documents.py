"""What the documents say is true: configurations parse, snippets compile, links lead somewhere."""

from __future__ import annotations

import ast
import re
import runpy
from pathlib import Path

import pytest

import sft_toolkit
from sft_toolkit import load_config

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


def test_the_readmes_yaml_is_a_valid_run(tmp_path: Path) -> None:
    (written,) = blocks(README, "yaml")
    path = tmp_path / "run.yaml"
    path.write_text(written)
    config = load_config(path)
    assert config.model.name_or_path == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert config.training["global_batch_size"] == 8
    assert len(written.splitlines()) <= 11


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "runs").glob("*.yaml")), ids=lambda p: p.name)
def test_every_shipped_run_parses_and_says_how_it_is_started(path: Path, tmp_path: Path) -> None:
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first == f"# accelerate launch train.py --config configs/runs/{path.name}"
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert load_config(path, [f"model.name_or_path={model}"]).training["output_dir"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_python_snippets_compile_and_name_what_exists(path: Path) -> None:
    for snippet in blocks(path.read_text(encoding="utf-8"), "python"):
        for node in ast.walk(ast.parse(snippet)):
            if isinstance(node, ast.ImportFrom) and node.module == "sft_toolkit":
                assert {alias.name for alias in node.names} <= set(sft_toolkit.__all__)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (path.parent / target).exists(), target


def test_make_has_the_two_commands_of_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for command in re.findall(r"^make (\w+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{command}:", makefile, flags=re.MULTILINE), command


def test_nothing_names_a_machine() -> None:
    machine = re.compile(r"(?<![\w.])/(?:root|home|farm|work)/")
    for path in [*ROOT.glob("sft_toolkit/**/*.py"), *ROOT.glob("configs/**/*.*"), *DOCUMENTS]:
        assert not machine.search(path.read_text(encoding="utf-8")), path


def test_the_list_of_keys_is_up_to_date() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "make_config_doc.py"))["page"]()
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == written
