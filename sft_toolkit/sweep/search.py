"""The search: trial after trial in this process, each a run of its own, until the budget is used up."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout

from sft_toolkit.config import RunConfig, load_config, resolved_yaml
from sft_toolkit.config_file.search_space import as_override
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.running.files import RESOLVED, open_output_dir
from sft_toolkit.sweep import results
from sft_toolkit.sweep.study import Study, overrides_of
from sft_toolkit.sweep.watch import WatchCallback, value_of

if TYPE_CHECKING:
    import optuna

    from sft_toolkit.assemble import RunResult

logger = logging.getLogger(__name__)

BEST = "best.yaml"
Train = Callable[[RunConfig, list[Any]], "RunResult"]


def search(config: RunConfig, train: Train) -> tuple[Study, int]:
    """Search; the study and the exit code.

    Args:
        train: trains one configuration with callbacks of ours.

    Raises:
        ConfigError, DataError: of a trial, with its values; the next start tries it again.
        Exception: the last failure, where the first three trials or all of them failed.
    """
    folder = Path(config.training["output_dir"])
    if (folder / "run.json").exists():
        raise ConfigError(f"training.output_dir: '{folder}' holds a run; name another folder for the search")
    open_output_dir(folder)
    try:
        with FileLock(folder / "sweep.lock", timeout=0):
            return _search(config, folder, train)
    except Timeout:
        raise ConfigError(f"training.output_dir: another process is searching in '{folder}'") from None


def _search(config: RunConfig, folder: Path, train: Train) -> tuple[Study, int]:
    assert config.sweep is not None
    text = resolved_yaml(config)
    study = Study(folder, config.sweep, _asked(config))
    (folder / RESOLVED).write_text(text, encoding="utf-8")
    while not study.is_over():
        trial = study.ask()
        name = study.folder_of(trial)
        logger.info("%s: %s", name, " ".join(overrides_of(trial)))
        code = _one(study, trial, folder, train)
        if code:
            return study, code
        results.write(study, folder)
        gc.collect()  # a trainer and its model refer to one another: the next model would find the memory taken
        _write_best(study, folder, config)
    return study, 0


def _one(study: Study, trial: optuna.Trial, folder: Path, train: Train) -> int:
    """Train one trial; the exit code of a signal, else 0."""
    place, key = folder / study.folder_of(trial), f"eval_{study.sweep.metric.removeprefix('eval_')}"
    began, watch = time.monotonic(), WatchCallback(trial, key)
    try:
        config = load_config(folder / RESOLVED, [*overrides_of(trial), *_of_a_trial(place, folder)])
        result = train(config, [watch])
    except (ConfigError, DataError) as error:
        raise type(error)(f"{place.name} ({' '.join(overrides_of(trial))}): {error}") from error
    except OSError:
        raise  # a full disk: the next trial would fail too
    except Exception as error:
        study.tell(
            trial, None, False, time.monotonic() - began, f"{type(error).__name__}: {error}".splitlines()[0][:160]
        )
        logger.warning("%s failed: %s", place.name, error)
        if not any(t.value is not None for t in study.trials()) and (len(study.ended()) >= 3 or study.is_over()):
            raise
        return 0
    if result.exit_code:
        return result.exit_code
    value = value_of(place, key, study.minimizes, bool(config.training.get("load_best_model_at_end")))
    note = "" if value is not None else f"no finite {key} was reported"
    study.tell(trial, value, watch.pruned, time.monotonic() - began, note)
    return 0


def _of_a_trial(place: Path, folder: Path) -> Iterator[str]:
    """What the search decides about every trial: merged models and pushes are for the one that is chosen."""
    yield "sweep=null"
    yield f"training.output_dir={as_override(str(place))}"
    yield "training.push_to_hub=false"
    if load_config(folder / RESOLVED).lora is not None:
        yield "lora.save_merged=false"


def _write_best(study: Study, folder: Path, config: RunConfig) -> None:
    best = study.best()
    if best is None:
        return
    place = as_override(str(folder / "best"))
    chosen = load_config(folder / RESOLVED, [*overrides_of(best), "sweep=null", f"training.output_dir={place}"])
    metric = f"{study.sweep.metric} {best.value:.6g}"
    head = f"# The best of {len(study.ended())} trials, {study.folder_of(best)}: {metric}.\n"
    (folder / BEST).write_text(head + resolved_yaml(chosen), encoding="utf-8")


def _asked(config: RunConfig) -> dict[str, Any]:
    """The configuration of a search, flat, without what says nothing about its values."""
    document = {key: value for key, value in asdict(config).items() if key not in ("path", "warnings")}
    flat = dict(_flat(document))
    return {key: value for key, value in flat.items() if key not in ("training.output_dir", "training.hub_token")}


def _flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and prefix != "sweep.search":
        for key, item in value.items():
            yield from _flat(item, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value
