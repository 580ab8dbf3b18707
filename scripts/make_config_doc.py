"""Writes docs/config.md from the fields of `sft_toolkit/args.py`: `python scripts/make_config_doc.py`."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from sft_toolkit import args

HEAD = """# Every key

Written by `scripts/make_config_doc.py` from `sft_toolkit/args.py`; change it there. A key that is not listed is an
error with a suggestion. `section.key=value` on the command line replaces a value of the file.
"""
SECTIONS: list[tuple[str, type, str]] = [
    ("model", args.ModelArguments, ""),
    (
        "data",
        args.DataArguments,
        "`train` takes a path, a list of paths, a mapping or a list of mappings; `eval` also `{name: source}`.",
    ),
    ("data.train[] and data.eval[]", args.SourceArguments, "A source written as a mapping."),
    (
        "lora",
        args.LoraArguments,
        "Leave the section out for a full fine-tune. Any other field of `peft.LoraConfig` may stand beside these.",
    ),
    (
        "training",
        args.TrainingExtras,
        "Beside these, every field of `transformers.TrainingArguments`; `output_dir` is required.",
    ),
    ("distributed", args.DistributedArguments, ""),
    ("evaluation", args.EvaluationArguments, "Answers generated for held-out rows, before and after training."),
    (
        "sweep",
        args.SweepArguments,
        "`train` with this section searches, one run per trial, and needs `pip install 'sft-toolkit[sweep]'`.",
    ),
]
CALLBACKS = """## callbacks

A list of names, or `name: {{option: value}}`, or the dotted path of a class. Built in: {names}.
"""


def page() -> str:
    """The whole document."""
    from sft_toolkit.registry import BUILT_IN

    parts = [HEAD, *(section(title, of, note) for title, of, note in SECTIONS)]
    parts.append(CALLBACKS.format(names=", ".join(f"`{name}`" for name in sorted(BUILT_IN["callback"]))))
    return "\n".join(parts)


def section(title: str, of: type, note: str) -> str:
    """A heading, a sentence, and a row per field."""
    rows = [f"| `{f.name}` | {kind(of, f)} | {default(f)} | {meaning(f)} |" for f in ordered(of)]
    lines = [
        f"## {title}",
        "",
        *([note, ""] if note else []),
        "| key | type | default | meaning |",
        "|---|---|---|---|",
    ]
    return "\n".join([*lines, *rows, ""])


def ordered(of: type) -> list[Field[Any]]:
    """Own fields first, inherited ones behind them; `extra` holds what has no field and is no key."""
    own = inspect.get_annotations(of)
    return sorted((f for f in fields(of) if f.name != "extra"), key=lambda f: f.name not in own)


def kind(of: type, field: Field[Any]) -> str:
    """The type as a reader writes it: choices spelled out."""
    # Not field.type, which HfArgumentParser overwrites with a class of its own choice.
    text = next(str(a[field.name]) for c in of.__mro__ if field.name in (a := inspect.get_annotations(c)))
    if text == "Named":
        return "name or {name: options}"
    choices = getattr(args, text, None)
    if choices is not None and hasattr(choices, "__args__"):
        text = ", ".join(
            str(choice).lower() if isinstance(choice, bool) else str(choice) for choice in choices.__args__
        )
    text = re.sub(r"Literal\[(.*?)\]", lambda m: re.sub("[\"']", "", m[1]), text)
    return text.replace(" | None", ", null").replace("|", "or")


def default(field: Field[Any]) -> str:
    """As it would be written in YAML."""
    value = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
    if field.metadata.get("required"):
        return "required"
    if value is None or value in ("", [], {}):
        return ""
    return f"`{str(value).lower() if isinstance(value, bool) else value}`".replace("'", "")


def meaning(field: Field[Any]) -> str:
    """The help text and the limits."""
    limits = [f"{name} {field.metadata[name]:g}" for name in ("minimum", "maximum", "below") if name in field.metadata]
    return field.metadata["help"] + (f" ({', '.join(limits)})" if limits else "")


if __name__ == "__main__":
    path = Path(__file__).parents[1] / "docs" / "config.md"
    path.write_text(page(), encoding="utf-8")
    print(f"written: {path.name}")
