"""`check` and `train` refuse the same things, before data and model, and leave nothing behind."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml

from tests.e2e.workshop import Outcome, Workshop


@pytest.fixture(autouse=True)
def not_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither rows nor weights are read in these tests."""

    def reached(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the run went on to its data")

    # `commands` holds the function by its own name; imported under the patch it would keep the stand-in for ever.
    for module in ("commands", "assemble"):
        monkeypatch.setattr(f"sft_toolkit.{module}.prepare_data", reached)


def refused(workshop: Workshop, *overrides: str) -> list[str]:
    """The message, the same from both commands."""
    checked, trained = workshop.run("check", *overrides), workshop.run("train", *overrides)
    assert (checked.code, trained.code) == (2, 2), checked.err + trained.err
    assert _message(checked) == _message(trained)
    assert checked.out == ""
    assert not workshop.out.exists()
    return _message(checked)


def _message(outcome: Outcome) -> list[str]:
    lines = outcome.err.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("error: "))
    return [lines[first].removeprefix("error: "), *lines[first + 1 :]]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("training.report_to=comet_ml",
         "training.report_to: comet_ml needs a package that is not installed: pip install comet-ml"),
        ("training.lr_scheduler_type=warmup_stable_decay",
         "training.lr_scheduler_kwargs: warmup_stable_decay: missing option 'num_decay_steps' (accepted: "
         "num_decay_steps, num_stable_steps, warmup_type, decay_type, min_lr_ratio, num_cycles)"),
        ("training.optim_args=foo",
         "training.optim_args: expected name=value, several with commas between, not 'foo'"),
        ("training.dataloader_persistent_workers=true",
         "training.dataloader_persistent_workers: needs worker processes; set training.dataloader_num_workers"),
        ("training.max_steps=0",
         "training.max_steps: 0 trains nothing; leave it out to go by num_train_epochs"),
        ("training.save_strategy=best",
         "training.save_strategy: best needs training.metric_for_best_model, such as loss"),
        ("training.precision=fp16",
         "training.precision fp16 (asked for by precision) needs a GPU, and the run is on the CPU; take fp32"),
        ("callbacks=[collections.Counter]",
         "callbacks: callback 'collections.Counter' is a Counter; expected a transformers.TrainerCallback"),
        ("callbacks=[{curve: {zz: 1}}]",
         "callbacks.0: callback 'curve': unknown option 'zz' (accepted: every_seconds)"),
        ("data.group_by=customer",
         "data.group_by: has a meaning for val_split only; take it out, or set val_split"),
        ("data.eval=null", "training.eval_strategy: needs held-out rows; set data.eval or data.val_split"),
    ],
)  # fmt: skip
def test_check_and_train_say_the_same(workshop: Workshop, override: str, message: str) -> None:
    (found,) = refused(workshop, override)
    for place in (f"override '{override}': ", f"{workshop.folder / 'run.yaml'}:"):
        found = found.removeprefix(place)
    assert found.lstrip("0123456789: ") == message


def test_everything_at_once(workshop: Workshop) -> None:
    found = refused(
        workshop,
        "data.group_by=customer",
        "training.report_to=nope",
        "callbacks=[os.nope]",
        "model.attn_implementation=flash",
        "distributed.backend=glo",
    )
    assert [line.partition(":")[0] for line in found] == [
        "distributed.backend",
        "data.group_by",
        "callbacks",
        "model.attn_implementation",
        "training.report_to",
    ]


def test_two_deepspeed_settings(workshop: Workshop) -> None:
    workshop.config["distributed"] = {"deepspeed": "configs/ds_zero3.json"}
    found = refused(workshop, "training.deepspeed=configs/ds_zero2.json")
    assert found[0].endswith("training.deepspeed: contradicts distributed.deepspeed; keep one of them")


def test_settings_in_section_training_need_a_launcher_too(workshop: Workshop) -> None:
    workshop.config["training"]["deepspeed"] = {"zero_optimization": {"stage": 2}}
    outcome = workshop.run("train")
    assert outcome.code == 2
    assert "training.deepspeed (strategy zero2) needs a launcher" in outcome.err


def test_parallelism_of_more_processes_than_run(workshop: Workshop) -> None:
    workshop.config["training"]["parallelism_config"] = {"tp_size": 2}
    outcome = workshop.run("train")
    assert outcome.code == 2
    assert "training.parallelism_config: its sizes multiply to 2 processes, and 1 run" in outcome.err


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "1"}, "error (rank 1): RANK=1 is set and WORLD_SIZE is not"),
        ({"RANK": "abc"}, "error (rank abc): RANK=abc in the environment is no whole number"),
        ({"WORLD_SIZE": "2"}, "error: WORLD_SIZE=2 is set and RANK is not"),
        ({"RANK": "1", "WORLD_SIZE": "1"}, "error (rank 1): RANK=1 is no rank of a group of WORLD_SIZE=1"),
        ({"LOCAL_RANK": "0"}, "error: LOCAL_RANK=0 is set and RANK is not"),
        ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, "error: MASTER_ADDR is not set, and WORLD_SIZE is 1"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "error (rank 1): LOCAL_RANK is not set"),
    ],
)
def test_an_environment_that_contradicts_itself(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], message: str
) -> None:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    (workshop.folder / "train.jsonl").unlink()  # not looked at
    outcome = workshop.run("train")
    assert (outcome.code, outcome.out) == (2, "")
    assert f"\n{message}" in f"\n{outcome.err}"


@pytest.mark.parametrize(("rank", "is_heard"), [("0", True), ("1", False)])
def test_one_rank_of_a_group_speaks_for_all(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch, rank: str, is_heard: bool
) -> None:
    env = {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29400"}
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    outcome = workshop.run("train", "training.sed=1")
    assert outcome.code == 2
    assert ("did you mean 'seed'" in outcome.err) is is_heard


def test_check_prints_one_yaml_document_with_the_deepspeed_settings(workshop: Workshop) -> None:
    outcome = workshop.run("check", "distributed.strategy=zero2", "training.global_batch_size=8")
    assert outcome.code == 0, outcome.err
    document, _, settings = outcome.out.partition("# The DeepSpeed settings of this run:\n")
    assert yaml.safe_load(outcome.out)["distributed"]["strategy"] == "zero2"
    assert yaml.safe_load(document)["training"]["global_batch_size"] == 8
    resolved = json.loads("".join(line.removeprefix("# ") for line in settings.splitlines()))
    assert resolved["zero_optimization"]["stage"] == 2
    assert (resolved["train_batch_size"], resolved["gradient_accumulation_steps"]) == (8, 4)


def test_check_says_which_keys_have_no_effect(workshop: Workshop) -> None:
    outcome = workshop.run("check", "distributed.nvme_path=.", "training.hub_model_id=a/b")
    assert outcome.code == 0
    assert "distributed.nvme_path: has no effect: nothing is offloaded to nvme" in outcome.err
    assert "training.hub_model_id: has no effect without push_to_hub: true" in outcome.err
    assert "no effect" not in outcome.out


def test_check_warns_of_a_slow_precision(workshop: Workshop) -> None:
    outcome = workshop.run("check", "training.bf16=true")
    assert outcome.code == 0
    assert "precision: bf16 (asked for by bf16: true; many CPUs are far slower in it than in fp32)" in outcome.err
