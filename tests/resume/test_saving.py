"""SFTTrainer's checkpoints: whole or not there, finite, rotated by number, resumed from the newest good one."""

from __future__ import annotations

import inspect
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainerCallback

from sft_toolkit import CheckpointError, SFTArguments, SFTTrainer, TrainingDivergedError
from sft_toolkit.checkpoints.checkpoint import newest_good, why_incomplete
from sft_toolkit.checkpoints.marker import mark_complete
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels, sgd_arguments

ROWS = rows_with_labels(1, 5, 3, 9, 2, 7)


def trainer(folder: Path, *callbacks: TrainerCallback, **changes: Any) -> SFTTrainer:
    settings: dict[str, Any] = {
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 1,
        "max_steps": 6,
        "save_strategy": "steps",
        "save_steps": 1,
        "activation_checkpointing": False,
    }
    return SFTTrainer(
        model=tiny_model(),
        args=sgd_arguments(folder, **{**settings, **changes}),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def weights(trained: SFTTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trained.model.state_dict().items()}  # type: ignore[union-attr]


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class At(TrainerCallback):
    """Does something at the beginning of one step (1-based)."""

    def __init__(self, step: int, action: Any) -> None:
        self.step, self.action = step, action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step + 1 == self.step:
            self.action(kwargs["model"])


def break_weights(model: torch.nn.Module) -> None:
    next(model.parameters()).data.fill_(float("nan"))


# ---- Whole, and rotated by number ------------------------------------------------------------------------------------


def test_every_checkpoint_is_whole_and_nothing_unfinished_stays(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watch(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(names(tmp_path))

    trained = trainer(tmp_path, Watch(), max_steps=4, save_steps=2)
    trained.train()
    assert seen == [["checkpoint-2"], ["checkpoint-2", "checkpoint-4"]]
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-4"]
    assert [why_incomplete(folder) for folder in tmp_path.iterdir()] == [None, None]


def test_foreign_folders_stay_and_the_limit_counts_whole_checkpoints_only(tmp_path: Path) -> None:
    foreign = ["checkpoint-3x", "checkpoint-best", "checkpoint-foreign"]
    for name in foreign:
        (tmp_path / name).mkdir()
    trained = trainer(tmp_path, save_total_limit=2)
    trained.train()
    assert names(tmp_path) == sorted([*foreign, "checkpoint-5", "checkpoint-6"])
    assert trained.args.save_total_limit == 2
    longer = trainer(tmp_path, save_total_limit=2, max_steps=8)
    longer.train(resume_from_checkpoint=True)
    assert names(tmp_path) == sorted([*foreign, "checkpoint-7", "checkpoint-8"])


@pytest.mark.parametrize("limit", [1, 2])
def test_the_best_and_the_latest_stay_and_the_best_weights_are_loaded(tmp_path: Path, limit: int) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    changes |= {"metric_for_best_model": "eval_loss", "greater_is_better": True}  # so that the first stays the best
    trained = trainer(tmp_path, save_total_limit=limit, max_steps=4, **changes)
    trained.train()
    best = str(tmp_path / "checkpoint-1")
    assert trained.state.best_model_checkpoint == best
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-4"]
    assert json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())["best_model_checkpoint"] == best
    assert json.loads((tmp_path / "checkpoint-1" / "trainer_state.json").read_text())["best_model_checkpoint"] == best
    saved = load_file(tmp_path / "checkpoint-1" / "model.safetensors")
    assert same(weights(trained), saved)

    longer = trainer(tmp_path, save_total_limit=limit, max_steps=6, **changes)
    longer.train(resume_from_checkpoint=True)
    assert longer.state.best_model_checkpoint == best
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-6"]


def test_another_rhythm_of_saving_and_logging_holds_after_a_resume(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2, save_steps=2, logging_steps=1).train()
    longer = trainer(tmp_path, max_steps=6, save_steps=3, logging_steps=3)
    longer.train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3", "checkpoint-6"]
    assert [entry["step"] for entry in longer.state.log_history if "loss" in entry] == [1, 2, 3, 6]


def test_a_broken_checkpoint_in_the_way_is_replaced(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=2).train()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(bytes(16))
    (tmp_path / "checkpoint-2" / "left.over").touch()
    trainer(tmp_path, max_steps=2).train(resume_from_checkpoint=True)
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert why_incomplete(tmp_path / "checkpoint-2") is None
    assert not (tmp_path / "checkpoint-2" / "left.over").exists()


def test_what_another_callback_adds_to_a_checkpoint_is_marked_too(tmp_path: Path) -> None:
    class Adds(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            folder = tmp_path / f"checkpoint-{state.global_step}"
            (folder / "notes.txt").write_text("more")
            (folder / "config.json").write_text("{}")

    trainer(tmp_path, Adds(), max_steps=1).train()
    listed = json.loads((tmp_path / "checkpoint-1" / "COMPLETE").read_text())["files"]
    assert listed["notes.txt"]["bytes"] == 4
    assert why_incomplete(tmp_path / "checkpoint-1") is None


def test_what_a_killed_process_left_unfinished_is_removed(tmp_path: Path) -> None:
    (tmp_path / "_unfinished" / "checkpoint-3").mkdir(parents=True)
    (tmp_path / "_unfinished" / "checkpoint-3" / "model.safetensors").write_bytes(b"half")
    trainer(tmp_path, max_steps=1).train()
    assert names(tmp_path) == ["checkpoint-1"]


# ---- Sick runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop_after", [1, 2])
def test_after_a_non_finite_update_nothing_is_saved_and_the_run_stops(tmp_path: Path, stop_after: int) -> None:
    trained = trainer(tmp_path, At(3, break_weights), save_total_limit=2, stop_after_nonfinite=stop_after)
    with pytest.raises(TrainingDivergedError) as caught:
        trained.train()
    assert "step 3: loss nan" in str(caught.value)
    assert trained.state.global_step == 2 + stop_after
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2"]
    assert trained.is_in_train is False

    again = trainer(tmp_path, save_total_limit=2)
    again.train(resume_from_checkpoint=True)
    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    assert same(weights(again), weights(whole))


def test_a_gradient_that_is_not_finite_is_no_update_to_save(tmp_path: Path) -> None:
    def infinite(model: torch.nn.Module) -> None:
        next(model.parameters()).register_hook(lambda gradient: gradient * float("inf"))

    trained = trainer(tmp_path, At(2, infinite), stop_after_nonfinite=2)
    with pytest.raises(TrainingDivergedError):
        trained.train()
    assert names(tmp_path) == ["checkpoint-1"]


def test_an_update_that_is_not_finite_can_be_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def once_infinite(model: torch.nn.Module) -> None:
        factors = iter([float("inf")])
        next(model.parameters()).register_hook(lambda gradient: gradient * next(factors, 1.0))

    before: list[dict[str, torch.Tensor]] = []
    look = At(4, lambda model: before.append({n: v.clone() for n, v in model.state_dict().items()}))
    trained = trainer(tmp_path, At(3, once_infinite), look, on_nonfinite="skip", max_steps=5)
    trained.train()
    assert same(before[0], load_file(tmp_path / "checkpoint-2" / "model.safetensors"))
    assert not same(weights(trained), before[0])
    history: list[Any] = trained.state.log_history
    assert [entry["nonfinite"][0]["step"] for entry in history if "nonfinite" in entry] == [3]
    assert "update 3 is left out: its gradient is not finite" in caplog.messages
    assert names(tmp_path) == ["checkpoint-1", "checkpoint-2", "checkpoint-4", "checkpoint-5"]


def test_weights_that_no_loss_shows_to_be_broken_are_not_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def break_an_unused_row(model: torch.nn.Module) -> None:
        model.get_input_embeddings().weight.data[2] = float("inf")  # type: ignore[operator]

    trained = trainer(tmp_path, At(2, break_an_unused_row), max_steps=3)
    trained.train()
    assert names(tmp_path) == ["checkpoint-1"]
    assert "no checkpoint at step 3: the weights hold NaN or infinity" in caplog.messages


def test_a_checkpoint_with_weights_that_are_not_finite_is_passed_over_and_not_kept_for(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=3).train()
    sick = tmp_path / "checkpoint-3"
    tensors = load_file(sick / "model.safetensors")
    tensors["lm_head.weight"][0, 0] = float("nan")
    save_file(tensors, sick / "model.safetensors", metadata={"format": "pt"})
    mark_complete(sick)
    good, skipped = newest_good(tmp_path)
    assert good == tmp_path / "checkpoint-2"
    assert skipped == [(sick, "model.safetensors: tensor 'lm_head.weight' holds 1 NaN or infinite numbers")]
    shutil.copytree(sick, tmp_path / "checkpoint-4")
    trainer(tmp_path, max_steps=5, save_steps=5, save_total_limit=2).train(str(tmp_path / "checkpoint-2"))
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-5"]


def test_the_same_holds_for_rows_that_are_tensors_already(tmp_path: Path) -> None:
    tokens = [{"input_ids": [5 + i, 6, 7], "labels": [5 + i, 6, 7], "attention_mask": [1, 1, 1]} for i in range(4)]
    arguments = SFTArguments(
        output_dir=str(tmp_path), max_steps=4, save_steps=1, logging_steps=1, stop_after_nonfinite=2, disable_tqdm=True
    )
    trained = SFTTrainer(tiny_model(), arguments, None, tokens, callbacks=[At(2, break_weights)])
    with pytest.raises(TrainingDivergedError):
        trained.train()
    assert names(tmp_path) == ["checkpoint-1"]


# ---- Errors ----------------------------------------------------------------------------------------------------------


def fail(*_: Any) -> None:
    raise RuntimeError("boom")


class FailsAtStepEnd(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            fail()


@pytest.mark.parametrize("at", ["step begin", "forward", "backward", "step end"])
def test_when_an_error_ends_the_training_its_last_whole_update_is_saved(tmp_path: Path, at: str) -> None:
    def during_forward(model: torch.nn.Module) -> None:
        torch.rand(3)  # random numbers of the step that fails
        model.get_output_embeddings().register_forward_hook(fail)  # type: ignore[operator]

    def during_backward(model: torch.nn.Module) -> None:
        next(model.parameters()).register_hook(fail)

    actions = {"step begin": At(4, fail), "forward": At(4, during_forward), "backward": At(4, during_backward)}
    broken = trainer(tmp_path, actions.get(at, FailsAtStepEnd()), save_steps=2)
    with pytest.raises(RuntimeError, match="boom"):
        broken.train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert why_incomplete(tmp_path / "checkpoint-3") is None
    resumed, whole = trainer(tmp_path), trainer(tmp_path / "whole", save_strategy="no")
    resumed.train(resume_from_checkpoint=True)
    whole.train()
    assert same(weights(resumed), weights(whole))


def test_what_belongs_to_two_updates_or_is_not_wanted_is_not_saved(tmp_path: Path) -> None:
    class Breaks(TrainerCallback):
        def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                fail()

    for folder, changes in (("between", {}), ("unwanted", {"save_on_error": False})):
        callback = Breaks() if folder == "between" else At(4, fail)
        with pytest.raises(RuntimeError, match="boom"):
            trainer(tmp_path / folder, callback, save_steps=2, **changes).train()
        assert names(tmp_path / folder) == ["checkpoint-2"]
    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path / "sick", At(3, break_weights), At(4, fail), save_steps=2, stop_after_nonfinite=9).train()
    assert names(tmp_path / "sick") == ["checkpoint-2"]


# ---- Going on --------------------------------------------------------------------------------------------------------


def test_true_takes_the_newest_whole_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer(tmp_path, max_steps=3).train()
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"")
    (tmp_path / "checkpoint-2" / "rng_state.pth").unlink()
    resumed = trainer(tmp_path)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.log_history[0]["step"] == 1
    size = (tmp_path / "checkpoint-1" / "rng_state.pth").stat().st_size
    assert [line for line in caplog.messages if "is skipped" in line] == [
        f"{tmp_path / 'checkpoint-3'} is skipped: optimizer.pt: is cut or no torch file",
        f"{tmp_path / 'checkpoint-2'} is skipped: rng_state.pth: is gone, 0 of {size} bytes",
    ]
    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    assert same(weights(resumed), weights(whole))


def test_true_with_nothing_whole_says_why(tmp_path: Path) -> None:
    trainer(tmp_path, max_steps=1).train()
    (tmp_path / "checkpoint-1" / "COMPLETE").unlink()
    with pytest.raises(CheckpointError, match="checkpoint-1: no COMPLETE marker"):
        trainer(tmp_path).train(resume_from_checkpoint=True)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer(tmp_path / "empty").train(resume_from_checkpoint=True)


@pytest.mark.parametrize(
    "changes", [{"max_steps": 4}, {"max_steps": -1, "num_train_epochs": 2}], ids=["steps", "epochs"]
)
def test_from_a_checkpoint_at_the_end_no_step_is_trained(tmp_path: Path, changes: dict[str, Any]) -> None:
    first = trainer(tmp_path, save_steps=2, **changes)
    first.train()
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    again = trainer(tmp_path, save_steps=2, **changes)
    output = again.train(resume_from_checkpoint=True)
    assert output.global_step == first.state.global_step == first.state.max_steps
    assert same(weights(again), weights(first))
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


# ---- What is relied on in Trainer ------------------------------------------------------------------------------------


def test_the_private_methods_of_trainer_are_those_that_are_overridden() -> None:
    assert list(inspect.signature(Trainer._save_checkpoint).parameters) == ["self", "model", "trial"]
    assert list(inspect.signature(Trainer._get_output_dir).parameters) == ["self", "trial"]
    assert list(inspect.signature(Trainer._push_from_checkpoint).parameters) == ["self", "checkpoint_folder"]
    source = inspect.getsource(Trainer)
    assert (
        source.count("_get_output_dir(") == 3
    )  # its definition, where a checkpoint is written, the clean-up at the end
    assert source.count("self._save_checkpoint(model, trial)") == 1
    assert source.count("self._push_from_checkpoint(output_dir)") == 1
