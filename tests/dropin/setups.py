"""Scripts for `transformers.Trainer`, each a function of the class: what they leave must not depend on which it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    DataCollatorWithPadding,
    EarlyStoppingCallback,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from tests.tiny import tiny_model, tiny_tokenizer

Setup = Callable[[Any, Path], Any]
"""(Trainer or SFTTrainer, output folder) -> the trainer, after whatever was done with it."""


class Regression(nn.Module):
    """`a x + b`: no model of transformers, no config."""

    main_input_name = "input_x"

    def __init__(self, two_outputs: bool = False) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.25))
        self.two_outputs = two_outputs

    def forward(self, input_x: torch.Tensor, labels: Any = None, **kwargs: Any) -> tuple[Any, ...]:
        y = input_x * self.a + self.b
        outputs = (y, y) if self.two_outputs else (y,)
        return outputs if labels is None else (nn.functional.mse_loss(y, labels), *outputs)


class Points(TorchDataset[dict[str, float]]):
    """`y = 2 x + 3` with noise; `names` are the labels' names."""

    def __init__(self, length: int = 13, names: tuple[str, ...] = ("labels",)) -> None:
        generator = torch.Generator().manual_seed(length)
        self.x = torch.randn(length, generator=generator)
        self.y = 2 * self.x + 3 + 0.1 * torch.randn(length, generator=generator)
        self.names = names

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, float]:
        return {**{name: float(self.y[index]) for name in self.names}, "input_x": float(self.x[index])}


class Stream(IterableDataset[dict[str, float]]):
    """The same points without a length."""

    def __iter__(self) -> Iterator[dict[str, float]]:
        points = Points(40)
        return iter(points[i] for i in range(len(points)))


def token_rows(count: int = 9, uneven: bool = False) -> list[dict[str, list[int]]]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 261, (count, 12), generator=generator).tolist()
    ids = [row[: 12 - i % 5] for i, row in enumerate(ids)] if uneven else ids
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * len(row)} for row in ids]


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "learning_rate": 0.1,
        "logging_steps": 1,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }
    return TrainingArguments(output_dir=str(folder), **{**options, **changes})


def trained(trainer: Any, **options: Any) -> Any:
    trainer.train(**options)
    return trainer


def fixed_distance(prediction: Any) -> dict[str, float]:
    predictions = prediction.predictions[0] if isinstance(prediction.predictions, tuple) else prediction.predictions
    labels = prediction.label_ids[0] if isinstance(prediction.label_ids, tuple) else prediction.label_ids
    return {"distance": float(abs(predictions - labels).max())}


# ---------------------------------------------------------------- the scripts


def a_plain_module(cls: Any, folder: Path) -> Any:
    return trained(cls(Regression(), arguments(folder, eval_strategy="epoch"), None, Points(), Points(7)))


def everything_by_position(cls: Any, folder: Path) -> Any:
    args = arguments(folder, eval_strategy="epoch", num_train_epochs=2)
    model = Regression(two_outputs=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    def half(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        halved: torch.Tensor = 0.5 * ((outputs[0] - labels) ** 2).mean()
        return halved

    tokenizer, stopper = tiny_tokenizer(), EarlyStoppingCallback(2)
    args.metric_for_best_model, args.greater_is_better = "distance", False
    pair = (optimizer, schedule)
    given: list[Any] = [model, args, default_data_collator, Points(), Points(7), tokenizer, None, half]
    return trained(cls(*given, fixed_distance, [stopper], pair, None, lambda logits, labels: logits))


def a_stream(cls: Any, folder: Path) -> Any:
    return trained(cls(Regression(), arguments(folder, max_steps=6), None, Stream()))


def a_stream_of_datasets(cls: Any, folder: Path) -> Any:
    rows = Dataset.from_list(token_rows()).to_iterable_dataset().shuffle(seed=1, buffer_size=4)
    return trained(cls(tiny_model(), arguments(folder, max_steps=4, learning_rate=1e-3), None, rows))


def model_init(cls: Any, folder: Path) -> Any:
    args = arguments(folder, num_train_epochs=1, learning_rate=1e-3, seed=7)
    trainer = cls(None, args, None, token_rows(), model_init=lambda: tiny_model(seed=3))
    trainer.train()
    return trained(trainer)


def model_init_by_trial(cls: Any, folder: Path) -> Any:
    return trained(cls(args=arguments(folder), train_dataset=Points(), model_init=lambda trial: Regression()))


def own_loss(cls: Any, folder: Path) -> Any:
    def summed(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        losses = nn.functional.cross_entropy(
            outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", ignore_index=-100
        )
        count: Any = num_items_in_batch if num_items_in_batch is not None else (labels != -100).sum()
        mean: torch.Tensor = losses / count
        return mean

    args = arguments(folder, gradient_accumulation_steps=2, learning_rate=1e-3, eval_strategy="epoch")
    return trained(cls(tiny_model(), args, None, token_rows(), token_rows(3), compute_loss_func=summed))


def best_model_by_a_metric(cls: Any, folder: Path) -> Any:
    args = arguments(
        folder,
        eval_strategy="steps",
        save_strategy="steps",
        eval_steps=2,
        save_steps=2,
        num_train_epochs=3,
        load_best_model_at_end=True,
        metric_for_best_model="distance",
        greater_is_better=False,
        save_total_limit=2,
        learning_rate=2.5,
        optim="sgd",
    )
    return trained(cls(Regression(), args, None, Points(), Points(7), compute_metrics=fixed_distance))


def several_labels(cls: Any, folder: Path) -> Any:
    class Two(Regression):
        def forward(self, input_x: torch.Tensor, one: Any = None, two: Any = None, **kwargs: Any) -> tuple[Any, ...]:  # type: ignore[override]
            y = input_x * self.a + self.b
            return (((y - one) ** 2).mean() + ((y - two) ** 2).mean(), y, y + 1)

    names = ("one", "two")
    args = arguments(folder, label_names=list(names), eval_strategy="epoch", eval_accumulation_steps=1)
    keep = {"preprocess_logits_for_metrics": lambda logits, labels: logits[0] + 0 * labels[1]}
    return trained(cls(Two(), args, None, Points(13, names), Points(7, names), compute_metrics=fixed_distance, **keep))


def metrics_per_batch(cls: Any, folder: Path) -> Any:
    seen: list[float] = []

    def by_batch(prediction: Any, compute_result: bool = False) -> dict[str, float]:
        seen.append(float(abs(prediction.predictions - prediction.label_ids).sum()))
        return {"total": sum(seen), "inputs": float(prediction.inputs["input_x"].sum())} if compute_result else {}

    args = arguments(folder, batch_eval_metrics=True, include_for_metrics=["inputs", "loss"], eval_strategy="epoch")
    args.per_device_eval_batch_size, args.remove_unused_columns = 3, True
    return trained(cls(Regression(), args, None, Points(), Points(7), compute_metrics=by_batch))


def optimizer_by_class(cls: Any, folder: Path) -> Any:
    by_class = (torch.optim.Adagrad, {"lr": 0.2, "eps": 1e-6})
    return trained(cls(Regression(), arguments(folder), None, Points(), optimizer_cls_and_kwargs=by_class))


def accumulation_with_an_incomplete_window(cls: Any, folder: Path) -> Any:
    args = arguments(folder, gradient_accumulation_steps=3, learning_rate=1e-3, max_grad_norm=0.5, warmup_steps=2)
    args.per_device_train_batch_size = 2
    return trained(cls(tiny_model(), args, None, token_rows(9)))


def padded_by_a_collator(cls: Any, folder: Path) -> Any:
    args = arguments(folder, train_sampling_strategy="group_by_length", learning_rate=1e-3, eval_strategy="epoch")
    rows = [{key: row[key] for key in ("input_ids", "attention_mask")} for row in token_rows(9, uneven=True)]
    collator = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
    return trained(cls(tiny_model(), args, collator, Dataset.from_list(rows), Dataset.from_list(rows[:4])))


def a_classifier(cls: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "num_labels": 3,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    model = BertForSequenceClassification(BertConfig(vocab_size=261, **sizes))
    rows = [
        {"input_ids": row["input_ids"], "attention_mask": row["attention_mask"], "label": i % 3, "idx": i}
        for i, row in enumerate(token_rows(9, uneven=True))
    ]
    args = arguments(folder, label_smoothing_factor=0.1, learning_rate=1e-3, eval_strategy="epoch", weight_decay=0.1)
    tokenizer = tiny_tokenizer()
    data, collator = Dataset.from_list(rows), DataCollatorWithPadding(tokenizer)
    return trained(cls(model, args, collator, data, {"one": data, "two": data.select([0, 4])}, tokenizer))


def text_columns_with_a_collator_of_ones_own(cls: Any, folder: Path) -> Any:
    tokenizer = tiny_tokenizer()

    def collate(rows: list[dict[str, str]]) -> dict[str, torch.Tensor]:
        ids = tokenizer([row["text"] for row in rows], return_tensors="pt", padding=True)["input_ids"]
        return {"input_ids": ids, "labels": ids}

    args = arguments(folder, remove_unused_columns=False, learning_rate=1e-3)
    return trained(cls(tiny_model(), args, collate, [{"text": "abcd"[: 1 + i % 4]} for i in range(7)]))


def an_adapter_put_on_before(cls: Any, folder: Path) -> Any:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return trained(cls(model, arguments(folder, learning_rate=1e-2, save_strategy="epoch"), None, token_rows()))


def resumed_in_the_middle_of_an_epoch(cls: Any, folder: Path) -> Any:
    def trainer() -> Any:
        args = arguments(folder, save_strategy="steps", save_steps=5, num_train_epochs=3, learning_rate=1e-3)
        args.per_device_train_batch_size = 2
        return cls(tiny_model(), args, None, Dataset.from_list(token_rows()))

    trainer().train()
    return trained(trainer(), resume_from_checkpoint=str(folder / "checkpoint-5"))


def callbacks_added_and_removed(cls: Any, folder: Path) -> Any:
    events: list[str] = []

    class Recorder(TrainerCallback):
        def __getattribute__(self, name: str) -> Any:
            if name.startswith("on_"):
                events.append(name)
            return super().__getattribute__(name)

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    class Never(Stops):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            raise AssertionError("was removed")

    args = arguments(folder, eval_strategy="steps", eval_steps=2, num_train_epochs=2)
    trainer = cls(Regression(), args, None, Points(), Points(7), callbacks=[Never, Recorder()])
    trainer.remove_callback(Never)
    trainer.add_callback(Stops())
    assert trainer.pop_callback(Stops) is not None
    trainer.add_callback(Stops)
    trainer.train()
    trainer.state.log_history.append({"events": events})
    return trainer


def prediction_alone(cls: Any, folder: Path) -> Any:
    trainer = cls(Regression(), arguments(folder, per_device_eval_batch_size=2), None, compute_metrics=fixed_distance)
    output = trainer.predict(Points(7), metric_key_prefix="held")
    untimed = {name: value for name, value in output.metrics.items() if "per_second" not in name}
    untimed.pop("held_runtime"), untimed.pop("held_model_preparation_time")
    trainer.state.log_history.append(
        {"found": output.predictions.tolist(), "labels": output.label_ids.tolist(), **untimed}
    )
    return trainer


def evaluation_alone(cls: Any, folder: Path) -> Any:
    args = arguments(folder, per_device_eval_batch_size=2, prediction_loss_only=True)
    trainer = cls(model=tiny_model(), args=args, eval_dataset=token_rows(5), processing_class=tiny_tokenizer())
    trainer.evaluate()
    trainer.evaluate(token_rows(3), metric_key_prefix="other")
    return trainer


def other_precision_and_workers(cls: Any, folder: Path) -> Any:
    args = arguments(
        folder,
        dataloader_num_workers=1,
        dataloader_drop_last=True,
        learning_rate=1e-3,
        data_seed=5,
        neftune_noise_alpha=1.0,
    )
    args.save_only_model, args.average_tokens_across_devices = True, False
    return trained(cls(tiny_model(), args, None, Dataset.from_list(token_rows())))


SETUPS: dict[str, Setup] = {
    name: made
    for name, made in list(globals().items())
    if callable(made)
    and getattr(made, "__module__", "") == __name__
    and made.__annotations__.get("folder") == "Path"
    and made.__annotations__.get("cls") == "Any"
}
