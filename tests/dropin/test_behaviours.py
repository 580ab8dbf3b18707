"""What users do with a Trainer in one process: search, train twice, interrupt, look at it, listen to its loggers."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import accelerate
import optuna
import pytest
import torch
import transformers
from transformers import Trainer, TrainerCallback

from sft_toolkit import LoraArguments, SFTTrainer
from tests.dropin.setups import Points, Regression, arguments, token_rows
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import logged, rows_with_labels, sgd_arguments


def found(trainer: Any) -> Any:
    """The best of three trials of a search that draws the same ones each time."""

    def space(trial: Any) -> dict[str, float]:
        return {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.1)}

    sampler = optuna.samplers.RandomSampler(seed=1)
    options = {"n_trials": 3, "direction": "minimize", "backend": "optuna", "sampler": sampler}
    best = trainer.hyperparameter_search(space, **options)
    return best.run_id, best.objective, best.hyperparameters


def test_a_search_finds_what_trainer_finds(tmp_path: Path) -> None:
    results = []
    classes: list[Any] = [Trainer, SFTTrainer]
    for cls in classes:
        args = arguments(tmp_path, eval_strategy="epoch", num_train_epochs=1)
        trainer = cls(None, args, None, Points(), Points(7), model_init=lambda: Regression())
        results.append(found(trainer))
    assert results[0] == results[1]


def test_a_search_over_text_rows_and_an_adapter_starts_each_trial_anew(tmp_path: Path) -> None:
    rows = rows_with_labels(3, 5, 9)
    args = sgd_arguments(tmp_path, max_steps=3, optim="adamw_torch")

    def trainer(**changes: Any) -> SFTTrainer:
        for name, value in changes.items():
            setattr(args, name, value)
        given: Any = {"model_init": lambda: tiny_model(), "peft_config": LoraArguments(r=4)}
        return SFTTrainer(None, args, None, rows, rows, tiny_tokenizer(), **given)

    _, objective, values = found(trainer())
    alone = trainer(**values)
    alone.train()
    assert objective == pytest.approx(alone.evaluate()["eval_loss"], abs=1e-6)


def test_the_loggers_are_trainers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("transformers.trainer")
    logger.addHandler(caplog.handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        SFTTrainer(Regression(), arguments(tmp_path, max_steps=1), None, Points()).train()
    finally:
        logger.removeHandler(caplog.handler)
        logger.setLevel(level)
    assert any("Running training" in record.message for record in caplog.records)
    assert {record.name for record in caplog.records} == {"transformers.trainer"}


def test_what_can_be_asked_of_a_trainer(tmp_path: Path) -> None:
    answers = []
    for cls in (Trainer, SFTTrainer):
        trainer: Any = cls(tiny_model(), arguments(tmp_path, max_steps=2, learning_rate=1e-3), None, token_rows())
        trainer.train()
        answers.append(
            [
                trainer.get_num_trainable_parameters(),
                trainer.get_learning_rates(),
                len(trainer.get_optimizer_group()),
                trainer.num_examples(trainer.get_train_dataloader()),
                trainer.get_total_train_batch_size(trainer.args),
                trainer.is_world_process_zero(),
                sorted(trainer.get_decay_parameter_names(trainer.model)),
                type(trainer.optimizer).__name__,
                trainer.model_accepts_loss_kwargs,
                trainer.is_in_train,
            ]
        )
    assert answers[0] == answers[1]


def process_state() -> dict[str, Any]:
    return {
        "environment": dict(os.environ),
        "classes": [dict(vars(c)) for c in (Trainer, TrainerCallback, transformers.LlamaForCausalLM)],
        "modules": [set(vars(module)) - {"_C"} for module in (accelerate, transformers.trainer)],
        "dtype": torch.get_default_dtype(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "loggers": (logging.getLogger().level, transformers.logging.get_verbosity()),
    }


@pytest.mark.parametrize("packing", [False, True])
def test_twice_in_one_process_with_an_interrupt_between(tmp_path: Path, packing: bool) -> None:
    class Interrupt(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                raise KeyboardInterrupt

    def trainer(callbacks: Any = None, **changes: Any) -> SFTTrainer:
        args = sgd_arguments(tmp_path, max_steps=4, learning_rate=0.1, packing=packing, **changes)
        rows = rows_with_labels(3, 5, 9)
        config = LoraArguments(r=4)
        return SFTTrainer(
            tiny_model(), args, None, rows, rows, tiny_tokenizer(), callbacks=callbacks, peft_config=config
        )

    trainer().train()  # what is imported on first use is imported now
    before = process_state()
    first = trainer()
    first.train()
    stopped = trainer([Interrupt()])
    with pytest.raises(KeyboardInterrupt):
        stopped.train()
    stopped.pop_callback(Interrupt)
    stopped.evaluate()  # a notebook goes on with the same object
    again = trainer()
    again.train()
    assert logged(again, "loss") == logged(first, "loss")
    assert process_state() == before
