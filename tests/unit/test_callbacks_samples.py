from __future__ import annotations

import io
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from transformers import TrainerControl, TrainingArguments

from sft_toolkit.callbacks.samples import LONGEST, SamplesCallback, table
from tests.unit.callback_runs import arguments, state, stock_trainer


@dataclass
class Answers:
    prompts: list[str]
    answers: list[str]
    references: list[str]
    scores: dict[str, float]


BEFORE = Answers(["q1", "q2"], ["no", "x"], ["yes", "x"], {"exact_match": 0.5, "token_f1": 0.25})
AFTER = Answers(["q1", "q2"], ["yes", "x"], ["yes", "x"], {"exact_match": 1.0, "token_f1": 0.75})
AS_JSON = {
    "before": {
        "scores": {"exact_match": 0.5, "token_f1": 0.25},
        "rows": [
            {"prompt": "q1", "answer": "no", "reference": "yes"},
            {"prompt": "q2", "answer": "x", "reference": "x"},
        ],
    },
    "after": {
        "scores": {"exact_match": 1.0, "token_f1": 0.75},
        "rows": [
            {"prompt": "q1", "answer": "yes", "reference": "yes"},
            {"prompt": "q2", "answer": "x", "reference": "x"},
        ],
    },
}


class Scorer:
    """Answers as listed, one after the other, and keeps the models it was given."""

    def __init__(self, *answers: Answers) -> None:
        self.answers = list(answers)
        self.models: list[nn.Module] = []

    def __call__(self, model: nn.Module) -> Answers:
        self.models.append(model)
        return self.answers.pop(0)


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "samples.json").read_text())
    return found


@pytest.fixture
def args(tmp_path: Path) -> TrainingArguments:
    return arguments(tmp_path)


def test_the_table_shows_answers_in_blocks_and_scores_in_lines() -> None:
    assert table(BEFORE, AFTER, show=1) == (
        "---------------------------------------- held-out answer 1 -----------------------------------------\n"
        "prompt    q1\n"
        "expected  yes\n"
        "before    no\n"
        "after     yes\n"
        "------------------------------------- score on 2 held-out rows -------------------------------------\n"
        "               before     after\n"
        "exact_match     0.500     1.000\n"
        "token_f1        0.250     0.750\n"
    )


def test_without_a_first_half_the_column_stays_open() -> None:
    assert table(None, AFTER, show=0).splitlines()[1:] == [
        "               before     after",
        "exact_match         -     1.000",
        "token_f1            -     0.750",
    ]


def test_long_texts_are_cut_where_they_matter_least_and_keep_their_layout() -> None:
    long = Answers(["a" * LONGEST + "b"], ['{\n  "a": 1\n}'], ["c" * LONGEST + "d"], {})
    lines = table(None, long, show=1).splitlines()
    assert lines[1] == "prompt    … " + "a" * 88
    assert lines[7] == " " * 10 + "a" * 61 + "b"
    assert lines[8] == "expected  " + "c" * 90
    assert lines[14] == " " * 10 + "c" * 60 + " …"
    assert lines[15:18] == ["after     {", '            "a": 1', "          }"]
    assert "after     (nothing)" in table(None, Answers(["q"], [" \n"], ["r"], {}), show=1).splitlines()


def test_a_run_scores_before_and_after_and_keeps_both(tmp_path: Path) -> None:
    out, scorer = io.StringIO(), Scorer(BEFORE, AFTER)
    trainer = stock_trainer(tmp_path, [SamplesCallback(scorer, show=2, stream=out)])
    trainer.train()
    assert [model is trainer.model for model in scorer.models] == [True, True]
    assert read(tmp_path) == AS_JSON
    assert out.getvalue() == table(BEFORE, AFTER, 2)


def test_a_resumed_run_reads_the_first_half_back(args: TrainingArguments, tmp_path: Path) -> None:
    control = TrainerControl()
    first = SamplesCallback(Scorer(BEFORE), interrupted=lambda: True)
    first.on_train_begin(args, state(0), control, model=nn.Identity())
    first.on_train_end(args, state(4), control, model=nn.Identity())
    assert read(tmp_path) == {"before": AS_JSON["before"]}

    out = io.StringIO()
    resumed = SamplesCallback(Scorer(AFTER), stream=out)
    resumed.on_train_begin(args, state(4), control, model=nn.Identity())
    resumed.on_train_end(args, state(10), control, model=nn.Identity())
    assert read(tmp_path) == AS_JSON
    assert out.getvalue() == table(BEFORE, AFTER, 3)


def test_a_resumed_run_without_the_file_has_only_an_after(args: TrainingArguments, tmp_path: Path) -> None:
    resumed = SamplesCallback(Scorer(AFTER), stream=io.StringIO())
    resumed.on_train_begin(args, state(4), TrainerControl(), model=nn.Identity())
    resumed.on_train_end(args, state(10), TrainerControl(), model=nn.Identity())
    assert read(tmp_path) == {"after": AS_JSON["after"]}


def test_other_ranks_answer_too_and_write_nothing(args: TrainingArguments, tmp_path: Path) -> None:
    out, scorer = io.StringIO(), Scorer(BEFORE, AFTER)
    callback = SamplesCallback(scorer, stream=out)
    other = state(0, is_world_process_zero=False)
    callback.on_train_begin(args, other, TrainerControl(), model=nn.Identity())
    callback.on_train_end(args, other, TrainerControl(), model=nn.Identity())
    assert (len(scorer.models), out.getvalue(), list(tmp_path.iterdir())) == (2, "", [])


def test_a_stream_without_unicode_does_not_end_the_run(args: TrainingArguments) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    callback = SamplesCallback(Scorer(BEFORE, Answers(["q"], ["ä"], ["ä"], {})), stream=out)
    callback.on_train_begin(args, state(0), TrainerControl(), model=nn.Identity())
    callback.on_train_end(args, state(1), TrainerControl(), model=nn.Identity())
    out.seek(0)
    assert "after     \\xe4" in out.read().splitlines()
