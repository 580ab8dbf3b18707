"""The callbacks of a run started from a configuration: the built-in ones, wired together, and the user's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch import nn
from transformers import PrinterCallback, ProgressCallback, TrainerCallback

from sft_toolkit.callbacks.manifest import ManifestCallback
from sft_toolkit.config import RunConfig
from sft_toolkit.data.digest import rows_digest
from sft_toolkit.engines.engagement import check_engaged, describe, engaged
from sft_toolkit.errors import OutOfMemoryError
from sft_toolkit.registry import build
from sft_toolkit.running.earlier_run import as_asked
from sft_toolkit.running.files import facts
from sft_toolkit.running.out_of_memory import is_out_of_memory, while_training

if TYPE_CHECKING:
    from sft_toolkit.data.prepare import Prepared
    from sft_toolkit.trainer import SFTTrainer
    from sft_toolkit.training_args import SFTArguments

logger = logging.getLogger(__name__)


class RunCallbacks:
    """Builds them in the order in which they must run, and reads back what they found.

    The order matters twice: `interrupt` agrees on a signal before others ask for it, and `engagement` fills in the
    manifest before it is written.
    """

    def __init__(
        self,
        config: RunConfig,
        args: SFTArguments,
        tokenizer: Any,
        prepared: Prepared,
        users: Sequence[TrainerCallback] = (),
        launcher: int | None = None,
    ) -> None:
        self.config = config
        options = {entry.name: entry.options for entry in config.callbacks}
        self.interrupt = build("callback", "interrupt", {"launcher": launcher} | options.pop("interrupt", {}))
        manifest = {"info": facts() | _asked(config, args, prepared), "interrupted": self._interrupted, "finish": False}
        self.manifest: ManifestCallback = build("callback", "manifest", manifest | options.pop("manifest", {}))
        self.samples = self._samples(config, tokenizer, prepared, options.pop("samples", {}))
        health = {"stop_after": args.stop_after_nonfinite}
        self.stall = build("callback", "stall", options.pop("stall", {}))
        self._others = [
            self.stall,
            *users,  # before the files: what one of them adds to a log event is written
            *([] if args.disable_tqdm else [build("callback", "progress", options.pop("progress", {}))]),
            build("callback", "metrics_file", options.pop("metrics_file", {})),
            build("callback", "curve", options.pop("curve", {})),
            build("callback", "health", health | options.pop("health", {})),
        ]
        complete = build("callback", "complete", options.pop("complete", {}))
        self._others.append(complete)  # the marker comes last: it says that everything else is written
        self._engagement = _Engagement(config, self.manifest)

    def all(self) -> list[TrainerCallback]:
        """In the order of their events."""
        samples = [] if self.samples is None else [self.samples]
        return [self.interrupt, self._engagement, self.manifest, *samples, *self._others]

    def take_over_from_stock(self, trainer: SFTTrainer) -> None:
        """Ours show the progress; two bars would fight over the terminal."""
        trainer.remove_callback(ProgressCallback)
        trainer.remove_callback(PrinterCallback)
        self._engagement.trainer = trainer

    @property
    def signal_received(self) -> int | None:
        """The signal that ended training, if one did."""
        number: int | None = self.interrupt.signal_received
        return number

    def scores(self) -> tuple[dict[str, float], dict[str, float]]:
        """Held-out scores before and after; empty where nothing was generated."""
        halves = (None, None) if self.samples is None else (self.samples.before, self.samples.after)
        before, after = ({} if half is None else half.scores for half in halves)
        return before, after

    @contextmanager
    def recording_failures(self) -> Iterator[None]:
        """Whatever ends the run, `run.json` says so and the signal handlers are put back."""
        try:
            yield
        except KeyboardInterrupt:
            self.manifest.record_failure("interrupted")
            raise
        except BaseException as error:
            explained = self._explained(error)
            said = explained or error
            self.manifest.record_failure("failed", f"{type(said).__name__}: {said}")
            if explained is not None:
                raise explained from error
            raise
        finally:
            self.interrupt.close()
            self.stall.close()

    def _explained(self, error: BaseException) -> OutOfMemoryError | None:
        trainer = self._engagement.trainer
        if trainer is None or not is_out_of_memory(error):
            return None
        predicted = self.manifest.info.get("engaged", {}).get("predicted_memory", {})
        return while_training(error, trainer, self.config, self.stall.phase, predicted)

    def _interrupted(self) -> bool:
        return self.signal_received is not None

    def _samples(self, config: RunConfig, tokenizer: Any, prepared: Prepared, options: dict[str, Any]) -> Any:
        if not config.evaluation.generate:
            return None
        from sft_toolkit.evaluation.score import score

        name, held_out = next(iter(prepared.evals.items()))
        parts = prepared.eval_parts.get(name, ())

        def in_training_precision(model: nn.Module) -> Any:
            # peft's generate goes past the forward that accelerate wraps in autocast; a bf16 base with fp32 modules
            # to save then meets two dtypes.
            with cast(Any, self._engagement.trainer).accelerator.autocast():
                return score(model, tokenizer, held_out, config.evaluation, parts)

        wired = {
            "score": in_training_precision,
            "show": config.evaluation.show,
            "interrupted": self._interrupted,
            "log": self._log_scores if config.evaluation.while_training else None,
        }
        return build("callback", "samples", wired | options)

    def _log_scores(self, scores: dict[str, float]) -> None:
        cast(Any, self._engagement.trainer).log(scores)


class _Engagement(TrainerCallback):
    """Before the first update: is what runs what was asked for? Says it, and puts it into the manifest."""

    def __init__(self, config: RunConfig, manifest: ManifestCallback) -> None:
        self.asked = config.distributed
        self.manifest = manifest
        self.trainer: SFTTrainer | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.trainer is None:
            return
        found = engaged(self.trainer)
        check_engaged(self.asked, found)
        self.manifest.info |= {"engaged": vars(found), **self.trainer.paths.facts()}
        settings = getattr(args, "hf_deepspeed_config", None)
        if settings is not None:  # every "auto" has its value by now
            self.manifest.info["deepspeed"] = settings.config
        if state.is_world_process_zero:
            logger.info("%s", describe(found))


def _asked(config: RunConfig, args: SFTArguments, prepared: Prepared) -> dict[str, Any]:
    return {
        "asked_fingerprint": as_asked(config),
        "seed": args.seed,
        "data_seed": args.data_seed,
        "data_fingerprint": prepared.fingerprint,
        "train_rows": None if prepared.train is None else rows_digest(prepared.train),
        "template_fingerprint": prepared.report.get("template_fingerprint"),
        "deepspeed": args.deepspeed,
    }
