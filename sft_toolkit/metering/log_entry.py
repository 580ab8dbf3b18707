"""What a trainer writes into a log entry beside what Trainer does."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_toolkit.trainer import SFTTrainer


def add_to_log(trainer: SFTTrainer, logs: dict[str, Any]) -> None:
    """Scores, counters, speed and non-finite updates of a training entry; one reduction over the ranks.

    `loss` is the mean NLL of a supervised token. Where something else is optimised (another objective, a router's
    loss), that is `objective`. Both are means over the updates since the last entry, as in Trainer.
    """
    optimised = float(logs["loss"])
    entry, bad = trainer.token_meter.log_entry(trainer.sum_over_ranks)
    logs.update(entry)
    if "loss" in entry:
        logs["objective"] = optimised
    if not trainer.args.fp16 and not math.isfinite(logs.get("grad_norm", 0.0)):  # fp16's scaler skips those
        bad.setdefault(trainer.state.global_step - 1, optimised)
    if bad:
        logs["nonfinite"] = [{"step": u + 1, "loss": s, "rows": trainer.rows_of_update(u)} for u, s in bad.items()]
