"""SFTTrainer: rows of text become batches; with plain arguments or ready tokens it is `transformers.Trainer`."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

from sft_toolkit import ConfigError, DataError, SFTTrainer
from sft_toolkit.args import LoraArguments
from tests.tiny import chat, supervised_text, tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, lora, rows_with_labels, sgd_arguments, trained


def batches(trainer: SFTTrainer) -> list[dict[str, torch.Tensor]]:
    return list(trainer.get_train_dataloader())


def test_the_constructor_is_trainers_with_one_keyword_more() -> None:
    stock = list(inspect.signature(Trainer.__init__).parameters)
    ours = inspect.signature(SFTTrainer.__init__).parameters
    assert list(ours) == [*stock, "peft_config"]
    assert ours["peft_config"].kind is inspect.Parameter.KEYWORD_ONLY


def test_text_rows_are_rendered_masked_and_padded_by_length(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(pad="<|im_end|>")  # pad equals eos
    rows = [{"messages": chat("a", "b")}, {"messages": chat("cc", "dd")}]
    args = sgd_arguments(tmp_path, per_device_train_batch_size=2)
    (batch,) = batches(SFTTrainer(tiny_model(), args, None, rows, None, tokenizer))
    assert batch["attention_mask"].sum(1).tolist() == [23, 25]
    pairs = zip(batch["input_ids"], batch["labels"], strict=True)
    texts = [supervised_text(tokenizer, ids, labels) for ids, labels in pairs]
    assert texts == ["b<|im_end|>", "dd<|im_end|>"]


def test_packing_keeps_the_same_supervised_texts(tmp_path: Path) -> None:
    tokenizer, rows = tiny_tokenizer(), rows_with_labels(2, 5, 9, 3, 7)
    texts = []
    for changes in ({"packing": False}, {"packing": True, "max_length": 90}):
        trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, rows, None, tokenizer)
        found = "".join(
            supervised_text(tokenizer, batch["input_ids"].flatten(), batch["labels"].flatten())
            for batch in batches(trainer)
        )
        texts.append(sorted(found.split("<|im_end|>")))
    assert texts[0] == texts[1] == sorted(["", *(row["messages"][1]["content"] for row in rows)])


def test_text_rows_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    message = r"train_dataset holds text rows \(messages\): pass processing_class=tokenizer"
    with pytest.raises(ConfigError, match=message):
        SFTTrainer(tiny_model(), sgd_arguments(tmp_path), train_dataset=[{"messages": chat("a", "b")}])


def test_rows_without_a_supervised_token_are_dropped_and_all_such_rows_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train_dataset"):
        trained(tmp_path, [{"messages": chat("a very long question", "b")}], max_length=12, too_long="truncate_right")


def token_rows(n: int = 6) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randint(5, 261, (n, 12), generator=generator).tolist()
    return [{"input_ids": row, "labels": row, "attention_mask": [1] * 12} for row in rows]


def weights(trainer: Trainer) -> dict[str, Any]:
    model: Any = trainer.model
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def history(trainer: Trainer) -> list[dict[str, Any]]:
    timing = ("runtime", "per_second")
    return [{k: v for k, v in e.items() if not any(t in k for t in timing)} for e in trainer.state.log_history]


@pytest.mark.parametrize("as_hf_dataset", [True, False])
def test_with_plain_arguments_it_is_trainer_bit_for_bit(tmp_path: Path, as_hf_dataset: bool) -> None:
    rows: Any = (
        Dataset.from_list(token_rows())
        if as_hf_dataset
        else [{k: torch.tensor(v) for k, v in row.items()} for row in token_rows()]
    )
    results = []
    for cls in (Trainer, SFTTrainer):
        folder = tmp_path / cls.__name__
        args = TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            num_train_epochs=2,
            logging_steps=1,
            eval_strategy="epoch",
            save_strategy="epoch",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = cls(tiny_model(), args, None, rows, rows)
        trainer.train()
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
        results.append((history(trainer), weights(trainer), files))
    assert results[0] == results[1]


def test_ready_tokens_are_left_alone_and_padded_with_their_labels(tmp_path: Path) -> None:
    uneven = [{"input_ids": [5, 6, 7], "labels": [-100, 6, 7]}, {"input_ids": [8, 9], "labels": [8, 9]}]
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, per_device_train_batch_size=2), None, uneven)
    (batch,) = batches(trainer)
    assert batch["input_ids"].tolist() == [[5, 6, 7], [8, 9, 0]]
    assert batch["labels"].tolist() == [[-100, 6, 7], [-100, 9, -100]]


def test_packed_token_rows_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    rows = [{"input_ids": list(range(5, 25)), "labels": list(range(5, 25))}]
    with pytest.raises(ConfigError, match="the longest of the token rows has 20 tokens, more than max_length 16"):
        SFTTrainer(tiny_model(), sgd_arguments(tmp_path, packing=True, max_length=16), train_dataset=rows)


def test_all_unsupported_options_are_named_at_once(tmp_path: Path) -> None:
    args = sgd_arguments(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(ConfigError, match="rows are ordered by \\(seed, epoch\\) alone"):
        SFTTrainer(tiny_model(), args, None, rows_with_labels(2), None, tiny_tokenizer())


def test_a_model_that_ignores_position_ids_is_not_trained_on_packed_rows(tmp_path: Path) -> None:
    class Deaf(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = tiny_model()
            self.config = self.inner.config

        def get_input_embeddings(self) -> torch.nn.Module:
            return self.inner.get_input_embeddings()

        def forward(self, input_ids: Any, position_ids: Any = None, labels: Any = None, use_cache: Any = None) -> Any:
            return self.inner(input_ids=input_ids, use_cache=False)

    rows, args = rows_with_labels(2, 5), sgd_arguments(tmp_path, packing=True, activation_checkpointing=False)
    trainer = SFTTrainer(Deaf(), args, None, rows, None, tiny_tokenizer())
    with pytest.raises(ConfigError, match="Deaf lets a packed document see the one before it"):
        trainer.train()


def test_the_log_counts_tokens_and_padding(tmp_path: Path) -> None:
    rows = [{"messages": chat("a", "b")}, {"messages": chat("cc", "dd")}]
    trainer = trained(tmp_path, rows, per_device_train_batch_size=2)
    assert logged(trainer, "tokens") == [48]  # 23 + 25
    assert logged(trainer, "supervised_tokens") == [5]
    assert logged(trainer, "padding_share") == [0.04]  # 2 of 50


def test_rows_of_an_update_are_named_for_a_diverging_loss(tmp_path: Path) -> None:
    rows = rows_with_labels(2, 5, 9, 3)
    trainer = SFTTrainer(
        tiny_model(),
        sgd_arguments(tmp_path, max_steps=2, per_device_train_batch_size=2, learning_rate=3e38),
        train_dataset=rows,
        processing_class=tiny_tokenizer(),
    )
    trainer.train()
    found: list[Any] = logged(trainer, "nonfinite")
    assert [(update["step"], update["rows"]) for updates in found for update in updates] == [(2, [3, 4])]


def test_the_order_after_a_mid_epoch_resume_is_that_of_the_whole_run(tmp_path: Path) -> None:
    rows = rows_with_labels(2, 5, 9, 3, 7, 4, 8, 6, 11, 10)
    changes: dict[str, Any] = {
        "max_steps": -1,
        "num_train_epochs": 3,
        "per_device_train_batch_size": 2,
        "train_sampling_strategy": "random",
        "learning_rate": 0.01,
        "optim": "adamw_torch",
        "save_strategy": "steps",
        "save_steps": 7,  # in the middle of the second epoch of 5 updates
    }
    whole = trained(tmp_path / "whole", rows, **changes)
    again = SFTTrainer(tiny_model(), sgd_arguments(tmp_path / "whole", **changes), None, rows, None, tiny_tokenizer())
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-7"))
    assert logged(again, "loss") == logged(whole, "loss")
    assert logged(again, "supervised_tokens") == logged(whole, "supervised_tokens")
    assert weights(again) == weights(whole)


def test_a_mapping_of_evaluation_sets_is_evaluated_one_by_one(tmp_path: Path) -> None:
    rows = rows_with_labels(2, 5)
    sets = {"short": rows[:1], "long": rows[1:]}
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path), None, rows, sets, tiny_tokenizer())
    metrics = trainer.evaluate()
    alone = SFTTrainer(tiny_model(), sgd_arguments(tmp_path), None, rows, rows[1:], tiny_tokenizer()).evaluate()
    assert metrics["eval_long_loss"] == pytest.approx(alone["eval_loss"], rel=1e-6)
    assert metrics["eval_short_loss"] != metrics["eval_long_loss"]


def test_compute_metrics_gets_every_logit_and_each_row_once(tmp_path: Path) -> None:
    shapes = []

    def count(prediction: Any) -> dict[str, float]:
        shapes.append(prediction.predictions.shape)
        return {"labels": float((prediction.label_ids != -100).sum())}

    rows = rows_with_labels(2, 5, 9)
    args = sgd_arguments(tmp_path, per_device_eval_batch_size=2)
    trainer = SFTTrainer(tiny_model(), args, None, None, rows, tiny_tokenizer(), compute_metrics=count)
    assert trainer.evaluate()["eval_labels"] == 16.0
    assert shapes[0][0] == 3
    assert shapes[0][2] == 261


def test_a_model_given_by_name_stops_at_the_end_of_an_assistant_turn(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 2
    model.save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    trainer = SFTTrainer(str(tmp_path / "model"), sgd_arguments(tmp_path), train_dataset=rows_with_labels(2))
    trainer.save_model(str(tmp_path / "saved"))
    config = json.loads((tmp_path / "saved" / "generation_config.json").read_text())
    assert sorted(config["eos_token_id"]) == [2, 4]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training_args.bin",
    ]


def test_ids_without_a_row_in_the_embedding_are_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the tokenizer has 261 ids and the model's embedding 200 rows"):
        SFTTrainer(
            tiny_model(vocab_size=200), sgd_arguments(tmp_path), None, rows_with_labels(2), None, tiny_tokenizer()
        )


def test_checkpointing_is_switched_off_with_a_notice_where_a_module_has_none(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1))

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": ((self.weight * x - labels) ** 2).mean()}

    rows = [{"x": torch.tensor([float(i)]), "labels": torch.tensor([2.0 * i])} for i in range(1, 4)]
    trainer = SFTTrainer(Linear(), sgd_arguments(tmp_path, learning_rate=0.1), train_dataset=rows)
    trainer.train()
    assert "activation checkpointing is off: Linear does not support it" in caplog.text
    assert trainer.state.global_step == 1


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_frozen_embedding_lets_gradients_in_only_for_checkpointing(tmp_path: Path, reentrant: bool) -> None:
    rows = rows_with_labels(2, 5)
    plain = trained(tmp_path, rows, lora(), activation_checkpointing=False)
    options = {"use_reentrant": reentrant}
    other = trained(tmp_path, rows, lora(), activation_checkpointing=True, activation_checkpointing_kwargs=options)
    assert largest_difference(plain, other) < 1e-6
    assert logged(plain, "grad_norm") == pytest.approx(logged(other, "grad_norm"), rel=1e-5)
    embedding = cast(Any, plain.model).get_input_embeddings()
    assert not embedding._forward_hooks  # the first layer would compute a gradient that nobody needs


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"num_train_epochs": 0, "max_steps": -1}, "num_train_epochs: 0 trains nothing"),
        (
            {"dataloader_drop_last": True, "per_device_train_batch_size": 50},
            "dataloader_drop_last: leaves nothing to train on: there are fewer rows than a batch takes "
            "(per_device_train_batch_size 50 x 1 processes)",
        ),
    ],
)
def test_a_training_without_an_update_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    rows = [{"messages": chat("a", "b")}]
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path, **changes), None, rows, None, tiny_tokenizer())
    with pytest.raises(ConfigError) as refused:
        trainer.train()
    assert str(refused.value) == said
    assert trainer.state.global_step == 0


def test_zero_steps_are_no_number_of_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_steps: 0 trains nothing; leave it out to go by num_train_epochs"):
        sgd_arguments(tmp_path, max_steps=0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"callbacks": [{"a": 1}]}, "callbacks[0] is {'a': 1}; expected a TrainerCallback, its class or an instance of "
         "it (names are for the YAML)"),
        ({"callbacks": [3]}, "callbacks[0] is 3; expected a TrainerCallback, its class or an instance of it"),
        ({"peft_config": {"r": 2}}, "peft_config is {'r': 2}; expected a configuration: peft.LoraConfig(r=..., ...)"),
    ],
)  # fmt: skip
def test_what_is_no_callback_and_no_configuration(tmp_path: Path, given: dict[str, Any], said: str) -> None:
    rows = [{"messages": chat("a", "b")}]
    with pytest.raises(ConfigError) as refused:
        SFTTrainer(tiny_model(), sgd_arguments(tmp_path), None, rows, None, tiny_tokenizer(), **given)
    assert str(refused.value) == said


def test_a_model_is_named_by_a_path_object_too(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    rows = [{"messages": chat("a", "b")}]
    trainer = SFTTrainer(tmp_path / "model", sgd_arguments(tmp_path / "out"), train_dataset=rows)  # type: ignore[arg-type]
    assert cast(Any, trainer.processing_class).get_vocab() == tiny_tokenizer().get_vocab()


def test_an_adapter_starts_from_the_same_values_whatever_loading_drew(tmp_path: Path) -> None:
    starts = []
    for lacking in (None, "model.layers.0.mlp.up_proj.weight"):
        folder = tmp_path / str(lacking)
        tiny_model().save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        weights = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in weights.items() if k != lacking}, folder / "model.safetensors", {"format": "pt"})
        rows = [{"messages": chat("a", "b")}]
        args = sgd_arguments(tmp_path / "out")
        trainer = SFTTrainer(str(folder), args, None, rows, peft_config=LoraArguments(r=2))
        starts.append({k: v for k, v in cast(Any, trainer.model).state_dict().items() if "lora_A" in k})
    assert starts[0].keys() == starts[1].keys()
    assert len(starts[0]) > 0
    assert all(torch.equal(starts[0][name], starts[1][name]) for name in starts[0])
