"""Layer monitor, memory, averages of weights, early stopping: what they say is what is there."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerCallback

from sft_toolkit import ConfigError, LoraArguments, SFTArguments, SFTTrainer
from sft_toolkit.callbacks import EmaCallback, LayersCallback, MemoryCallback
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels, sgd_arguments
from tests.unit.callback_runs import stock_trainer, token_rows


class Witness(TrainerCallback):
    """Sees by itself what the monitor reports: hooks on the model, gradient norms, weights before and after."""

    def __init__(self) -> None:
        self.hooked: list[int] = []
        self.gradients: list[dict[str, float]] = []
        self.weights: list[dict[str, torch.Tensor]] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.hooked.append(sum(len(module._forward_hooks) for module in model.modules()))
        self.gradients.append({n: float(p.grad.norm()) for n, p in model.named_parameters() if p.grad is not None})


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "layers.jsonl").read_text().splitlines()]


def test_the_numbers_are_those_of_the_model_and_hooks_are_there_only_while_sampling(tmp_path: Path) -> None:
    monitor, witness = LayersCallback(every=2, layers=["*.self_attn", "lm_head"], parameters=["*q_proj*"]), Witness()
    trainer = stock_trainer(
        tmp_path, [monitor, witness], gradient_accumulation_steps=2, train_sampling_strategy="sequential"
    )
    before: Any = tiny_model()
    trainer.train()
    first, second = lines(tmp_path)
    assert (first["step"], second["step"], first["first_nonfinite"]) == (1, 3, None)
    layers = ["model.layers.0.self_attn", "model.layers.1.self_attn", "lm_head"]
    assert list(first["activations"]) == layers
    ids = torch.tensor([row["input_ids"] for row in token_rows()[:2]])
    logits = before(input_ids=ids).logits.detach()
    assert first["activations"]["lm_head"] == pytest.approx(float(logits.square().mean().sqrt()), rel=1e-5)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert list(first["gradients"]) == [name, name.replace("0", "1")]
    assert first["gradients"][name] == pytest.approx(witness.gradients[0][name], rel=1e-5)
    assert second["gradients"][name] == pytest.approx(witness.gradients[2][name], rel=1e-5)
    change = (witness.weights[1][name] - witness.weights[0][name]).norm() / witness.weights[1][name].norm()
    assert first["updates"][name] == pytest.approx(float(change), rel=1e-4)
    assert witness.hooked == [3, 0, 3]
    assert (tmp_path / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_an_adapted_layer_is_one_layer_under_its_own_name(tmp_path: Path) -> None:
    monitor = LayersCallback(every=1, layers=["*q_proj", "*mlp"])
    rows, args = rows_with_labels(3, 5), sgd_arguments(tmp_path)  # with activation checkpointing
    peft = LoraArguments(r=4, targets=["q_proj"])
    SFTTrainer(tiny_model(), args, None, rows, None, tiny_tokenizer(), callbacks=[monitor], peft_config=peft).train()
    (found,) = lines(tmp_path)
    assert sorted(found["activations"]) == [
        "model.layers.0.mlp",
        "model.layers.0.self_attn.q_proj",
        "model.layers.1.mlp",
        "model.layers.1.self_attn.q_proj",
    ]
    assert sorted(found["gradients"]) == [
        f"model.layers.{i}.self_attn.q_proj.lora_{part}" for i in (0, 1) for part in ("A", "B")
    ]
    assert found["updates"]["model.layers.0.self_attn.q_proj.lora_B"] > 0


@pytest.mark.parametrize(
    ("breaks_after", "every", "named"),
    # a sampled step finds the layer itself; a loss that is not finite asks for a sample, when all weights are NaN
    [(2, 2, "model.layers.1.mlp.up_proj"), (1, 100, "model.embed_tokens")],
)
def test_the_first_layer_that_breaks_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, breaks_after: int, every: int, named: str
) -> None:
    class Breaks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            if state.global_step == breaks_after:
                with torch.no_grad():
                    model.model.layers[1].mlp.up_proj.weight[0, 0] = float("inf")

    trainer = stock_trainer(tmp_path, [Breaks(), LayersCallback(every=every)])
    with caplog.at_level(logging.WARNING, "sft_toolkit"):
        trainer.train()
    assert [(line["step"], line["first_nonfinite"]) for line in lines(tmp_path)] == [(1, None), (3, named)]
    assert caplog.messages == [f"step 3: the first layer whose output is not finite is {named}"]


def test_patterns_in_vain_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"layers\.layers: '\*q_prj' matches nothing; did you mean 'q_proj'\?"):
        stock_trainer(tmp_path, [LayersCallback(layers=["*q_prj"])]).train()


def test_averages_follow_their_formula_and_are_what_the_run_ends_with(tmp_path: Path) -> None:
    seen: list[torch.Tensor] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(model.lm_head.weight.detach().clone())

    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    trainer = stock_trainer(tmp_path, [Watch(), EmaCallback(0.25)], **options)
    trainer.train()
    average: torch.Tensor = tiny_model().lm_head.weight.detach()
    for n, weight in enumerate(seen, start=1):
        decay = min(0.25, (1 + n) / (10 + n))
        average = decay * average + (1 - decay) * weight
        if n == 2:
            held = load_file(tmp_path / "checkpoint-2" / "ema.safetensors")["lm_head.weight"]
            torch.testing.assert_close(held, average)
    final: Any = trainer.model
    torch.testing.assert_close(final.lm_head.weight.detach(), average)
    again = stock_trainer(tmp_path, [EmaCallback(0.25)], **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    model: Any = again.model
    assert torch.equal(model.lm_head.weight, final.lm_head.weight)
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 2}
    contradicting = stock_trainer(tmp_path, [EmaCallback()], **options, **best)
    with pytest.raises(ConfigError, match="an average of all updates is not the best model"):
        contradicting.train()


def test_memory_stands_in_the_log_event_for_the_callbacks_behind(tmp_path: Path) -> None:
    found: list[dict[str, Any]] = []

    class Behind(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            found.append(dict(logs))

    stock_trainer(tmp_path, [MemoryCallback(), Behind()], max_steps=1).train()
    assert found[0]["memory_host_peak_mib"] >= found[0].get("memory_host_mib", 0.0) > 50
    assert "memory_host_mib" not in found[-1]  # the summary of the training is no moment


def test_early_stopping_works_on_the_eval_loss_of_text_rows(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"max_steps": 9, "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    changes |= {"save_steps": 1, "load_best_model_at_end": True, "metric_for_best_model": "eval_loss"}
    args = sgd_arguments(tmp_path, learning_rate=0.0, **changes)  # nothing gets better
    rows = rows_with_labels(3, 5, 9)
    stopper = EarlyStoppingCallback(early_stopping_patience=2)
    trainer = SFTTrainer(tiny_model(), args, None, rows, rows, tiny_tokenizer(), callbacks=[stopper])
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (3, 1)
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], abs=1e-6)


def test_no_tracker_is_on_unless_asked_for(tmp_path: Path) -> None:
    assert SFTArguments(output_dir=str(tmp_path)).report_to == []
