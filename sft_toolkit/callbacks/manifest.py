"""`run.json`: what this run is, and how it ended."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.files import in_output_dir, read_json, write_json

logger = logging.getLogger(__name__)
FILE_NAME = "run.json"
ExitState = Literal["running", "finished", "interrupted", "failed"]


class ManifestCallback(TrainerCallback):
    """Keeps `run.json` true at every moment: "running" from the first step on, and at last how the run ended.

    Beside `info` the file holds `exit_state`, `started_at` (UTC), `resumed_from_step`, `step`, `max_steps` and
    `wall_seconds` (training and evaluation, over all resumes), and `error` after a failure.

    Args:
        info: versions, seeds, fingerprints, ...: written as it is.
        interrupted: tells at the end of training whether a signal cut it short.
        finish: whether the end of training is the end of the run. Where more is written afterwards (the final
            weights, a merged model), pass False and call `record_exit("finished")` when that is done.
    """

    def __init__(
        self,
        info: Mapping[str, Any] | None = None,
        interrupted: Callable[[], bool] = lambda: False,
        finish: bool = True,
    ) -> None:
        self.info = dict(info or {})
        self._interrupted = interrupted
        self._finish = finish
        self._path: Path | None = None  # None on other processes and before training
        self._entries: dict[str, Any] = {}
        self._began = 0.0
        self._seconds_before = 0.0

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        self._path = in_output_dir(args, FILE_NAME)
        earlier = read_json(self._path) if state.global_step > 0 else None
        self._seconds_before = float((earlier or {}).get("wall_seconds", 0.0))
        self._began = monotonic()
        self._entries = {
            "started_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "resumed_from_step": state.global_step or None,
            "step": state.global_step,
            "max_steps": state.max_steps,
        }
        self.record_exit("running")

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        # After a crash the file then tells how far the newest checkpoint is.
        self._entries["step"] = state.global_step
        self.record_exit("running")

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._entries["step"] = state.global_step
        if self._interrupted():
            self.record_exit("interrupted")
        else:
            self.record_exit("finished" if self._finish else "running")

    def record_failure(self, exit_state: ExitState, error: str | None = None) -> None:
        """As `record_exit`, while another exception is on its way, which a full disk must not hide."""
        try:
            self.record_exit(exit_state, error)
        except OSError as unwritable:
            logger.warning("%s still says that the run goes on: %s", FILE_NAME, unwritable.strerror)

    def record_exit(self, exit_state: ExitState, error: str | None = None) -> None:
        """Write the file with this state; nothing where training has not begun or on another process."""
        if self._path is None:
            return
        seconds = self._seconds_before + monotonic() - self._began
        entries = {**self._entries, "wall_seconds": round(seconds, 3)}
        if error is not None:
            entries["error"] = error
        write_json(self._path, {**self.info, "exit_state": exit_state, **entries})
