"""A run from its configuration: the table of contents of everything that happens, in order.

The only module that knows all others. `run` is what `train.py` does.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sft_toolkit.checkpoints.checkpoint import choose_resume
from sft_toolkit.config import RunConfig, load_config
from sft_toolkit.engines import nodes
from sft_toolkit.engines.environment import environment_kept
from sft_toolkit.engines.parent import launcher
from sft_toolkit.errors import TrainingDivergedError
from sft_toolkit.phases import phase
from sft_toolkit.running.checks import check_evaluation, check_run, check_start, refuse_start
from sft_toolkit.running.earlier_run import is_repeated, leaves_nothing_to_do, refuse_other_rows, refuse_silent_changes
from sft_toolkit.running.files import opened_output_dir, write_configuration, write_report

if TYPE_CHECKING:
    from transformers import TrainerCallback

    from sft_toolkit.data.prepare import Prepared
    from sft_toolkit.running.callbacks import RunCallbacks
    from sft_toolkit.sweep.study import Study
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
    search: Study | None = None

    def summary(self) -> str:
        """What the run achieved and where it lies, for the end of the console output."""
        if self.search is not None:
            from sft_toolkit.sweep.results import in_words

            stopped = "stopped by a signal; the same command goes on\n" if self.exit_code else ""
            best = f"\nbest        {self.output_dir / 'best.yaml'}" if self.search.best() is not None else ""
            return f"{stopped}{in_words(self.search)}{best}"
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


def run(config: str | Path, overrides: Sequence[str] = ()) -> RunResult:
    """Train from a configuration file; raises the errors of `sft_toolkit.errors`, never exits the process.

    `os.environ` is as before when it returns.

    Args:
        config: YAML or JSON file.
        overrides: `section.key=value` entries that replace the file's values.
    """
    return train(load_config(config, overrides))


@environment_kept()
def train(config: RunConfig, users: Sequence[TrainerCallback] = ()) -> RunResult:
    """Train from a checked configuration; a run that is finished already is left alone.

    With section `sweep`, search: `search` of the result is the study, its trials are runs of their own.

    Args:
        users: callbacks beside those of the configuration.
    """
    if config.sweep is not None:
        return search_values(config)
    from sft_toolkit.data.digest import rows_digest

    output_dir, started_by = Path(config.training["output_dir"]), launcher()
    refuse_start(config)
    alone = not nodes.several(os.environ)  # else one machine could leave, and the others would wait for it
    if alone and is_repeated(output_dir, config):
        return RunResult(output_dir)
    rehearsal = check_run(config)
    check_start(rehearsal.args, config, os.environ)
    nothing_to_do = leaves_nothing_to_do(output_dir, config, in_full(config, rehearsal.args))
    if alone and nothing_to_do:
        return RunResult(output_dir)
    checkpoint = resume_point(config, rehearsal.args) if alone or nodes.is_first(os.environ) else None
    with opened_output_dir(output_dir):
        with phase("preparing the data"):  # before any process group: slow tokenising can't time out a collective
            tokenizer, prepared = prepare_data(config)
            check_evaluation(config, tokenizer, prepared)
            if checkpoint is not None and prepared.train is not None:
                refuse_other_rows(output_dir, checkpoint, partial(rows_digest, prepared.train))
        with phase("loading the model"):
            trainer, callbacks = assemble(config, tokenizer, prepared, [*rehearsal.callbacks, *users], started_by)
        if not alone:
            if nodes.of_first_rank(nothing_to_do):
                return RunResult(output_dir)
            checkpoint = nodes.settle(output_dir, checkpoint)
        return fit(config, trainer, callbacks, checkpoint)


def search_values(config: RunConfig) -> RunResult:
    """The runs of section `sweep`."""
    refuse_start(config)
    check_run(config)
    from sft_toolkit.sweep.search import search  # needs Optuna, which the check has found

    study, code = search(config, train)
    return RunResult(Path(config.training["output_dir"]), exit_code=code, search=study)


def in_full(config: RunConfig, args: SFTArguments) -> dict[str, Any]:
    """Section `training` with everything that is left to defaults."""
    from sft_toolkit.running.arguments import as_written

    return as_written(args, config.training)


def resume_point(config: RunConfig, args: SFTArguments) -> Path | None:
    """The checkpoint to go on from, once it is clear that this configuration can go on from it."""
    output_dir = Path(config.training["output_dir"])
    checkpoint = choose_resume(output_dir, config.training.get("resume", "auto"))
    if checkpoint is not None:
        refuse_silent_changes(output_dir, config, in_full(config, args), checkpoint)
    return checkpoint


def prepare_data(config: RunConfig) -> tuple[Any, Prepared]:
    """Tokenizer and token data sets; the first process of a node builds the cache, the others read it."""
    from sft_toolkit.data.prepare import prepare
    from sft_toolkit.model.loading import load_tokenizer

    tokenizer = load_tokenizer(config.model)
    return tokenizer, prepare(config.data, tokenizer, seed=int(config.training.get("seed", 42)))


def assemble(
    config: RunConfig,
    tokenizer: Any,
    prepared: Prepared,
    users: Sequence[TrainerCallback] = (),
    started_by: int | None = None,
) -> tuple[SFTTrainer, RunCallbacks]:
    """Arguments, model, adapter, callbacks -> a trainer that is ready to train.

    Args:
        users: the callbacks of the configuration that are not ours, built.
        started_by: the launcher; when it has gone, the run saves and stops.
    """
    from sft_toolkit.data.loading import for_evaluation
    from sft_toolkit.running.callbacks import RunCallbacks
    from sft_toolkit.running.training_rows import training_rows
    from sft_toolkit.trainer import SFTTrainer

    args = resolve_arguments(config, prepared)
    model = build_model(config, args, tokenizer, prepared)
    callbacks = RunCallbacks(config, args, tokenizer, prepared, users, started_by)
    held_out = {
        name: for_evaluation(tokens, args, prepared.eval_parts.get(name, ())) for name, tokens in prepared.evals.items()
    }
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=training_rows(config.data, args, tokenizer, prepared),
        eval_dataset=held_out["eval"] if list(held_out) == ["eval"] else held_out or None,
        processing_class=tokenizer,
        callbacks=callbacks.all(),
    )
    callbacks.take_over_from_stock(trainer)
    if args.process_index == 0:  # not before all is there: what is refused until now leaves nothing behind
        write_down(config, args, prepared)
    return trainer, callbacks


def resolve_arguments(config: RunConfig, prepared: Prepared) -> SFTArguments:
    """The arguments that run; the process group begins with them."""
    from sft_toolkit.running.arguments import arguments_from
    from sft_toolkit.running.training_rows import refuse_no_updates

    args = arguments_from(config.training, config.data, config.distributed)
    refuse_no_updates(args, prepared)
    return args


def write_down(config: RunConfig, args: SFTArguments, prepared: Prepared) -> None:
    """Configuration, data report and packing plan of the run into `training.output_dir`."""
    output_dir = Path(config.training["output_dir"])
    write_configuration(output_dir, config, in_full(config, args))
    write_report(output_dir, prepared.report)
    prepared.write_plan(output_dir)


def build_model(config: RunConfig, args: SFTArguments, tokenizer: Any, prepared: Prepared) -> Any:
    """Base model, the same ids as the tokenizer's, and the adapter."""
    from transformers import set_seed

    from sft_toolkit.engines.distributed import refuse_missing_device, start_process_group
    from sft_toolkit.lora.inject import inject
    from sft_toolkit.model.loading import align, load_model, new_token_ids

    refuse_missing_device(args, os.environ)
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
    if config.lora is None:
        return model
    set_seed(args.seed)  # loading draws random numbers for new rows, and under ZeRO-3 other ones than in one process
    return inject(model, config.lora, new_ids)


def fit(config: RunConfig, trainer: SFTTrainer, callbacks: RunCallbacks, checkpoint: Path | None) -> RunResult:
    """Train, save what was learned, check that it can be loaded."""
    from sft_toolkit.training.saving_space import weight_bytes, whole_model_bytes

    result = RunResult(Path(config.training["output_dir"]), trainer=trainer)
    merged_too = config.lora is not None and config.lora.save_merged
    trainer.written_at_end = weight_bytes(trainer) + (whole_model_bytes(trainer) if merged_too else 0)
    with callbacks.recording_failures():
        with phase("training"):
            output = trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        result.metrics = output.metrics
        if callbacks.signal_received is not None:
            result.exit_code = 128 + callbacks.signal_received
            return result
        with phase("saving the model"):
            result.final = save_final(trainer, result.output_dir)
            if config.lora is not None and config.lora.save_merged:
                result.merged = save_merged(trainer, result.final, result.output_dir / "merged")
        result.scores_before, result.scores_after = callbacks.scores()
        callbacks.manifest.record_exit("finished")
    return result


def save_final(trainer: SFTTrainer, output_dir: Path) -> Path:
    """`final/`: model or adapter, tokenizer, template, generation config; its tensors are opened again and checked.

    Raises:
        TrainingDivergedError: the last updates broke the weights.
    """
    if not trainer.weights_are_finite():
        raise TrainingDivergedError(
            "the weights hold NaN or infinity at the end of training, so final/ is not written; the newest checkpoint "
            "is from before"
        )
    return trainer.save_whole(output_dir / "final")


def save_merged(trainer: SFTTrainer, adapter: Path, merged: Path) -> Path:
    """`merged/`: the plain model with the adapter added in, verified by logits on reload."""
    from sft_toolkit.lora.live import why_not_live
    from sft_toolkit.lora.merge import merge, merge_live

    if trainer.is_world_process_zero() and why_not_live(trainer.model):
        logger.info("%s", merge(adapter, merged))  # no rank holds the whole base in full precision
    elif trainer.is_world_process_zero():
        merge_live(trainer.model, cast(Any, trainer.processing_class), merged)
    return merged
