"""What a user gets wrong is said in plain words, with exit code 2, before a model is loaded or a file is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.workshop import Outcome, Workshop
from tests.tiny import chat, tiny_tokenizer


def refused(workshop: Workshop, *overrides: str, command: str = "train") -> Outcome:
    outcome = workshop.run(command, *overrides)
    assert outcome.code == 2, outcome.err
    assert "Traceback" not in outcome.err
    assert "Loading weights" not in outcome.err
    assert not workshop.out.is_dir()  # nothing half-written
    return outcome


def test_a_missing_file_is_named_with_the_nearest_one(workshop: Workshop) -> None:
    workshop.config["data"]["train"] = str(workshop.folder / "trian.jsonl")
    outcome = refused(workshop)
    assert f"data.train: '{workshop.folder / 'trian.jsonl'}'" in outcome.err
    assert "did you mean" in outcome.err
    assert "train.jsonl" in outcome.err


def test_an_empty_file_is_refused(workshop: Workshop) -> None:
    workshop.write_rows("train.jsonl", [])
    assert "train.jsonl" in refused(workshop).err


def test_wrong_columns_are_listed_beside_the_expected_ones(workshop: Workshop) -> None:
    workshop.write_rows("train.jsonl", [{"question": "a", "answer": "b"}])
    message = refused(workshop).err
    for word in ("question", "answer", "messages", "prompt", "completion", "columns"):
        assert word in message


def test_a_broken_row_is_named_by_file_and_line(workshop: Workshop) -> None:
    path = workshop.folder / "train.jsonl"
    path.write_text(json.dumps({"messages": chat("a", "b")}) + '\n{"messages": [\n')
    assert f"{path}, line 2" in refused(workshop).err


def test_an_unknown_role_is_named_with_the_accepted_ones(workshop: Workshop) -> None:
    rows = [{"conversations": [{"from": "human", "value": "a"}, {"from": "narrator", "value": "b"}]}]
    workshop.write_rows("train.jsonl", rows)
    message = refused(workshop).err
    for word in ("train.jsonl, line 1", "narrator", "human", "gpt"):
        assert word in message


def test_a_model_that_does_not_exist_is_no_hub_lookup(workshop: Workshop) -> None:
    workshop.config["model"]["name_or_path"] = str(workshop.folder / "modle")
    message = refused(workshop).err
    assert "modle" in message
    assert "did you mean" in message


def test_an_output_dir_that_is_a_file_is_refused(workshop: Workshop) -> None:
    workshop.out.write_text("mine")
    assert "is a file" in refused(workshop).err
    assert workshop.out.read_text() == "mine"


def test_messages_need_a_chat_template_and_the_option_is_named(workshop: Workshop) -> None:
    tiny_tokenizer(template=None).save_pretrained(workshop.folder / "model")
    (workshop.folder / "model" / "chat_template.jinja").unlink(missing_ok=True)
    assert "model.chat_template" in refused(workshop).err


def test_a_configuration_that_is_no_mapping(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from sft_toolkit.cli import main

    path = tmp_path / "run.yaml"
    path.write_text("- model\n- data\n")
    assert main(["train", "--config", str(path)]) == 2
    assert "mapping" in capsys.readouterr().err


def test_all_mistakes_are_reported_at_once(workshop: Workshop) -> None:
    workshop.config["training"]["learning_rat"] = 1e-4
    workshop.config["training"]["evaluation_strategy"] = "epoch"
    workshop.config["data"]["max_lenght"] = 12
    message = refused(workshop).err
    for word in ("learning_rat", "learning_rate", "evaluation_strategy", "eval_strategy", "max_lenght", "max_length"):
        assert word in message


def test_rows_that_lose_all_their_labels_stop_the_run_before_the_weights_are_loaded(workshop: Workshop) -> None:
    message = refused(workshop, "data.max_length=12", "data.too_long=truncate_right").err
    assert "no_supervised_token" in message


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("callbacks=[curv]", "did you mean 'curve'"),
        ("evaluation.metrics=[exact_mach]", "did you mean 'exact_match'"),
        ("lora.targets=[q_proj, qq_proj]", "qq_proj"),
        ("training.learning_rate=fast", "training.learning_rate"),
        ("distributed.num_processes=2", "distributed.num_processes: 2 asked for, 1 started"),
    ],
)
def test_a_wrong_value_is_named(workshop: Workshop, override: str, expected: str) -> None:
    workshop.config["evaluation"] = {"generate": 2}
    outcome = workshop.run("train", override)
    assert outcome.code == 2
    assert expected in outcome.err
    assert "Traceback" not in outcome.err
    assert not workshop.out.exists()


def test_a_disk_that_cant_be_written_is_a_failure_of_the_run(workshop: Workshop) -> None:
    outcome = workshop.run("train", "training.output_dir=/proc/sft_toolkit_cannot_write_here")
    assert outcome.code == 1
    assert "/proc/sft_toolkit_cannot_write_here" in outcome.err
    assert "Traceback" not in outcome.err


def test_a_half_written_checkpoint_on_a_full_disk_leaves_the_older_ones(
    workshop: Workshop, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    real: Callable[..., None] = torch.save

    def full(state: object, file: object, *args: object, **kwargs: object) -> None:
        if "checkpoint-4" in str(file):
            raise OSError(28, "No space left on device", str(file))
        real(state, file, *args, **kwargs)

    monkeypatch.setattr(torch, "save", full)
    outcome = workshop.run("train")
    assert outcome.code == 1
    assert "No space left on device" in outcome.err
    assert "Traceback" not in outcome.err
    assert (workshop.out / "checkpoint-2" / "COMPLETE").is_file()
    assert not (workshop.out / "checkpoint-4" / "COMPLETE").exists()
    assert workshop.json("run.json")["exit_state"] == "failed"
