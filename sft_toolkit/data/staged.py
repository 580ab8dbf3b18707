"""Order `staged`: one mixture of the sources after another, by a schedule of updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import PurePath
from typing import Any

import numpy as np
import numpy.typing as npt

from sft_toolkit.data.facts import Floats, Ints, RowFacts
from sft_toolkit.data.orders import Ordering
from sft_toolkit.data.sampler import permutation, random_bits
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean

_KEYS = ("sources", "steps")


class Staged(Ordering):
    """In each stage, the source of the next row is drawn by the weights of the stage.

    An epoch has as many rows as the data set. A source gives its rows in random order, and begins anew where the stages
    ask for more than there are; what they don't ask for is left out. Stages count updates from the start of the run.

    Args:
        stages: `[{sources: {name: weight}, steps: updates}, ...]`; the last one lasts and takes no `steps`. A name is
            the path of a file, its name without suffixes, or a pattern (`code/*.jsonl`), whose files share the weight
            by their rows. `sources: [name, ...]` weighs by rows.
    """

    def __init__(self, stages: list[dict[str, Any]]) -> None:
        if not isinstance(stages, list) or not stages:
            raise ValueError("stages: expected a list of {sources: {name: weight}, steps: updates}")
        self.stages = [_read(entry, number, number == len(stages)) for number, entry in enumerate(stages, 1)]

    def order(self, facts: RowFacts, seed: int, epoch: int) -> Sequence[int]:
        """`facts.size` indices; some may come several times or not at all."""
        files, of_row = _files(facts)
        rows = [np.flatnonzero(of_row == number) for number in range(len(files))]
        file_at = self._files_in_order(facts, files, [len(found) for found in rows], seed, epoch)
        indices = np.empty(facts.size, dtype=np.int64)
        for number, found in enumerate(rows):
            places = np.flatnonzero(file_at == number)
            indices[places] = _passes(found, len(places), seed, epoch, number)
        result: list[int] = indices.tolist()
        return result

    def bin_groups(self, facts: RowFacts) -> Ints | None:
        """A bin holds rows of one file, so that a stage can choose it."""
        return _files(facts)[1]

    def _files_in_order(self, facts: RowFacts, files: list[str], counts: list[int], seed: int, epoch: int) -> Ints:
        """The number of the file at each position of an epoch."""
        weights = [stage.weights(files, counts) for stage in self.stages]
        unused = [file for number, file in enumerate(files) if not any(of_stage[number] for of_stage in weights)]
        if unused:
            raise ConfigError(
                f"sampler 'staged': no stage trains on {', '.join(unused)}; name it in one, or take it out"
            )
        ends = np.cumsum([stage.steps for stage in self.stages[:-1]], dtype=np.int64)
        stage_at = np.searchsorted(ends, facts.updates(epoch), side="right")
        chances = random_bits(facts.size, seed, epoch) / 2.0**64
        drawn = np.empty(facts.size, dtype=np.int64)
        for number, of_stage in enumerate(weights):
            places = stage_at == number
            limits = np.cumsum(of_stage / of_stage.sum())
            last = int(np.flatnonzero(of_stage)[-1])  # rounding may leave the last limit below 1
            drawn[places] = np.minimum(np.searchsorted(limits, chances[places], side="right"), last)
        return drawn


@dataclass(frozen=True)
class _Stage:
    """`names` -> weight, None for a weight by rows; `steps` updates long."""

    number: int
    names: Mapping[str, float | None]
    steps: int

    def weights(self, files: list[str], counts: list[int]) -> Floats:
        """The weight of each file, float64 (files,)."""
        weights = np.zeros(len(files), dtype=np.float64)
        for name, weight in self.names.items():
            found = [i for i, file in enumerate(files) if name in (file, _stem(file)) or fnmatchcase(file, name)]
            if not found:
                hint = f"{did_you_mean(name, map(_stem, files))} (files: {', '.join(files)})"
                raise ConfigError(f"sampler 'staged': stage {self.number}: no file is called '{name}'{hint}")
            rows = sum(counts[i] for i in found)
            for i in found:
                weights[i] += counts[i] if weight is None else weight * counts[i] / rows
        return weights


def _read(entry: Any, number: int, last: bool) -> _Stage:
    keys = f"expected {{sources: {{name: weight}}{'' if last else ', steps: updates'}}}"
    if not isinstance(entry, Mapping) or not {"sources"} <= entry.keys() <= {*_KEYS}:
        raise ValueError(f"stage {number}: {keys}, not {entry!r}")
    names = entry["sources"]
    names = dict.fromkeys(names) if isinstance(names, list) else names
    if not isinstance(names, Mapping) or not names:
        raise ValueError(f"stage {number}: sources: expected {{name: weight}} or a list of names, not {names!r}")
    weights = [weight for weight in names.values() if weight is not None]
    if any(isinstance(w, bool) or not isinstance(w, int | float) or w < 0 for w in weights) or (
        weights and not any(weights)
    ):
        raise ValueError(f"stage {number}: sources: weights are numbers of at least 0, and one of them is above it")
    steps = entry.get("steps", 0)
    if last and "steps" in entry:
        raise ValueError(f"stage {number}: the last stage lasts to the end of the run; take its steps out")
    if not last and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"stage {number}: steps: expected a number of updates, not {steps!r}")
    return _Stage(number, names, steps)


def _files(facts: RowFacts) -> tuple[list[str], Ints]:
    """The files by name, and the number of the file of each item."""
    names, of_item = np.unique(np.array(facts.sources, dtype=object), return_inverse=True)
    return list(names), of_item.astype(np.int64)


def _passes(rows: Ints, count: int, seed: int, epoch: int, number: int) -> npt.NDArray[np.int64]:
    """`count` of these rows: all of them in random order, and so on again."""
    rounds = range(-(-count // max(1, len(rows))))
    # From 1: the seeds [s, e] and [s, e, 0, 0] give numpy the same stream, and [s, e] has drawn the files.
    passes = [rows[permutation(len(rows), seed, epoch, number + 1, again + 1)] for again in rounds]
    return np.concatenate([*passes, np.zeros(0, dtype=np.int64)])[:count]


def _stem(file: str) -> str:
    """The name of a file without its suffixes."""
    return PurePath(file).name.partition(".")[0]
