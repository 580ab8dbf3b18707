"""A run from its configuration: the table of contents of everything that happens, in order.

The only module that knows all others. `run` is what `train.py` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sft_toolkit.checkpoint import check_saved, choose_resume
from sft_toolkit.config import RunConfig, load_config, resolved_yaml
from sft_toolkit.deepspeed_config import check_settings_in_use
from sft_toolkit.distributed import check_launch, check_section
from sft_toolkit.run_files import (
    already_finished,
    open_output_dir,
    refuse_silent_changes,
    write_configuration,
    write_report,
)

if TYPE_CHECKING:
    from sft_toolkit.data.prepare import Prepared
    from sft_toolkit.data.preview_bins import BinsShown
    from sft_toolkit.run_callbacks import RunCallbacks
    from sft_toolkit.trainer import SFTTrainer
    from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


@dataclass
class RunResult:
    """What a run left behind. `exit_code` is 0, or 143/130 after a signal; failures raise instead."""

    output_dir: Path
    exit_code: int = 0
    trainer: SFTTrainer | None = None
    final: Path | None = None
    merged: Path | None = None
    scores_before: dict[str, float] = field(default_factory=dict)
    scores_after: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)

    def summary(self) -> str:
        """What the run achieved and where it lies, for the end of the console output."""
        if self.trainer is None:
            return f"nothing to do: {self.output_dir} holds this run, finished"
        lines = [f"stopped by a signal; the newest checkpoint is in {self.output_dir}"] if self.exit_code else []
        scored = [f"{name} {self.scores_before.get(name, 0.0):.3f} -> {s:.3f}" for name, s in self.scores_after.items()]
        meter = self.trainer.token_meter
        speed = f"{meter.window_tokens / meter.window_seconds:,.0f} a second" if meter.window_seconds else ""
        lines += [f"score       {', '.join(scored)}"] if scored else []
        lines += [f"tokens      {meter.tokens:,} ({meter.supervised_tokens:,} supervised) {speed}"]
        learned = "adapter" if hasattr(self.trainer.model, "peft_config") else "model"
        places = {learned: self.final, "merged": self.merged, "curve": self.output_dir / "loss.png"}
        lines += [f"{name:11} {place}" for name, place in places.items() if place is not None]
        return "\n".join(lines)


@dataclass(frozen=True)
class Preview:
    """Rows of `data.preview.records`, the tokenizer that decodes them, a sentence about the end token, packed bins."""

    rows: list[dict[str, Any]]
    tokenizer: Any
    verdict: str
    bins: BinsShown | None = None


def run(config: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Train from a configuration file; raises the errors of `sft_toolkit.errors`, never exits the process.

    Args:
        config: YAML or JSON file.
        overrides: `section.key=value` entries that replace the file's values.
    """
    return train(load_config(config, overrides))


def train(config: RunConfig) -> RunResult:
    """Train from a checked configuration; a run that is finished already is left alone."""
    output_dir = Path(config.training["output_dir"])
    check_launch(config.distributed, os.environ)
    if already_finished(output_dir, config):
        return RunResult(output_dir)
    checkpoint = choose_resume(output_dir, config.training.get("resume", "auto"))
    open_output_dir(output_dir)
    tokenizer, prepared = prepare_data(config)  # before any process group: slow tokenising can't time out a collective
    trainer, callbacks = assemble(config, tokenizer, prepared, checkpoint)
    return fit(config, trainer, callbacks, checkpoint)


def prepare_data(config: RunConfig) -> tuple[Any, Prepared]:
    """Tokenizer and token data sets; the first process of a node builds the cache, the others read it."""
    from sft_toolkit.data.prepare import prepare
    from sft_toolkit.model import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    return tokenizer, prepare(config.data, tokenizer, seed=int(config.training.get("seed", 42)))


def assemble(
    config: RunConfig, tokenizer: Any, prepared: Prepared, checkpoint: Path | None = None
) -> tuple[SFTTrainer, RunCallbacks]:
    """Arguments, model, adapter, callbacks -> a trainer that is ready to train."""
    from sft_toolkit.data.loading import for_evaluation, for_training, seed_of
    from sft_toolkit.run_callbacks import RunCallbacks
    from sft_toolkit.trainer import SFTTrainer

    args = resolve_arguments(config, prepared, checkpoint)
    model = build_model(config, args, tokenizer, prepared)
    callbacks = RunCallbacks(config, args, tokenizer, prepared)
    held_out = {
        name: for_evaluation(tokens, args, prepared.eval_parts.get(name, ())) for name, tokens in prepared.evals.items()
    }
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=for_training(cast(Any, prepared.train), args, seed_of(args), prepared.plan),
        eval_dataset=held_out["eval"] if list(held_out) == ["eval"] else held_out or None,
        processing_class=tokenizer,
        callbacks=callbacks.all(),
    )
    callbacks.take_over_from_stock(trainer)
    return trainer, callbacks


def resolve_arguments(config: RunConfig, prepared: Prepared, checkpoint: Path | None) -> SFTArguments:
    """The arguments that run, compared with those of the checkpoint and written down."""
    from sft_toolkit.training_args import arguments_from, as_written

    args = arguments_from(config.training, config.data, config.distributed)
    check_settings_in_use(args, os.environ, config.distributed.deepspeed)
    written, output_dir = as_written(args, config.training), Path(config.training["output_dir"])
    if checkpoint is not None:
        refuse_silent_changes(output_dir, config, written)
    if args.process_index == 0:
        write_configuration(output_dir, config, written)
        write_report(output_dir, prepared.report)
        prepared.write_plan(output_dir)
    return args


def build_model(config: RunConfig, args: SFTArguments, tokenizer: Any, prepared: Prepared) -> Any:
    """Base model, the same ids as the tokenizer's, and the adapter."""
    from transformers import set_seed

    from sft_toolkit.distributed import start_process_group
    from sft_toolkit.lora.inject import inject
    from sft_toolkit.model import align, load_model, new_token_ids

    start_process_group(args)
    if config.model.attn_implementation != "auto":
        args.packed_attention = "as_loaded"  # an attention that was asked for by name stays
    set_seed(args.seed)  # an adapter starts from random values: the same run has to start from the same ones
    model = load_model(
        config.model,
        trains_all_weights=config.lora is None,
        precision=args.mixed_precision,
        packing=config.data.packing,
    )
    new_ids = new_token_ids(model, tokenizer)  # before align, which gives them their rows
    for note in align(model, tokenizer, prepared.end_of_turn[1] if prepared.end_of_turn else None):
        logger.info("%s", note)
    return model if config.lora is None else inject(model, config.lora, new_ids)


def fit(config: RunConfig, trainer: SFTTrainer, callbacks: RunCallbacks, checkpoint: Path | None) -> RunResult:
    """Train, save what was learned, check that it can be loaded."""
    result = RunResult(Path(config.training["output_dir"]), trainer=trainer)
    with callbacks.recording_failures():
        output = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        result.metrics = output.metrics
        if callbacks.signal_received is not None:
            result.exit_code = 128 + callbacks.signal_received
            return result
        result.final = save_final(trainer, result.output_dir)
        if config.lora is not None and config.lora.save_merged:
            result.merged = save_merged(trainer, result.final, result.output_dir / "merged")
        result.scores_before, result.scores_after = callbacks.scores()
        callbacks.manifest.record_exit("finished")
    return result


def save_final(trainer: SFTTrainer, output_dir: Path) -> Path:
    """`final/`: model or adapter, tokenizer, template, generation config; its tensors are opened again and checked."""
    final = output_dir / "final"
    trainer.save_model(str(final))
    if trainer.is_world_process_zero():
        check_saved(final)
    return final


def save_merged(trainer: SFTTrainer, adapter: Path, merged: Path) -> Path:
    """`merged/`: the plain model with the adapter added in, verified by logits on reload."""
    from sft_toolkit.distributed import engaged
    from sft_toolkit.lora.merge import merge, merge_live

    in_shards = engaged(trainer).strategy in ("zero3", "fsdp")
    if trainer.is_world_process_zero() and in_shards:
        merge(adapter, merged)  # from the files just written: no rank holds the whole base
    elif trainer.is_world_process_zero():
        merge_live(trainer.model, cast(Any, trainer.processing_class), merged)
    return merged


# ---- What the other commands need ------------------------------------------------------------------------------------


def prepare_only(config: str | Path, overrides: Sequence[str] = ()) -> Path:
    """Build the token cache and write `data_report.json`; returns its path."""
    checked = load_config(config, overrides)
    output_dir = Path(checked.training["output_dir"])
    _, prepared = prepare_data(checked)
    open_output_dir(output_dir)
    prepared.write_plan(output_dir)
    return write_report(output_dir, prepared.report)


def preview(config: str | Path, overrides: Sequence[str] = (), rows: int = 3) -> Preview:
    """The first rows as they are trained, and whether the model will learn to stop."""
    from sft_toolkit.data.preview import records, stopping
    from sft_toolkit.data.preview_bins import shown_bins

    tokenizer, prepared = prepare_data(load_config(config, overrides))
    train = cast(Any, prepared.train)
    shown = list(records(train, tokenizer, rows))
    bins = None if prepared.plan is None else shown_bins(prepared.plan, train, rows)
    return Preview(shown, tokenizer, stopping(train, tokenizer, prepared.end_of_turn), bins)


def check(config: str | Path, overrides: Sequence[str] = ()) -> str:
    """The resolved configuration, after all checks that need no model; raises what is wrong."""
    checked = load_config(config, overrides)
    check_section(checked.distributed, os.environ)
    from sft_toolkit.data.prepare import check_options  # seconds of imports, not owed to a typo
    from sft_toolkit.training_args import arguments_from, as_written

    check_options(checked.data)
    args = arguments_from(checked.training, checked.data, checked.distributed)
    check_settings_in_use(args, os.environ, checked.distributed.deepspeed)
    return resolved_yaml(checked, as_written(args, checked.training))
