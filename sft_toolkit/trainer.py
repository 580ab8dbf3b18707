"""SFTTrainer: `transformers.Trainer` plus rows to tokens, LoRA, packing, and a loss that no split can change.

Everything here is an override of a public hook of Trainer, and each says why it is needed. Given a plain
`TrainingArguments`, or data that is already tokens, every hook hands over to Trainer unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from sft_toolkit.data.loading import Batches, batches_by_part, dataloader, evaluation_order, training_order
from sft_toolkit.data.sampler import EpochSampler
from sft_toolkit.data.token_dataset import PackedDataset, RowsDataset
from sft_toolkit.keywords import KnownKeywords
from sft_toolkit.metering.accounting import Batch, EvalMeter, TokenMeter, mean_eval_loss
from sft_toolkit.metering.log_entry import add_to_log
from sft_toolkit.model.modules import without_adapter
from sft_toolkit.training.adapter_trainer import AdapterTrainer
from sft_toolkit.training.data_checks import check_data, check_ids
from sft_toolkit.training.data_intake import EVAL, TRAIN, collator_for, is_ours, resolve_dataset
from sft_toolkit.training.engine_trainer import EngineTrainer
from sft_toolkit.training.forward_paths import ForwardPaths
from sft_toolkit.training.gradients import GradientTrainer
from sft_toolkit.training.intake import refuse_unsupported, resolve_model, resolve_names, with_adapter, with_first
from sft_toolkit.training.loop_chores import add_chores
from sft_toolkit.training.saving import SavingTrainer
from sft_toolkit.training_args import SFTArguments


class SFTTrainer(SavingTrainer, EngineTrainer, AdapterTrainer, GradientTrainer, KnownKeywords):
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
        model, processing_class = resolve_names(model, processing_class)
        if data_collator is None:
            train_dataset = resolve_dataset(train_dataset, args, processing_class, TRAIN)
            eval_dataset = resolve_dataset(eval_dataset, args, processing_class, EVAL)
        model, processing_class = resolve_model(model, args, processing_class, peft_config)
        check_data(train_dataset, eval_dataset, model, args, compute_loss_func, collates=data_collator is None)
        if isinstance(args, SFTArguments) and data_collator is None:
            data_collator = collator_for(train_dataset, processing_class)
        self._trains_tokens = is_ours(train_dataset)
        self.token_meter = TokenMeter()
        computes_loss = compute_loss_func is None and (self._trains_tokens or train_dataset is None)
        self.paths = ForwardPaths(self, args, computes_loss)
        callbacks = with_first(self.paths if self._trains_tokens else None, callbacks)
        super().__init__(
            cast(Any, model),
            args,
            data_collator,
            train_dataset,
            eval_dataset,
            processing_class,
            with_adapter(model_init, peft_config, args),
            compute_loss_func,
            compute_metrics,
            callbacks,
            optimizers,
            optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics,
        )
        self.use_gradient_transform(getattr(self.args, "gradient_transform", None))
        if self._trains_tokens:
            refuse_unsupported(self.args)
            add_chores(self)

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
            dataset = resolve_dataset(dataset, self.args, self.processing_class, EVAL)
            check_ids(None if dataset is self.eval_dataset else dataset, self.model, EVAL, labels=True)
        if not is_ours(dataset):
            return super().get_eval_dataloader(eval_dataset)
        return self._held_out_loader(dataset)

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader[Any]:
        """As `get_eval_dataloader`, for `predict`."""
        if isinstance(self.args, SFTArguments):
            test_dataset = resolve_dataset(test_dataset, self.args, self.processing_class, "test_dataset")
            check_ids(test_dataset, self.model, "test_dataset", labels=True)
        return (
            self._held_out_loader(test_dataset) if is_ours(test_dataset) else super().get_test_dataloader(test_dataset)
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
        self.token_meter.times.enter("data")
        batches: list[Batch] = list(islice(epoch_iterator, num_batches))
        items = self.token_meter.count(batches).to(device)
        if self.args.average_tokens_across_devices:
            items = self.sum_over_ranks(items)
        self.token_meter.times.enter(None)
        return batches, items

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """As Trainer's, with a look at the clock before and behind it; `compute_loss` looks in between."""
        if not self._trains_tokens:
            return super().training_step(model, inputs, num_items_in_batch)
        self.token_meter.times.enter("forward")
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.token_meter.times.enter("optimizer" if self.accelerator.sync_gradients else None)
        return loss

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """Sum over the supervised tokens, divided by those of the update; logits only where a label is."""
        meter = self._eval_meter
        if self.compute_loss_func is not None or not (meter or (self._trains_tokens and model.training)):
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        objective = None if meter else self.paths.objective
        every_logit = self._eval_wants_logits if meter else return_outputs
        totals, outputs = self.paths.supervised(model, inputs, objective, every_logit)
        if meter:
            meter.add(totals)
            loss = totals.nll / max(totals.tokens, 1)
        else:
            loss = self.paths.part_of_update(totals, outputs, num_items_in_batch)
            self.token_meter.times.enter("backward")
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
        if not is_ours(getattr(dataloader, "dataset", None)) or self.compute_loss_func is not None:
            return super().evaluation_loop(*arguments)
        loss_only = self.args.prediction_loss_only if prediction_loss_only is None else prediction_loss_only
        parts = batches_by_part(cast(Batches, dataloader.dataset), self.args) if self.compute_metrics is None else []
        meter = self._eval_meter = EvalMeter(parts)
        self._eval_wants_logits = not loss_only
        try:
            with self.paths.evaluating(dataloader.dataset), self.token_meter.times.left_out():
                output = super().evaluation_loop(*arguments)
        finally:
            self._eval_meter = None
        metrics = cast(dict[str, Any], output.metrics)
        means = meter.means(self.sum_over_ranks)
        means |= {f"{part}_loss": mean for part, mean in meter.loss_by_part(self.sum_over_ranks).items()}
        metrics.update({f"{metric_key_prefix}_{name}": mean for name, mean in means.items()})
        return output

    def hyperparameter_search(
        self, hp_space: Any = None, compute_objective: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """As Trainer's; the objective is the (mean) eval loss. Stock adds up all metrics but it, if there are any."""
        if compute_objective is None and self.compute_metrics is None and isinstance(self.args, SFTArguments):
            compute_objective = mean_eval_loss
        return super().hyperparameter_search(hp_space, compute_objective, *args, **kwargs)

    # ---- Logs, cost, saving ------------------------------------------------------------------------------------------

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds scores, counters, speed and non-finite updates to each training entry."""
        if self._trains_tokens and "loss" in logs:
            add_to_log(self, cast(dict[str, Any], logs))
        super().log(logs, start_time)

    def rows_of_update(self, update: int) -> list[Any]:
        """Row numbers (1-based, as in the source files; with the file where there are several) of the 0-based `update`.

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

    def base_model(self) -> Any:
        """The model without its adapter and without the wrappers of the engine."""
        return without_adapter(self.paths.unwrapped())

    def sum_over_ranks(self, value: Tensor) -> Tensor:
        """Of a tensor that every rank has; each row counts once, however many devices share a model."""
        if self.accelerator.num_processes == 1:
            return value
        total = cast(Tensor, self.accelerator.gather(value.to(self.args.device).unsqueeze(0))).sum(0)
        return total / self.get_tp_size() if total.is_floating_point() else total // self.get_tp_size()
