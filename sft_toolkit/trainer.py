"""SFTTrainer: `transformers.Trainer` plus rows to tokens, LoRA, packing, and a loss that no split can change.

Everything here is an override of a public hook of Trainer, and each says why it is needed. Given a plain
`TrainingArguments`, or data that is already tokens, every hook hands over to Trainer unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from sft_toolkit.accounting import Batch, EvalMeter, TokenMeter
from sft_toolkit.data.loading import Batches, batches_by_part, dataloader, evaluation_order, training_order
from sft_toolkit.data.sampler import EpochSampler
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset
from sft_toolkit.forward_paths import ForwardPaths
from sft_toolkit.intake import collator_for, refuse_unsupported, resolve_dataset, resolve_model, with_adapter
from sft_toolkit.loop_chores import LoopChores
from sft_toolkit.loss import IGNORE_INDEX, router_loss
from sft_toolkit.modules import without_adapter
from sft_toolkit.training_args import SFTArguments


class SFTTrainer(Trainer):
    """Supervised fine-tuning with the constructor of `transformers.Trainer`, in the same order, plus `peft_config`.

    Args:
        model: module, folder or hub id.
        args: `SFTArguments`; a plain `TrainingArguments` makes this class behave as Trainer does.
        train_dataset, eval_dataset: text rows (messages, prompt/completion, ...) are rendered and tokenised; rows that
            are tokens or tensors already are left alone.
        processing_class: the tokenizer; loaded with the model where `model` is a name.
        peft_config: `LoraArguments` or any `peft.PeftConfig`; the model is wrapped before Trainer sees it.

    Raises:
        ConfigError: options that contradict one another or can't be met on this model.
        DataError: a row that can't be read, rendered or masked with proof.
    """

    row_order: EpochSampler | None = None
    _eval_meter: EvalMeter | None = None
    _eval_wants_logits = False
    _flop_parameters: int | None = None

    # compute_loss divides by the supervised tokens of the whole update, so training_step must not divide again.
    # A property and not an attribute: in drop-in use Trainer's own rule (None) has to hold.
    @property
    def loss_is_scaled_for_ga(self) -> bool | None:  # type: ignore[override]
        return True if self._trains_tokens else None

    def __init__(
        self,
        model: nn.Module | str | None = None,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., Any] | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[..., Any] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[torch.optim.Optimizer], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
        *,
        peft_config: Any = None,
    ) -> None:
        model, processing_class = resolve_model(model, args, processing_class, peft_config)
        model_init = with_adapter(model_init, peft_config)
        if isinstance(args, SFTArguments) and data_collator is None:
            train_dataset = resolve_dataset(train_dataset, args, processing_class, "train_dataset")
            eval_dataset = resolve_dataset(eval_dataset, args, processing_class, "eval_dataset")
            data_collator = collator_for(train_dataset, processing_class)
        self._trains_tokens = _is_ours(train_dataset)
        self.token_meter = TokenMeter()
        self.paths = ForwardPaths(
            self, args, compute_loss_func is None and (self._trains_tokens or train_dataset is None)
        )
        callbacks = [self.paths, *(callbacks or [])] if self._trains_tokens else callbacks
        super().__init__(
            cast(Any, model),
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            model_init,
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        if self._trains_tokens:
            refuse_unsupported(self.args)
            self.add_callback(LoopChores(self))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As Trainer's; the model gets its own attention back, whatever ends the training."""
        try:
            return super().train(*args, **kwargs)
        finally:
            self.paths.attention.switch_off()

    # ---- Data: our own order, without repeated rows ------------------------------------------------------------------

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Batches in the order of (seed, epoch). Stock repeats rows to even out the ranks; here blank rows do."""
        if not self._trains_tokens:
            return super().get_train_dataloader()
        self.row_order = training_order(cast(Batches, self.train_dataset), self.args, self._train_batch_size)
        return self._loader(self.train_dataset, self._train_batch_size, self.row_order, self.args.dataloader_drop_last)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader[Any]:
        """Held-out rows in file order, each exactly once over all ranks; text rows are tokenised first."""
        dataset = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(dataset, str):
            dataset = cast(dict[str, Any], self.eval_dataset)[dataset]
        if isinstance(self.args, SFTArguments):
            dataset = resolve_dataset(dataset, self.args, self.processing_class, "eval_dataset")
        if not _is_ours(dataset):
            return super().get_eval_dataloader(eval_dataset)
        return self._held_out_loader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As `get_eval_dataloader`, for `predict`."""
        if isinstance(self.args, SFTArguments):
            test_dataset = resolve_dataset(test_dataset, self.args, self.processing_class, "test_dataset")
        return (
            self._held_out_loader(test_dataset) if _is_ours(test_dataset) else super().get_test_dataloader(test_dataset)
        )

    def _held_out_loader(self, dataset: Any) -> DataLoader[Any]:
        order = evaluation_order(dataset, self.args, by_part=self.compute_metrics is None)
        return self._loader(dataset, self.args.eval_batch_size, order, drop_last=False)

    def _loader(self, dataset: Any, micro_batch: int, order: EpochSampler, drop_last: bool) -> DataLoader[Any]:
        collate = collator_for(dataset, self.processing_class)
        loader = dataloader(dataset, self.args, micro_batch, order, drop_last, collate)
        return cast("DataLoader[Any]", self.accelerator.prepare(loader))

    # ---- Loss: a sum over supervised tokens, divided once by those of the whole update -------------------------------

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | int | None]:
        """The micro-batches of an update and its supervised tokens over all ranks, counted for every architecture.

        Stock counts only where the model's forward takes loss keywords; others fall back to a mean of means.
        """
        if not self._trains_tokens:
            return super().get_batch_samples(epoch_iterator, num_batches, device)
        batches: list[Batch] = list(islice(epoch_iterator, num_batches))
        items = self.token_meter.count(batches).to(device)
        if self.args.average_tokens_across_devices:
            items = self._sum_over_ranks(items) // self.get_tp_size()
        return batches, items

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Sum over the supervised tokens, divided by those of the update; logits only where a label is."""
        evaluating = self._eval_meter is not None
        if self.compute_loss_func is not None or not (evaluating or (self._trains_tokens and model.training)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        objective = None if evaluating else self.paths.objective
        every_logit = self._eval_wants_logits if evaluating else return_outputs
        totals, outputs = self.paths.supervised(model, inputs, objective, every_logit)
        count = (inputs["labels"][:, 1:] != IGNORE_INDEX).sum()
        if evaluating:
            cast(EvalMeter, self._eval_meter).add(totals.nll, count)
            loss = totals.nll / count.clamp_min(1)
            return (loss, outputs) if return_outputs else loss
        self.token_meter.add_loss(self.state.global_step, totals.loss, None if objective is None else totals.nll)
        items = count if num_items_in_batch is None else torch.as_tensor(num_items_in_batch, device=count.device)
        loss = (totals.loss + router_loss(outputs, self.base_model().config, count)) / items.clamp_min(1)
        # DDP and ZeRO average gradients over ranks; a sum that is divided by all ranks' items must be averaged back.
        ranks = self.accelerator.num_processes // self.get_tp_size()
        if self.args.average_tokens_across_devices and num_items_in_batch is not None:
            loss = loss * ranks
        return (loss, outputs) if return_outputs else loss

    @property
    def loss_path(self) -> str:
        """Which logits are computed: `all logits`, `supervised logits` or `chunked`; known once training has begun."""
        return self.paths.supervised.path

    # ---- Evaluation: every token of the set weighs the same ----------------------------------------------------------

    def evaluation_loop(
        self,
        dataloader: DataLoader[Any],
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Trainer's loop, with the loss replaced by NLL over supervised tokens of the whole set.

        Stock averages batch means over rows, so its eval loss changes with the batch size and the number of ranks.
        """
        arguments = (dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix)
        if not _is_ours(getattr(dataloader, "dataset", None)) or self.compute_loss_func is not None:
            return super().evaluation_loop(*arguments)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        parts = batches_by_part(cast(Batches, dataloader.dataset), self.args) if self.compute_metrics is None else []
        meter = self._eval_meter = EvalMeter(parts)
        self._eval_wants_logits = not loss_only
        go_on = self.token_meter.pause()
        try:
            with self.paths.evaluating(dataloader.dataset):
                output = super().evaluation_loop(*arguments)
        finally:
            self._eval_meter = None
            go_on()
        metrics = cast(dict[str, Any], output.metrics)
        metrics[f"{metric_key_prefix}_loss"] = meter.mean(self._sum_over_ranks)
        for part, mean in meter.by_part(self._sum_over_ranks).items():
            metrics[f"{metric_key_prefix}_{part}_loss"] = mean
        return output

    # ---- Logs, cost, saving ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds token counters, speed and non-finite updates to each training entry; one reduction per log event."""
        if self._trains_tokens and "loss" in logs:
            logs.update(self.token_meter.log_entry(self._sum_over_ranks))
            bad = self.token_meter.nonfinite_updates(self._sum_over_ranks)
            last = self.state.global_step - 1
            if not self.args.fp16 and not math.isfinite(logs.get("grad_norm", 0.0)):  # fp16's scaler skips those
                bad.setdefault(last, float(logs["loss"]))
            if bad:
                entries = [{"step": u + 1, "loss": loss, "rows": self.rows_of_update(u)} for u, loss in bad.items()]
                cast(dict[str, Any], logs)["nonfinite"] = entries
        super().log(logs, start_time)

    def rows_of_update(self, update: int) -> list[int]:
        """Row numbers (1-based, as in the source files) that all ranks trained on in the 0-based `update`.

        Computed from the order and not carried in batches: it costs nothing until something goes wrong.
        """
        if self.row_order is None:
            return []
        size = self._train_batch_size * self.args.world_size * self.args.gradient_accumulation_steps
        dataset = cast(RowsDataset | PackedDataset, self.train_dataset)
        return sorted(row for index in self.row_order.of_update(update, size) for row in dataset.row_numbers(index))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        """As Trainer's, with the parameter count cached: walking all modules costs 2 to 14 ms per micro-batch."""
        if not self._trains_tokens:
            return super().floating_point_ops(inputs)
        if self._flop_parameters is None:
            count = getattr(self.base_model(), "num_parameters", None)  # not every module has it
            self._flop_parameters = 0 if count is None else int(count(exclude_embeddings=True))
        return 6 * int(inputs["input_ids"].numel()) * self._flop_parameters

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As Trainer's, plus the generation config beside an adapter: without it generation would not stop."""
        super().save_model(output_dir, _internal_call)
        config = getattr(self.base_model(), "generation_config", None)
        if self.args.should_save and isinstance(self.args, SFTArguments) and config is not None:
            config.save_pretrained(output_dir or self.args.output_dir)

    def base_model(self) -> Any:
        """The model without its adapter and without the wrappers of the engine."""
        return without_adapter(self.paths.unwrapped())

    def _sum_over_ranks(self, value: Tensor) -> Tensor:
        return cast(Tensor, self.accelerator.gather(value.to(self.args.device).unsqueeze(0))).sum(0)


def _is_ours(dataset: Any) -> bool:
    return isinstance(dataset, RowsDataset | PackedDataset)
