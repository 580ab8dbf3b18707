"""`samples.html`: held-out answers before and after as a table, for the browser or a notebook."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Protocol

STYLE = """body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; color: #1a1a1a; background: #fff }
table { border-collapse: collapse; width: 100%; table-layout: fixed } caption { text-align: left; padding: .5rem 0 }
th, td { border: 1px solid #ccc; padding: .4rem .6rem; vertical-align: top; text-align: left }
td { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.45 ui-monospace, monospace }
td.right { background: #e6f4ea } td.wrong { background: #fdecea } .scores { width: auto; margin-bottom: 1.5rem }"""


class Answers(Protocol):
    """What `sft_toolkit.evaluation.score` returns."""

    prompts: list[str]
    answers: list[str]
    references: list[str]
    scores: dict[str, float]


def page(before: Answers | None, after: Answers) -> str:
    """A whole page: the scores, then a row for each question. An answer equal to the expected one is green."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>Held-out answers</title>\n'
        f"<style>\n{STYLE}\n</style>\n</head>\n<body>\n{tables(before, after)}\n</body>\n</html>\n"
    )


def tables(before: Answers | None, after: Answers) -> str:
    """The two tables alone, without a style."""
    earlier: Mapping[str, float] = {} if before is None else before.scores
    scores = "".join(
        f"<tr><th scope=row>{escape(name)}</th><td>{_number(earlier.get(name))}</td><td>{_number(value)}</td></tr>\n"
        for name, value in after.scores.items()
    )
    rows = "".join(_row(before, after, number) for number in range(len(after.answers)))
    middle = "" if before is None else "<th>before</th>"
    return (
        f'<table class="scores">\n<tr><th></th><th>before</th><th>after</th></tr>\n{scores}</table>\n'
        f"<table>\n<tr><th>question</th><th>expected</th>{middle}<th>after</th></tr>\n{rows}</table>"
    )


def _row(before: Answers | None, after: Answers, number: int) -> str:
    expected = after.references[number]
    answers = [after.answers[number]]
    if before is not None:
        answers.insert(0, before.answers[number] if number < len(before.answers) else "")
    cells = "".join(
        f'<td class="{"right" if answer.strip() == expected.strip() else "wrong"}">{escape(answer)}</td>'
        for answer in answers
    )
    return f"<tr><td>{escape(after.prompts[number])}</td><td>{escape(expected)}</td>{cells}</tr>\n"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
