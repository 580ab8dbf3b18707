"""The DeepSpeed settings as the engine will get them, as far as they can be known without the model."""

from __future__ import annotations

import copy
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from sft_toolkit.rehearsal.draft import Draft


def resolved_settings(args: Draft) -> dict[str, Any] | None:
    """The settings with every "auto" that the arguments answer; what the model or the number of updates decides stays.

    None without DeepSpeed; the settings as they stand where DeepSpeed is not installed.
    """
    if not args.deepspeed:
        return None
    settings: dict[str, Any] = copy.deepcopy(cast(Any, args.deepspeed))
    if find_spec("deepspeed") is None:
        return settings
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    # It makes itself known to from_pretrained by a weak reference, which ends with this function.
    config = HfTrainerDeepSpeedConfig(settings)  # type: ignore[no-untyped-call]
    config.trainer_config_process(args)  # type: ignore[no-untyped-call]
    resolved: dict[str, Any] = config.config
    return resolved
