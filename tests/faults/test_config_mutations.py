"""Whatever is done to a configuration, it is accepted or refused in words that name the place; never another error."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sft_toolkit.config import load_config
from sft_toolkit.config_file.schema import SECTIONS, section_keys
from sft_toolkit.errors import ConfigError
from sft_toolkit.running.checks import check_run

VALID: dict[str, Any] = {
    "model": {"name_or_path": "model", "dtype": "auto"},
    "data": {
        "train": [{"path": "train.jsonl", "weight": 1.0}, "train.jsonl"],
        "eval": {"short": "train.jsonl", "long": ["train.jsonl"]},
        "max_length": 64,
        "packing": True,
    },
    "lora": {"r": 4, "targets": ["q_proj"], "variant": "rslora", "use_dora": False},
    "training": {
        "output_dir": "out",
        "learning_rate": 1e-4,
        "max_steps": 3,
        "eval_strategy": "steps",
        "save_strategy": "steps",
        "lr_scheduler_type": "cosine",
        "lr_scheduler_kwargs": {"num_cycles": 0.5},
        "report_to": "none",
    },
    "distributed": {"strategy": "auto", "offload_optimizer": False},
    "callbacks": ["curve", {"progress": {}}],
    "evaluation": {"generate": 2, "metrics": ["exact_match"]},
}
SEARCH = {"sweep": {"search": {"training.learning_rate": [1e-4, 1e-3]}}}
JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3.5, 1e308, -(10**30), "", "x", "none", "auto", "5e-5", "a.b", "os.nope", "/",
    "*.jsonl", "~0", [], [[]], [None], ["x", 1], {}, {"x": 1}, {"": {"": None}}, {"name": {"option": 1}},
]  # fmt: skip
Place = tuple[str | int, ...]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with what the valid configuration names."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "train.jsonl").write_text('{"text": "a"}\n')
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def refusals(document: Any, *overrides: str) -> list[str]:
    """What `check` says; any other exception is the fault that these tests look for."""
    Path("run.yaml").write_text(yaml.safe_dump(document, sort_keys=False, allow_unicode=True), encoding="utf-8")
    problems: list[str] = []
    try:
        check_run(load_config("run.yaml", overrides))
    except ConfigError as error:
        problems = error.problems
    assert all(problem.strip() for problem in problems)
    return problems


def places(value: Any, above: Place = ()) -> Iterator[Place]:
    """Where something stands in a nested document."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in entries:
        yield (*above, key)
        yield from places(inner, (*above, key))


PLACES = list(places(VALID))


def test_the_configuration_that_is_mutated_is_valid(folder: Path) -> None:
    assert refusals(VALID) == []


@settings(
    max_examples=300, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(
    mutations=st.lists(
        st.tuples(
            st.sampled_from(PLACES), st.sampled_from(["value", "remove", "rename", "twin"]), st.sampled_from(JUNK)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_mutations(folder: Path, mutations: list[tuple[Place, str, Any]]) -> None:
    document = copy.deepcopy(VALID)
    for place, kind, junk in mutations:
        mutate(document, place, kind, junk)
    refusals(document)


def mutate(document: Any, place: Place, kind: str, junk: Any) -> None:
    """Change one entry, where it is still there."""
    *above, last = place
    for key in above:
        if not isinstance(document, dict | list) or (isinstance(document, dict) and key not in document):
            return
        if isinstance(document, list) and not (isinstance(key, int) and key < len(document)):
            return
        document = cast(Any, document)[key]
    if isinstance(document, dict) and last in document:
        value = document[last]
        if kind == "value":
            document[last] = junk
        elif kind == "remove":
            del document[last]
        elif kind == "rename":
            document[f"{last}s" if junk != "" else ""] = document.pop(last)
        else:
            document[str(junk)] = value
    elif isinstance(document, list) and isinstance(last, int) and last < len(document):
        document[last] = junk


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "callbacks"])
def test_every_key_with_odd_values(folder: Path, section: str) -> None:
    """Each key of each section alone: what is refused is refused under its name."""
    odd: list[Any] = [None, -1, 0.5, "x", {"x": 1}]
    for key in section_keys(section):
        for value in odd:
            document = copy.deepcopy({**VALID, **SEARCH} if section == "sweep" else VALID)
            document[section][key] = value
            found = refusals(document)
            assert not found or any(key in problem.lower() or section in problem for problem in found), (
                key,
                value,
                found,
            )


@settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(text=st.text(max_size=40), place=st.sampled_from(PLACES))
def test_overrides(folder: Path, text: str, place: Place) -> None:
    refusals(VALID, f"{'.'.join(map(str, place))}={text}", text)


@settings(
    max_examples=60, deadline=None, database=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(cut=st.integers(0, 900), inserted=st.text(max_size=6), suffix=st.sampled_from(["yaml", "json"]))
def test_text_that_is_cut_or_broken(folder: Path, cut: int, inserted: str, suffix: str) -> None:
    whole = yaml.safe_dump(VALID, sort_keys=False)
    path = folder / f"broken.{suffix}"
    path.write_text(whole[:cut] + inserted + whole[cut:][: len(whole) // 2], encoding="utf-8", newline="")
    with suppress(ConfigError):
        load_config(path)
