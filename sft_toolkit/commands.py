"""What the commands beside `train` do: `prepare`, `preview`, `plan`, `check`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sft_toolkit.assemble import prepare_data
from sft_toolkit.config import load_config, resolved_yaml
from sft_toolkit.engines.environment import environment_kept
from sft_toolkit.running.checks import check_run
from sft_toolkit.running.files import as_comment, open_output_dir, write_report

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from sft_toolkit.data.preview_bins import BinsShown
    from sft_toolkit.planning.command import Asked, Plan


@dataclass(frozen=True)
class Preview:
    """Rows of `data.preview.records`, the tokenizer that decodes them, a sentence about the end token, packed bins."""

    rows: list[dict[str, Any]]
    tokenizer: Any
    verdict: str
    bins: BinsShown | None = None


@environment_kept()
def prepare_only(config: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Build the token cache and write `data_report.json`; returns its path."""
    checked = load_config(config, overrides)
    output_dir = Path(checked.training["output_dir"])
    _, prepared = prepare_data(checked)
    open_output_dir(output_dir)
    prepared.write_plan(output_dir)
    return write_report(output_dir, prepared.report)


@environment_kept()
def preview(config: str | Path, overrides: Sequence[str] = (), rows: int = 3) -> Preview:
    """The first rows as they are trained, and whether the model will learn to stop."""
    from sft_toolkit.data.preview import records, stopping
    from sft_toolkit.data.preview_bins import shown_bins
    from sft_toolkit.data.streaming import sample

    checked = load_config(config, overrides)
    tokenizer, prepared = prepare_data(checked)
    train = cast(Any, prepared.train if prepared.train is not None else sample(checked.data, tokenizer, rows))
    shown = list(records(train, tokenizer, rows))
    bins = None if prepared.plan is None else shown_bins(prepared.plan, train, rows)
    return Preview(shown, tokenizer, stopping(train, tokenizer, prepared.end_of_turn), bins)


@environment_kept()
def plan(config: str | Path, overrides: Sequence[str], machine: Asked) -> Plan:
    """The memory of every strategy on a machine, from the model's configuration alone."""
    from sft_toolkit.planning.command import plan_run

    checked = load_config(config, overrides)
    return plan_run(checked, check_run(checked).args, machine)


@environment_kept()
def check(config: str | Path, overrides: Sequence[str] = ()) -> str:
    """The resolved configuration and DeepSpeed settings, after all checks that need no model; raises what is wrong."""
    checked = load_config(config, overrides)
    args = check_run(checked).args
    if args.precision_choice.is_notice:
        logger.warning("precision: %s (%s)", args.precision_choice.name, args.precision_choice.reason)
    from sft_toolkit.rehearsal.engine import resolved_settings
    from sft_toolkit.running.arguments import as_written

    resolved = resolved_yaml(checked, as_written(args, checked.training))
    settings = resolved_settings(args)
    if settings is None:
        return resolved
    return f"{resolved}\n# The DeepSpeed settings of this run:\n{as_comment(settings)}"
