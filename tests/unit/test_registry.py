"""Names find their things: registered, built in, from an installed package, by dotted path; and say so when not."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit import registry
from sft_toolkit.errors import ConfigError
from sft_toolkit.registry import BUILT_IN, KINDS, build, known, lookup, register, unknown

CALLBACKS = ", ".join(sorted(BUILT_IN["callback"]))


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """What a test registers is forgotten after it."""
    before = {kind: dict(names) for kind, names in registry._registered.items()}
    yield
    for kind, names in before.items():
        registry._registered[kind] = names


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An importable folder `plugin_here`, gone again after the test."""
    folder = tmp_path / "plugin_here"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "things.py").write_text("class Loud:\n    def __init__(self, level, words=()): self.level = level\n")
    (folder / "broken.py").write_text("import missing_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("plugin_here", "plugin_here.things", "plugin_here.broken"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def refused(call: Any, *args: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        call(*args)
    return error.value.problems


class Quiet:
    """Something to register."""

    def __init__(self, every: int, path: str = "x") -> None:
        if every < 1:
            raise ValueError("every must be 1 or more")
        self.every, self.path = every, path


class TestRegister:
    def test_a_registered_name_is_found(self) -> None:
        assert register("callback", "quiet")(Quiet) is Quiet
        assert lookup("callback", "quiet") is Quiet
        assert "quiet" in known("callback")
        assert "quiet" not in known("metric")

    def test_the_same_thing_twice_is_no_conflict(self) -> None:
        register("callback", "quiet")(Quiet)
        register("callback", "quiet")(Quiet)
        again = type("Quiet", (), {"__module__": Quiet.__module__, "__qualname__": "Quiet"})
        register("callback", "quiet")(again)
        assert lookup("callback", "quiet") is again

    def test_a_name_that_is_taken(self) -> None:
        register("metric", "quiet")(Quiet)
        taken = f"metric 'quiet': the name is taken by {__name__}.Quiet; choose another one"
        assert refused(register("metric", "quiet"), dict) == [taken]
        built_in = (
            "callback 'curve': the name is taken by sft_toolkit.callbacks.curve.CurveCallback; choose another one"
        )
        assert refused(register("callback", "curve"), Quiet) == [built_in]

    def test_an_unknown_kind(self) -> None:
        kinds = "callback, metric, format, sampler, loss, transform, gradient_transform"
        message = f"unknown kind 'callbacks'; did you mean 'callback'? (kinds: {kinds})"
        assert refused(register, "callbacks", "x") == [message]
        assert refused(lookup, "callbacks", "x") == [message]


class TestLookup:
    def test_a_dotted_path(self, package: Path) -> None:
        assert lookup("callback", "plugin_here.things.Loud").__name__ == "Loud"
        assert lookup("callback", "plugin_here.things.Loud.__init__").__qualname__ == "Loud.__init__"

    def test_an_entry_point(self, package: Path) -> None:
        info = package / "plugin_here-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-here\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(
            "[sft_toolkit.callback]\nloud = plugin_here.things:Loud\nsad = plugin_here.things:Sad\n"
        )
        importlib.invalidate_caches()
        assert known("callback") == sorted([*CALLBACKS.split(", "), "loud", "sad"])
        assert lookup("callback", "loud").__name__ == "Loud"
        assert unknown("callback", "loud") is None
        assert refused(lookup, "callback", "sad") == [
            "callback 'sad' of plugin-here: plugin_here.things:Sad can't be imported: "
            "module 'plugin_here.things' has no attribute 'Sad'"
        ]

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("curv", f"unknown callback 'curv'; did you mean 'curve'? (known: {CALLBACKS}; "
             "or a dotted path such as my.module.Thing)"),
            ("xyzzy", f"unknown callback 'xyzzy' (known: {CALLBACKS}; or a dotted path such as my.module.Thing)"),
            ("nowhere.Thing", "callback 'nowhere.Thing': no module named 'nowhere'; is its folder on PYTHONPATH?"),
            ("plugin_here.things.Lout",
             "callback 'plugin_here.things.Lout': plugin_here.things has no 'Lout'; did you mean 'Loud'?"),
            ("plugin_here.thing.Loud", "callback 'plugin_here.thing.Loud': plugin_here has no 'thing'"),
            ("plugin_here.broken.Thing", "callback 'plugin_here.broken.Thing': plugin_here.broken can't be imported: "
             "No module named 'missing_dependency'"),
        ],
    )  # fmt: skip
    def test_not_found(self, package: Path, name: str, message: str) -> None:
        assert refused(lookup, "callback", name) == [message]

    def test_a_kind_without_names(self) -> None:
        message = "unknown transform 'x' (known: none; or a dotted path such as my.module.Thing)"
        assert refused(lookup, "transform", "x") == [message]

    def test_unknown_imports_nothing(self, package: Path) -> None:
        assert unknown("callback", "plugin_here.broken.Thing") is None
        assert unknown("callback", "a b.c") == (
            f"unknown callback 'a b.c' (known: {CALLBACKS}; or a dotted path such as my.module.Thing)"
        )
        assert "plugin_here" not in sys.modules

    @pytest.mark.parametrize("kind", KINDS)
    def test_every_built_in_name_can_be_looked_up(self, kind: str) -> None:
        found = {name: lookup(kind, name) for name in BUILT_IN[kind]}
        assert {name: f"{thing.__module__}.{thing.__qualname__}" for name, thing in found.items()} == BUILT_IN[kind]


class TestBuild:
    def test_options_are_passed(self) -> None:
        register("callback", "quiet")(Quiet)
        built = build("callback", "quiet", {"every": 5})
        assert (type(built), built.every, built.path) == (Quiet, 5, "x")

    def test_any_option_where_the_thing_takes_any(self) -> None:
        assert build("callback", "builtins.dict", {}) == {}
        register("loss", "free")(lambda **options: options)
        assert build("loss", "free", {"a": 1}) == {"a": 1}

    @pytest.mark.parametrize(
        ("options", "messages"),
        [
            ({"evry": 5, "every": 1}, ["unknown option 'evry'; did you mean 'every'? (accepted: every, path)"]),
            ({}, ["missing option 'every' (accepted: every, path)"]),
            (
                {"x": 1},
                ["unknown option 'x' (accepted: every, path)", "missing option 'every' (accepted: every, path)"],
            ),
            ({"every": 0}, ["every must be 1 or more"]),
        ],
    )
    def test_options_refused(self, options: dict[str, Any], messages: list[str]) -> None:
        register("callback", "quiet")(Quiet)
        assert refused(build, "callback", "quiet", options) == [f"callback 'quiet': {text}" for text in messages]

    def test_no_options_at_all(self) -> None:
        register("loss", "plain")(lambda: 1)
        expected = ["loss 'plain': unknown option 'a' (it takes no options)"]
        assert refused(build, "loss", "plain", {"a": 1}) == expected

    def test_a_thing_that_can_not_be_called(self) -> None:
        expected = ["loss 'sys.maxsize': 9223372036854775807 can't be called; expected a class or a function"]
        assert refused(build, "loss", "sys.maxsize", {}) == expected


def test_the_names_are_known_without_importing_torch() -> None:
    code = (
        "import sys; from sft_toolkit.registry import known; known('callback'); known('metric')\n"
        "print([m for m in ('torch', 'transformers', 'evaluate', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[2], check=True
    )
    assert done.stdout == "[]\n"
