"""Checkpoints written behind the training: byte for byte those that are written at once, and as safe."""

from __future__ import annotations

import errno
import inspect
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import Trainer, TrainerCallback

from sft_toolkit import CheckpointError, SFTTrainer
from sft_toolkit.callbacks.ema import EmaCallback
from sft_toolkit.checkpoints.background import Background
from sft_toolkit.checkpoints.checkpoint import newest_good, why_incomplete
from sft_toolkit.checkpoints.snapshot import in_host_memory
from sft_toolkit.training.saving_behind import async_save_problems
from tests.resume.test_saving import At, names, same, trainer, weights
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import lora, rows_with_labels, sgd_arguments

NO_SPACE = os.strerror(errno.ENOSPC)


class Held(SFTTrainer):
    """Its thread waits for `go` before it writes."""

    go: threading.Event

    def write_copied(self, *args: Any) -> None:
        assert self.go.wait(20)
        super().write_copied(*args)


class Full(SFTTrainer):
    """Its second checkpoint meets a full disk, in the thread."""

    def write_copied(self, copied: Any, folder: Path) -> None:
        super().write_copied(copied, folder)
        if folder.name == "checkpoint-2":
            raise OSError(errno.ENOSPC, NO_SPACE)


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_the_files_are_those_of_a_save_at_once(tmp_path: Path, adapter: bool) -> None:
    folders = {}
    for name, in_thread in (("at once", False), ("behind", True)):
        arguments = sgd_arguments(
            tmp_path / name, optim="adamw_torch", learning_rate=1e-3, max_steps=3, save_strategy="steps", save_steps=1
        )
        arguments.async_save = in_thread
        model = tiny_model(tie_word_embeddings=True)
        extra = {"peft_config": lora()} if adapter else {}
        trained = SFTTrainer(
            model,
            arguments,
            None,
            rows_with_labels(1, 5, 3),
            None,
            tiny_tokenizer(),
            callbacks=[EmaCallback()],
            **extra,
        )
        trained.train()
        assert names(tmp_path / name) == ["checkpoint-1", "checkpoint-2", "checkpoint-3"]
        folders[name] = tmp_path / name / "checkpoint-2"
        assert why_incomplete(folders[name]) is None
    once, behind = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders.values())
    assert once.keys() == behind.keys()
    assert "ema.safetensors" in once
    different = {name for name in once if once[name] != behind[name]}
    assert different <= {"training_args.bin", "trainer_state.json", "COMPLETE"}  # output_dir, speed, checksums of both


def test_training_goes_on_while_a_checkpoint_is_written_and_it_holds_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.resume.test_saving.SFTTrainer", Held)
    Held.go = threading.Event()
    at_two: list[dict[str, torch.Tensor]] = []
    look = At(3, lambda model: at_two.append({n: v.clone() for n, v in model.state_dict().items()}))
    seen: list[list[str]] = []

    class Goes(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 4:  # two updates behind the one that is being written
                seen.append(names(tmp_path))
                Held.go.set()

    trained = trainer(tmp_path, look, Goes(), save_steps=2, async_save=True, save_total_limit=2)
    trained.train()
    assert seen == [["_unfinished"]]
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-6"]
    assert [why_incomplete(folder) for folder in tmp_path.iterdir()] == [None, None]
    whole = trainer(tmp_path / "whole", save_strategy="no")
    whole.train()
    assert same(weights(trained), weights(whole))
    resumed = trainer(tmp_path / "again", async_save=True)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert same(weights(resumed), weights(whole))
    del Held.go

    Held.go = threading.Event()
    Held.go.set()
    trainer(tmp_path / "two", max_steps=3, save_steps=2, async_save=True).train()
    assert same(load_file(tmp_path / "two" / "checkpoint-2" / "model.safetensors"), at_two[0])


def test_what_writing_meets_is_an_error_at_the_next_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.resume.test_saving.SFTTrainer", Full)

    class Waits(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            for thread in threading.enumerate():
                if thread.name == "checkpoint-writer":
                    thread.join()

    broken = trainer(tmp_path, Waits(), async_save=True)
    with pytest.raises(CheckpointError) as caught:
        broken.train()
    assert broken.state.global_step == 3
    assert str(caught.value).startswith(f"'{tmp_path / 'checkpoint-2'}' could not be written: {NO_SPACE}. ")
    assert str(caught.value).endswith(
        "Older checkpoints (checkpoint-1) are untouched; mend that, then run the same command to go on."
    )
    assert names(tmp_path) == ["checkpoint-1"]
    assert newest_good(tmp_path) == (tmp_path / "checkpoint-1", [])

    last = trainer(tmp_path / "last", async_save=True, max_steps=2)
    with pytest.raises(CheckpointError, match="checkpoint-2' could not be written"):
        last.train()
    assert names(tmp_path / "last") == ["checkpoint-1"]


def test_an_error_and_an_interrupt_wait_for_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.resume.test_saving.SFTTrainer", Held)
    Held.go = threading.Event()

    def fail(_: Any) -> None:
        threading.Timer(0.1, Held.go.set).start()
        raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        trainer(tmp_path, At(4, fail), save_steps=2, async_save=True).train()
    assert names(tmp_path) == ["checkpoint-2", "checkpoint-3"]
    assert [why_incomplete(folder) for folder in tmp_path.iterdir()] == [None, None]
    assert "checkpoint-writer" not in [thread.name for thread in threading.enumerate()]

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = control.should_save = state.global_step == 3

    trainer(tmp_path / "stopped", Stops(), save_steps=5, async_save=True).train()
    assert names(tmp_path / "stopped") == ["checkpoint-3"]


def test_the_best_one_is_there_when_it_is_loaded(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True, "max_steps": 3}
    changes |= {"metric_for_best_model": "eval_loss", "save_total_limit": 1, "async_save": True}
    trained = trainer(tmp_path, **changes)
    trained.train()
    assert trained.state.best_model_checkpoint == str(tmp_path / "checkpoint-3")
    assert names(tmp_path) == ["checkpoint-3"]
    assert same(weights(trained), load_file(tmp_path / "checkpoint-3" / "model.safetensors"))


def test_what_it_can_not_hold_under_is_refused_by_name() -> None:
    parallel = SimpleNamespace(tp_enabled=True)
    args = SimpleNamespace(
        async_save=True,
        deepspeed={"train_batch_size": 1},
        fsdp=["x"],
        parallelism_config=parallel,
        push_to_hub=True,
        hub_strategy="every_save",
    )
    copies = "async_save: copies weights and optimizer state, which "
    assert list(async_save_problems(args)) == [
        copies + "DeepSpeed keeps and writes itself, all ranks together; leave it out",
        copies + "FSDP spreads over processes; leave it out",
        copies + "tensor parallelism spreads over processes; leave it out",
        "async_save: hub_strategy every_save uploads at the save itself; write hub_strategy: end",
    ]
    args.async_save = False
    assert list(async_save_problems(args)) == []


def test_what_is_relied_on_in_trainer() -> None:
    assert list(inspect.signature(Trainer._save).parameters) == ["self", "output_dir", "state_dict"]
    assert list(inspect.signature(Trainer._save_optimizer_and_scheduler).parameters) == ["self", "output_dir"]
    source = inspect.getsource(Trainer._save_checkpoint)
    assert source.count("self.save_model(output_dir, _internal_call=True)") == 1
    assert source.count("self._save_optimizer_and_scheduler(output_dir)") == 1


def test_tied_tensors_stay_tied_and_constant_ones_are_not_copied() -> None:
    weight, frozen = torch.arange(6.0).reshape(2, 3), torch.ones(2)
    held = {"a": weight, "b": [weight, frozen, 7], "c": (weight.t(),), "d": torch.empty(0)}
    copied = in_host_memory(held, lambda tensor: tensor.data_ptr() == frozen.data_ptr())
    weight.zero_()
    assert copied["a"] is copied["b"][0]
    assert copied["a"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert copied["b"][1] is frozen
    assert copied["b"][2] == 7
    assert copied["c"][0].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert copied["d"].shape == (0,)


def test_an_error_in_the_background_comes_up_once() -> None:
    def fail() -> None:
        raise ValueError("boom")

    background = Background("test")
    background.start(fail)
    with pytest.raises(ValueError, match="boom"):
        background.wait()
    background.wait()
    background.look()
