"""The systems that are compared. Each goes from text rows to something that can train; `build` is the preparation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Protocol, cast

import torch
from datasets import Dataset
from peft import get_peft_model
from torch import nn
from transformers import DataCollatorForSeq2Seq, DataCollatorWithFlattening, PrinterCallback, Trainer, TrainingArguments

from benchmarks.parts import Batch, StepClock, TokenRow, as_messages, lora_config, tokenise
from benchmarks.setting import Setting
from sft_toolkit.attention.per_document import PER_DOCUMENT, register_per_document
from sft_toolkit.data import PackedCollator, PaddedCollator, best_fit_decreasing

MAX_GRAD_NORM = 1.0
Collate = Callable[[list[Any]], Batch]


class Ready(Protocol):
    """A system after its preparation."""

    def train(self, clock: StepClock) -> list[float]:
        """Train `setting.steps` updates; the loss of each."""

    def batches(self) -> Iterable[Batch]:
        """The batches of an epoch, to count their tokens."""


# ---- The limit: a loop written by hand -------------------------------------------------------------------------------


@dataclass
class BareLoop:
    """As little as training takes: collate, project supervised positions only, backward, clip, step.

    Packed rows attend per document: it is the limit, so it gets the best attention that there is here.
    """

    setting: Setting
    model: Any
    items: list[Any]
    micro_batch: int
    collate: Collate

    def batches(self) -> Iterable[Batch]:
        """Batches in file order; the last one of an epoch may be smaller."""
        for start in range(0, len(self.items), self.micro_batch):
            yield self.collate(self.items[start : start + self.micro_batch])

    def train(self, clock: StepClock) -> list[float]:
        """The loss of every update."""
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, self.setting.learning_rate, weight_decay=0.0, fused=True)
        losses: list[torch.Tensor] = []
        self.model.train()
        while len(losses) < self.setting.steps:
            for batch in self.batches():
                loss = self._loss(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                nn.utils.clip_grad_norm_(trained, MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
                clock.tick(len(losses))
                if len(losses) == self.setting.steps:
                    break
        return [float(loss) for loss in losses]

    def _loss(self, batch: Batch) -> torch.Tensor:
        targets = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=-100)
        kept = targets != -100
        causal = self.model.get_base_model() if self.setting.lora else self.model
        inputs = {key: value for key, value in batch.items() if key != "labels"}
        hidden = causal.model(**inputs, use_cache=False).last_hidden_state
        return nn.functional.cross_entropy(causal.lm_head(hidden[kept]), targets[kept])


def bare(setting: Setting, model: Any, tokenizer: Any, rows: list[dict[str, Any]], packed: bool) -> Ready:
    """The loop above on rows that were tokenised by hand."""
    if packed:
        register_per_document()
        model.set_attn_implementation(PER_DOCUMENT)
    model = get_peft_model(model, lora_config()) if setting.lora else model
    tokens = tokenise(rows, tokenizer, setting.max_length)
    if packed:
        bins = [{"documents": documents} for documents in in_bins(tokens, setting.max_length)]
        return BareLoop(setting, model, bins, 1, cast(Collate, PackedCollator()))
    return BareLoop(setting, model, tokens, setting.batch, cast(Collate, PaddedCollator(tokenizer.pad_token_id)))


def in_bins(tokens: list[TokenRow], max_length: int) -> list[list[TokenRow]]:
    """The documents of each bin of the toolkit's own packing plan."""
    plan = best_fit_decreasing([len(row["input_ids"]) for row in tokens], max_length)
    return [[tokens[i] for i in indices] for indices in plan]


# ---- Trainers --------------------------------------------------------------------------------------------------------


@dataclass
class WithTrainer:
    """Any subclass of `transformers.Trainer`."""

    trainer: Trainer

    def train(self, clock: StepClock) -> list[float]:
        """The loss of every update, as the trainer logs it."""
        self.trainer.add_callback(clock)
        self.trainer.remove_callback(PrinterCallback)  # its cost is that of the pipe it prints into
        self.trainer.train()
        return [float(entry["loss"]) for entry in self.trainer.state.log_history if "loss" in entry]

    def batches(self) -> Iterable[Batch]:
        """The batches that the trainer's own loader yields."""
        return cast(Iterable[Batch], self.trainer.get_train_dataloader())


def trainer_options(setting: Setting, packed: bool, output_dir: str) -> dict[str, Any]:
    """`TrainingArguments` that are the same for every trainer."""
    return {
        "output_dir": output_dir,
        "per_device_train_batch_size": 1 if packed else setting.batch,
        "max_steps": setting.steps,
        "learning_rate": setting.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "max_grad_norm": MAX_GRAD_NORM,
        "optim": "adamw_torch_fused",
        "train_sampling_strategy": "sequential",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "fp16": False,
        "dataloader_pin_memory": False,
        "seed": setting.seed,
    }


def stock(
    setting: Setting, model: Any, tokenizer: Any, rows: list[dict[str, Any]], packed: bool, output_dir: str
) -> Ready:
    """`transformers.Trainer` with a collator of transformers, on rows that were tokenised by hand."""
    model = get_peft_model(model, lora_config()) if setting.lora else model
    tokens = tokenise(rows, tokenizer, setting.max_length)
    args = TrainingArguments(**trainer_options(setting, packed, output_dir), remove_unused_columns=not packed)
    if packed:
        flatten = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
        data: Any = in_bins(tokens, setting.max_length)
        collator: Any = partial(_flatten_bins, flatten)
    else:
        data = Dataset.from_list(tokens)
        collator = DataCollatorForSeq2Seq(tokenizer)
    return WithTrainer(Trainer(model, args, collator, data, processing_class=tokenizer))


def _flatten_bins(flatten: DataCollatorWithFlattening, bins: list[list[TokenRow]]) -> Batch:
    return cast(Batch, flatten([document for documents in bins for document in documents]))


def toolkit(
    setting: Setting, model: Any, tokenizer: Any, rows: list[dict[str, Any]], packed: bool, output_dir: str
) -> Ready:
    """This toolkit's `SFTTrainer` on the text rows themselves."""
    from sft_toolkit import SFTArguments, SFTTrainer

    args = SFTArguments(
        **trainer_options(setting, packed, output_dir),
        activation_checkpointing=False,
        max_length=setting.max_length,
        packing=packed,
    )
    return WithTrainer(
        SFTTrainer(
            model=model,
            args=args,
            train_dataset=_dataset(rows),
            processing_class=tokenizer,
            peft_config=lora_config() if setting.lora else None,
        )
    )


def _dataset(rows: list[dict[str, Any]]) -> Dataset:
    # from_list alone keeps only the columns of the first row.
    columns = dict.fromkeys(key for row in rows for key in row)
    return Dataset.from_dict({key: [row.get(key) for row in rows] for key in columns})


def trl(
    setting: Setting, model: Any, tokenizer: Any, rows: list[dict[str, Any]], packed: bool, output_dir: str
) -> Ready:
    """TRL's `SFTTrainer` on prompt and completion: its way to learn an answer under any template.

    The last assistant turn is the completion, so rows of several turns have fewer labels here than elsewhere. It also
    learns what the template puts behind the end of the turn.
    """
    installed: Any = import_module("trl")
    chats = [as_messages(row) for row in rows]
    args = installed.SFTConfig(
        **trainer_options(setting, packed, output_dir),
        gradient_checkpointing=False,
        max_length=setting.max_length,
        packing=packed,
        completion_only_loss=True,
    )
    return WithTrainer(
        installed.SFTTrainer(
            model=model,
            args=args,
            train_dataset=Dataset.from_list([{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]),
            processing_class=tokenizer,
            peft_config=lora_config() if setting.lora else None,
        )
    )
