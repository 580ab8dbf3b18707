"""A whole run from a configuration: what it leaves behind, running it again, going on after a change."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft_toolkit import load_config, run
from tests.e2e.workshop import Workshop
from tests.tiny import CHATML, chat, tiny_model


def test_a_run_leaves_every_file_of_the_contract(workshop: Workshop) -> None:
    workshop.config["lora"]["save_merged"] = True
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    out = workshop.out

    report = workshop.json("data_report.json")
    counts = {key: report[key] for key in ("rows_read", "rows_kept", "rows_dropped", "rows_truncated", "longest")}
    assert counts == {"rows_read": 8, "rows_kept": 8, "rows_dropped": {}, "rows_truncated": 0, "longest": 29}
    assert report["supervised_tokens"] == sum(2 + i % 3 for i in range(8))  # the letters and one end token each

    lines = workshop.metrics()
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert all(isinstance(line["loss"], float) for line in lines)
    assert [("eval_loss" in line) for line in lines] == [False, True, False, True]
    assert lines[-1]["supervised_tokens"] == report["supervised_tokens"]

    manifest = workshop.json("run.json")
    assert manifest["exit_state"] == "finished"
    assert manifest["engaged"]["strategy"] == "none"
    assert manifest["engaged"]["global_batch"] == 2
    assert (manifest["engaged"]["parameters_trainable"], manifest["engaged"]["parameters_total"]) == (4096, 39392)

    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in out.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    assert (out / "checkpoint-4" / "COMPLETE").is_file()
    assert load_config(out / "config.resolved.yaml").lora == load_config(workshop.write_config()).lora


def test_the_final_folder_is_plain_and_loads(workshop: Workshop) -> None:
    workshop.config["lora"]["save_merged"] = True
    result = run(workshop.write_config())
    assert result.final is not None
    assert result.merged is not None
    ids = torch.arange(5, 25)[None]
    adapter = AutoPeftModelForCausalLM.from_pretrained(result.final)
    merged = AutoModelForCausalLM.from_pretrained(result.merged)
    live: Any = result.trainer.model.eval()  # type: ignore[union-attr]
    torch.testing.assert_close(adapter(ids).logits, live(ids).logits, rtol=0, atol=1e-5)
    torch.testing.assert_close(merged(ids).logits, live(ids).logits, rtol=0, atol=1e-5)
    assert (merged(ids).logits - tiny_model()(ids).logits).abs().max() > 1e-3  # and it has learned something
    for folder in (result.final, result.merged):
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHATML
        ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        assert 4 in (ends if isinstance(ends, list) else [ends])


def test_a_finished_run_says_so_and_rewrites_nothing(workshop: Workshop) -> None:
    assert workshop.run("train").code == 0
    before = {path: path.stat().st_mtime_ns for path in workshop.out.rglob("*")}
    again = workshop.run("train")
    assert again.code == 0
    assert f"nothing to do: {workshop.out} holds this run, finished" in again.out
    assert {path: path.stat().st_mtime_ns for path in workshop.out.rglob("*")} == before


def test_a_longer_run_goes_on_where_the_first_one_stopped(workshop: Workshop) -> None:
    training = workshop.config["training"]
    training["lr_scheduler_type"] = "constant"
    training["max_steps"] = 3
    training["save_steps"] = 3
    assert workshop.run("train").code == 0
    training["max_steps"] = 6
    longer = workshop.run("train")
    assert longer.code == 0, longer.err
    assert "resuming with training.max_steps: 6 instead of 3" in longer.err
    halves = [line["loss"] for line in workshop.metrics()]
    training["output_dir"] = str(workshop.folder / "whole")
    workshop.out = workshop.folder / "whole"
    assert workshop.run("train").code == 0
    whole = [line["loss"] for line in workshop.metrics()]
    assert halves == whole
    assert len(whole) == 6


def test_a_changed_learning_rate_is_refused_and_not_ignored(workshop: Workshop) -> None:
    assert workshop.run("train").code == 0
    outcome = workshop.run("train", "training.learning_rate=1e-4", "training.max_steps=6")
    assert outcome.code == 2
    assert (
        "training.learning_rate: was 0.005 when the checkpoint was made, is 0.0001 now; a resumed run keeps the old "
        "value: set it back, or start anew in another training.output_dir"
    ) in outcome.err
    assert "max_steps" not in outcome.err
    assert [line["step"] for line in workshop.metrics()] == [1, 2, 3, 4]


def test_an_unfinished_newest_checkpoint_is_skipped_with_its_reason(workshop: Workshop) -> None:
    assert workshop.run("train").code == 0
    losses = [line["loss"] for line in workshop.metrics()]
    (workshop.out / "run.json").unlink()
    (workshop.out / "checkpoint-4" / "adapter_model.safetensors").write_bytes(b"\0" * 16)
    outcome = workshop.run("train")
    assert outcome.code == 0
    assert "checkpoint-4 is skipped: adapter_model.safetensors" in outcome.err
    assert [line["loss"] for line in workshop.metrics()] == losses


def test_generation_is_scored_before_and_after(workshop: Workshop) -> None:
    workshop.config["evaluation"] = {"generate": 3, "max_new_tokens": 4, "metrics": ["exact_match", "token_f1"]}
    workshop.config["training"] |= {"max_steps": 60, "learning_rate": 0.05, "eval_strategy": "no", "save_steps": 60}
    workshop.config["lora"]["r"] = 16
    rows = [{"messages": chat(f"say {i}", "x")} for i in range(8)]
    workshop.write_rows("train.jsonl", rows)
    workshop.write_rows("eval.jsonl", [{"messages": chat(f"say {i}", "x")} for i in range(11, 14)])
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    assert "score       exact_match 0.000 -> 1.000, token_f1 0.000 -> 1.000" in outcome.out
    page = (workshop.out / "samples.html").read_text()
    assert page.count('<td class="right">x</td>') == 3  # and three wrong ones before
    samples = workshop.json("samples.json")
    assert [row["answer"] for row in samples["after"]["rows"]] == ["x", "x", "x"]
    assert samples["before"]["scores"] == {"exact_match": 0.0, "token_f1": 0.0}


def test_answers_while_training_choose_the_best_model(workshop: Workshop) -> None:
    workshop.config["evaluation"] = {
        "generate": 2,
        "max_new_tokens": 3,
        "while_training": True,
        "metrics": ["token_f1"],
    }
    workshop.config["training"] |= {
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_token_f1",
        "greater_is_better": True,
    }
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    lines = workshop.metrics()
    assert [("eval_token_f1" in line, "eval_loss" in line) for line in lines] == [(False, False), (True, True)] * 2
    state = json.loads((workshop.out / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_metric"] == max(line["eval_token_f1"] for line in lines[1::2])
    assert state["best_model_checkpoint"].endswith("checkpoint-2")  # none is better than the first


def test_preview_prints_what_is_trained_as_json(workshop: Workshop) -> None:
    outcome = workshop.run("preview", "--json", "--rows", "2")
    assert outcome.code == 0
    rows = [json.loads(line) for line in outcome.out.splitlines()]
    assert [list(row) for row in rows] == [["row", "source", "input_ids", "labels", "supervised"]] * 2
    assert [row["supervised"] for row in rows] == [["x<|im_end|>"], ["xy<|im_end|>"]]
    assert [row["row"] for row in rows] == [1, 2]
    assert not workshop.out.exists()


def test_check_prints_the_resolved_configuration_and_trains_nothing(workshop: Workshop) -> None:
    outcome = workshop.run("check")
    assert outcome.code == 0
    path = workshop.folder / "resolved.yaml"
    path.write_text(outcome.out)
    assert load_config(path).training["learning_rate"] == 0.005
    assert not workshop.out.exists()


def test_prepare_writes_the_report_and_starts_no_model(workshop: Workshop) -> None:
    (workshop.folder / "model" / "model.safetensors").unlink()
    outcome = workshop.run("prepare")
    assert outcome.code == 0
    assert workshop.json("data_report.json")["rows_kept"] == 8


def test_a_callback_of_the_users_is_called(workshop: Workshop) -> None:
    workshop.config["callbacks"] = [{"tests.e2e.test_run.Counting": {"start": 10}}, {"curve": {"every_seconds": 100}}]
    assert workshop.run("train").code == 0
    assert Counting.steps == [11, 12, 13, 14]


def test_the_callbacks_of_ours_that_are_named_are_called(workshop: Workshop) -> None:
    workshop.config["lora"] = None
    layers = {"every": 2, "layers": ["*mlp"], "parameters": ["*lm_head*"]}
    unfreeze = {"schedule": {0: ["lm_head*"], 0.5: ["*"]}}
    workshop.config["callbacks"] = ["memory", {"layers": layers}, {"unfreeze": unfreeze}, "ema", "live_curve"]
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    assert all(line["memory_host_peak_mib"] > 50 for line in workshop.metrics())
    lines = (workshop.out / "layers.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 3]
    assert "step 2: 26,944 more parameters are trained" in outcome.err  # 35,296 without the head's 8,352
    assert (workshop.out / "checkpoint-4" / "ema.safetensors").is_file()
    assert workshop.run("train", "callbacks=[{ema: {decay: 2}}]", "training.max_steps=5").code == 2


class Counting:
    """A plugin: not even a TrainerCallback by inheritance of ours, named by its path."""

    steps: list[int] = []  # noqa: RUF012

    def __new__(cls, start: int) -> Any:
        from transformers import TrainerCallback

        class Callback(TrainerCallback):
            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                cls.steps.append(start + state.global_step)

        return Callback()


def test_the_python_entry_raises_and_returns(workshop: Workshop) -> None:
    result = run(workshop.write_config(), overrides=["training.max_steps=1"])
    assert result.exit_code == 0
    assert result.metrics["train_loss"] == pytest.approx(result.trainer.state.log_history[0]["loss"])  # type: ignore[union-attr]
