"""The same held-out questions before and after training, side by side."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from torch import nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.files import in_output_dir, read_json, replace_file, write_json
from sft_toolkit.callbacks.samples_page import page

FILE_NAME, PAGE = "samples.json", "samples.html"
WIDTH = 100
LONGEST = 600  # characters of a shown text; the file holds all of it


class Scored(Protocol):
    """What `sft_toolkit.evaluation.score` returns."""

    prompts: list[str]
    answers: list[str]
    references: list[str]
    scores: dict[str, float]


@dataclass
class _Answers:
    """A `Scored` that was read back from the file."""

    prompts: list[str]
    answers: list[str]
    references: list[str]
    scores: dict[str, float]


class SamplesCallback(TrainerCallback):
    """Scores the model when training begins and when it ends; writes `samples.json`, `samples.html`, prints a table.

    A resumed run takes the first half from the file of the run it continues. `score` runs on every process, since a
    model that is spread over them (ZeRO-3) answers on all of them or not at all; only the first writes.

    Args:
        score: answers the held-out questions with the given model.
        show: answers in the table.
        stream: where the table goes; default standard output.
        interrupted: tells at the end whether a signal cut training short; then there is no time to score again.
        log: called with the scores of each evaluation while training, which also stand among its metrics as
            `eval_<metric>`, so that the best model can be chosen by them; None scores at the two ends only.
    """

    def __init__(
        self,
        score: Callable[[nn.Module], Scored],
        show: int = 3,
        stream: TextIO | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        log: Callable[[dict[str, float]], None] | None = None,
    ) -> None:
        self._score = score
        self._show = show
        self._stream = stream
        self._interrupted = interrupted
        self._log = log
        self._scored_at = -1
        self.before: Scored | None = None
        self.after: Scored | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        path = in_output_dir(args, FILE_NAME)
        self.after, self._scored_at = None, -1
        self.before = _first_half(path) if state.global_step > 0 else None
        # A checkpoint is no untrained model: without the file there is no "before" to compare with.
        if state.global_step > 0:
            return
        self.before = self._score(kwargs["model"])
        if state.is_world_process_zero:
            write_json(path, {"before": _as_dict(self.before)})

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Trainer looks for its best metric in the very mapping that callbacks are shown."""
        if self._log is None or metrics is None or state.global_step == self._scored_at:
            return
        self._scored_at = state.global_step  # several held-out sets are evaluated one by one
        found = {f"eval_{name}": value for name, value in self._score(kwargs["model"]).scores.items()}
        metrics.update(found)
        self._log(found)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if self._interrupted():
            return
        self.after = self._score(kwargs["model"])
        if not state.is_world_process_zero:
            return
        before = {"before": _as_dict(self.before)} if self.before is not None else {}
        write_json(in_output_dir(args, FILE_NAME), {**before, "after": _as_dict(self.after)})
        html = page(self.before, self.after)
        replace_file(in_output_dir(args, PAGE), html.encode("utf-8", "backslashreplace"), durable=False)
        stream = sys.stdout if self._stream is None else self._stream
        text = table(self.before, self.after, self._show)
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()


def table(before: Scored | None, after: Scored, show: int) -> str:
    """The first `show` answers in blocks, then every score in a line."""
    lines: list[str] = []
    for row in range(min(show, len(after.answers))):
        block = {"prompt": after.prompts[row], "expected": after.references[row]}
        if before is not None and row < len(before.answers):
            block["before"] = before.answers[row]
        block["after"] = after.answers[row]
        lines += [f" held-out answer {row + 1} ".center(WIDTH, "-"), *_fields(block)]
    names = list(after.scores)
    width = max([len(name) for name in names], default=0)
    lines += [
        f" score on {len(after.answers)} held-out rows ".center(WIDTH, "-"),
        f"{'':{width}}  {'before':>8}  {'after':>8}",
    ]
    for name in names:
        earlier = None if before is None else before.scores.get(name)
        lines.append(f"{name:{width}}  {'-' if earlier is None else f'{earlier:.3f}':>8}  {after.scores[name]:8.3f}")
    return "\n".join([*lines, ""])


def _fields(block: Mapping[str, str]) -> list[str]:
    """Name and text; further lines of a text stand under its first one."""
    lines: list[str] = []
    for name, text in block.items():
        # The end of a prompt is what is answered, the beginning of an answer is what counts.
        if len(text) > LONGEST:
            text = "… " + text[-LONGEST:] if name == "prompt" else text[:LONGEST] + " …"
        text = text.strip() or "(nothing)"
        wrapped = [part for line in text.splitlines() for part in _wrapped(line)]
        lines += [f"{name if number == 0 else '':10}{part}".rstrip() for number, part in enumerate(wrapped)]
    return lines


def _wrapped(line: str) -> list[str]:
    """Parts of a long line; its white space stays, since answers hold code and indented JSON."""
    return textwrap.wrap(line, WIDTH - 10, drop_whitespace=False, replace_whitespace=False) or [""]


def _as_dict(scored: Scored) -> dict[str, Any]:
    rows = zip(scored.prompts, scored.answers, scored.references, strict=True)
    return {
        "scores": scored.scores,
        "rows": [{"prompt": prompt, "answer": answer, "reference": reference} for prompt, answer, reference in rows],
    }


def _first_half(path: Path) -> Scored | None:
    before = (read_json(path) or {}).get("before")
    if before is None:
        return None
    rows: Sequence[Mapping[str, str]] = before["rows"]
    return _Answers(
        prompts=[row["prompt"] for row in rows],
        answers=[row["answer"] for row in rows],
        references=[row["reference"] for row in rows],
        scores=before["scores"],
    )
