"""The study: which values a trial has, what came of it; kept in `study.db`, whatever ends the process.

A trial that was running when the process ended is taken up again under a new number and in its old folder. The sampler
is made anew for each trial, from the seed and the number of trials before it, so that an interrupted search tries the
same values as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.trial import FrozenTrial, TrialState

from sft_toolkit.args import SweepArguments
from sft_toolkit.config_file.search_space import Choices, Range, read_space
from sft_toolkit.errors import ConfigError

STUDY = "study.db"
_FOLDER, _ASKED, _SECONDS, NOTE = "folder", "asked", "seconds", "note"
# What may change while a search goes on: how long it is, and how early it gives up on a trial.
_MAY_CHANGE = ("trials", "minutes", "pruner")


class Study:
    """One search.

    Args:
        folder: of the search.
        sweep: the section.
        asked: the configuration as a flat mapping; a search goes on under the same one only.

    Raises:
        ConfigError: the folder holds another search.
    """

    def __init__(self, folder: Path, sweep: SweepArguments, asked: Mapping[str, Any]) -> None:
        self.sweep = sweep
        self.minimizes = minimizes(sweep)
        self.spaces = {key: read_space(key, written) for key, written in sweep.search.items()}
        self._study = optuna.create_study(
            storage=f"sqlite:///{(folder / STUDY).absolute()}",
            study_name="sweep",
            direction="minimize" if self.minimizes else "maximize",
            pruner=_pruner(sweep),
            load_if_exists=True,
        )
        kept = {key: value for key, value in asked.items() if key not in {f"sweep.{name}" for name in _MAY_CHANGE}}
        before = self._study.user_attrs.get(_ASKED, kept)
        changed = [key for key in sorted({*before, *kept}) if before.get(key) != kept.get(key)]
        if changed:
            raise ConfigError(
                [
                    f"{key}: was {before.get(key)!r} when the search began, is {kept.get(key)!r} now; "
                    "set it back, or name another training.output_dir"
                    for key in changed
                ]
            )
        self._study.set_user_attr(_ASKED, kept)

    def trials(self) -> list[FrozenTrial]:
        """Every trial once, in order; one that was taken up again counts as its last attempt."""
        last = {self.folder_of(trial): trial for trial in self._study.get_trials(deepcopy=False) if trial.params}
        return [last[name] for name in sorted(last)]

    def ended(self) -> list[FrozenTrial]:
        """Those that came to an end."""
        return [trial for trial in self.trials() if trial.state.is_finished()]

    def is_over(self) -> bool:
        """Whether the budget is used up; of a grid, whether every point was tried."""
        ended = self.ended()
        most = self.sweep.trials or (None if self.sweep.minutes is not None else 20)
        if self.sweep.sampler == "grid":
            points = 1
            for space in self.spaces.values():
                points *= len(space.values)
            most = min(most or points, points)
        seconds = sum(trial.user_attrs.get(_SECONDS, 0.0) for trial in ended)
        late = self.sweep.minutes is not None and seconds >= 60 * self.sweep.minutes
        return late or (most is not None and len(ended) >= most)

    def ask(self) -> optuna.Trial:
        """The next trial, with its values; first those that were running when an earlier process ended."""
        running = [trial for trial in self.trials() if trial.state == TrialState.RUNNING]
        count = len(self.ended()) + len(running)
        self._study.sampler = self._sampler(count)
        for cut in running[:1]:
            self._study.enqueue_trial(cut.params, user_attrs={_FOLDER: self.folder_of(cut)})
            self._study.tell(cut.number, state=TrialState.FAIL)
        trial = self._study.ask({key: _distribution(space) for key, space in self.spaces.items()})
        if running:
            for step, value in running[0].intermediate_values.items():
                trial.report(value, step)
        else:
            trial.set_user_attr(_FOLDER, f"trial-{count:03d}")
        return trial

    def tell(self, trial: optuna.Trial, value: float | None, pruned: bool, seconds: float, note: str = "") -> None:
        """What came of a trial; without a value it has failed."""
        trial.set_user_attr(_SECONDS, seconds)
        trial.set_user_attr(NOTE, note)
        state = TrialState.FAIL if value is None else TrialState.PRUNED if pruned else TrialState.COMPLETE
        # Optuna takes the last report of a pruned trial for its value.
        self._study.tell(trial, value if state == TrialState.COMPLETE else None, state=state)

    def best(self) -> FrozenTrial | None:
        """The best of those that were trained to their end."""
        found = [t for t in self.ended() if t.state == TrialState.COMPLETE and t.value is not None]
        return min(found, key=lambda t: (t.value if self.minimizes else -(t.value or 0.0), t.number), default=None)

    def folder_of(self, trial: FrozenTrial | optuna.Trial) -> str:
        """The name of a trial's folder."""
        return str(trial.user_attrs.get(_FOLDER, f"trial-{trial.number:03d}"))

    def _sampler(self, count: int) -> optuna.samplers.BaseSampler:
        seed = self.sweep.sampler_seed + count
        if self.sweep.sampler == "grid":
            points = {key: list(space.values) for key, space in self.spaces.items()}
            return optuna.samplers.GridSampler(points, seed=self.sweep.sampler_seed)
        if self.sweep.sampler == "random":
            return optuna.samplers.RandomSampler(seed=seed)
        # Optuna's ten random trials would be half of a small search.
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=min(10, max(3, (self.sweep.trials or 20) // 3)))


def overrides_of(trial: FrozenTrial | optuna.Trial) -> list[str]:
    """The values of a trial as overrides of the file."""
    return [f"{key}={value if isinstance(value, str) else repr(value)}" for key, value in trial.params.items()]


def minimizes(sweep: SweepArguments) -> bool:
    """Whether less is better."""
    if sweep.direction == "auto":
        return sweep.metric.endswith(("loss", "entropy", "runtime"))
    return sweep.direction == "minimize"


def _distribution(space: Choices | Range) -> optuna.distributions.BaseDistribution:
    if isinstance(space, Choices):
        return optuna.distributions.CategoricalDistribution(space.values)
    if space.whole:
        return optuna.distributions.IntDistribution(int(space.low), int(space.high), space.log, int(space.step or 1))
    return optuna.distributions.FloatDistribution(space.low, space.high, space.log, space.step)


def _pruner(sweep: SweepArguments) -> optuna.pruners.BasePruner:
    if sweep.pruner == "median":
        return optuna.pruners.MedianPruner(n_startup_trials=min(5, max(2, (sweep.trials or 20) // 4)))
    return optuna.pruners.SuccessiveHalvingPruner() if sweep.pruner == "halving" else optuna.pruners.NopPruner()
