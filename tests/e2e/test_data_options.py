"""Mixtures, samplers, packing plans and losses by source, from the command line."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tests.e2e.workshop import Workshop
from tests.tiny import chat


def two_sources(workshop: Workshop) -> tuple[str, str]:
    first = workshop.write_rows("first.jsonl", [{"messages": chat(f"say {i}", "x" * (1 + i % 4))} for i in range(8)])
    second = workshop.write_rows("second.jsonl", [{"messages": chat(f"tell {i}", "yz")} for i in range(6)])
    return str(first), str(second)


def test_held_out_sources_have_losses_of_their_own_in_the_metrics(workshop: Workshop) -> None:
    workshop.config["data"]["eval"] = list(two_sources(workshop))
    workshop.config["training"]["per_device_eval_batch_size"] = 4
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    last = workshop.metrics()[-1]
    assert {key for key in last if key.startswith("eval_") and key.endswith("loss")} == {
        "eval_loss",
        "eval_first_loss",
        "eval_second_loss",
    }
    counts = {
        name: source["supervised_tokens"]
        for name, source in workshop.json("data_report.json")["eval"]["eval"]["sources"].items()
    }
    mean = sum(last[f"eval_{name}_loss"] * count for name, count in counts.items()) / sum(counts.values())
    assert abs(mean - last["eval_loss"]) < 1e-5


def test_the_packing_plan_is_saved_and_previewed(workshop: Workshop, tmp_path: Path) -> None:
    first, second = two_sources(workshop)
    workshop.config["data"] |= {"train": [first, second], "packing": True, "max_length": 96}
    assert workshop.run("prepare").code == 0
    plan = workshop.json("packing_plan.json")
    assert plan["sources"] == [first, second]
    rows = sorted((source, row) for packed in plan["bins"] for source, row in packed["rows"])
    assert rows == [(0, n) for n in range(1, 9)] + [(1, n) for n in range(1, 7)]
    assert workshop.json("data_report.json")["packing"] == {"bins": len(plan["bins"]), "fill": plan["fill"]}

    shown = workshop.run("preview", "--rows", "2").out
    assert f"Packing: 14 rows in {len(plan['bins'])} bins of 96 tokens, " in shown
    assert f"bin 1: {plan['bins'][0]['tokens']} tokens" in shown
    html = tmp_path / "page.html"
    assert workshop.run("preview", "--html", str(html)).code == 0
    assert '<div class="bin"><span style="width:' in html.read_text()
    lines = workshop.run("preview", "--json", "--rows", "99").out.splitlines()
    assert len(lines) == 14
    assert {tuple(json.loads(line)) for line in lines} == {("row", "source", "input_ids", "labels", "supervised")}

    trained = workshop.run("train")
    assert trained.code == 0, trained.err
    assert workshop.json("packing_plan.json") == plan


def test_an_interleaved_curriculum_goes_on_with_the_same_losses_after_a_stop(workshop: Workshop) -> None:
    first, second = two_sources(workshop)
    workshop.config["data"] |= {
        "train": [{"path": first, "weight": 2}, {"path": second, "weight": 1}],
        "mixing": "interleave",
        "sampler": {"curriculum": {"by": "length", "steps": 5}},
        "transform": "tests.unit.test_loading.masked",
    }
    training = workshop.config["training"]
    training |= {"lr_scheduler_type": "constant", "max_steps": 7, "save_steps": 7, "per_device_train_batch_size": 2}
    assert workshop.run("train").code == 0
    training["max_steps"] = 12
    longer = workshop.run("train")
    assert longer.code == 0, longer.err
    halves = [line["loss"] for line in workshop.metrics()]
    training["output_dir"] = str(workshop.folder / "whole")
    workshop.out = workshop.folder / "whole"
    assert workshop.run("train").code == 0
    assert halves == [line["loss"] for line in workshop.metrics()]
    assert len(halves) == 12


def test_another_sampler_is_refused_on_resume(workshop: Workshop) -> None:
    assert workshop.run("train").code == 0
    outcome = workshop.run("train", "data.sampler=sequential", "training.max_steps=6")
    assert outcome.code == 2
    assert "data.sampler: was None when the checkpoint was made, is 'sequential' now" in outcome.err


def test_too_many_refused_rows_end_with_exit_code_two(workshop: Workshop) -> None:
    path = workshop.write_rows("train.jsonl", [{"messages": chat("a", "b")}] * 3 + [{"messages": []}])
    outcome = workshop.run("train", "data.on_bad_row=drop", "data.max_refused=0.05")
    assert outcome.code == 2
    assert f"{path}: 1 of 4 rows are refused (25 %), more than data.max_refused: 0.05" in outcome.err
    assert f"bad_row: 1, first {path}, line 4 (the conversation has no messages)" in outcome.err
    assert workshop.run("train", "data.on_bad_row=drop").code == 0


def test_a_staged_mixture_trains(workshop: Workshop) -> None:
    first, second = two_sources(workshop)
    workshop.config["data"] |= {
        "train": [first, second],
        "sampler": {"staged": {"stages": [{"sources": ["first"], "steps": 2}, {"sources": {"second": 1.0}}]}},
    }
    outcome = workshop.run("train")
    assert outcome.code == 0, outcome.err
    supervised = [line["supervised_tokens"] for line in workshop.metrics()]
    assert supervised[3] - supervised[1] == 4 * 3  # two updates of two rows, each "yz" and its end token


def test_check_finds_wrong_data_options_without_reading_a_row(workshop: Workshop) -> None:
    workshop.write_rows("train.jsonl", [{"messages": []}])
    outcome = workshop.run("check", "data.sampler={curriculum: {step: 3}}", "data.transform=tests.nowhere.thing")
    assert outcome.code == 2
    assert "data.sampler: sampler 'curriculum': unknown option 'step'; did you mean 'steps'?" in outcome.err
    assert "data.transform: transform 'tests.nowhere.thing': tests has no 'nowhere'" in outcome.err


def test_a_stream_is_trained_previewed_and_resumed_from_its_place(workshop: Workshop) -> None:
    workshop.config["data"] |= {"train": list(two_sources(workshop)), "streaming": True, "packing": True}
    workshop.config["training"]["save_strategy"] = "steps"
    shown = [json.loads(line) for line in workshop.run("preview", "--json", "--rows", "2").out.splitlines()]
    assert [record["supervised"] for record in shown] == [["x<|im_end|>"], ["xx<|im_end|>"]]
    assert workshop.run("check").code == 0
    whole = workshop.run("train")
    assert whole.code == 0, whole.err
    losses = [(entry["step"], entry["loss"]) for entry in workshop.metrics() if "loss" in entry]
    report = workshop.json("data_report.json")
    assert report["streaming"] is True
    assert report["rows_read"] % 14 == 0
    assert report["rows_kept"] == report["rows_read"] > 0
    assert not list((workshop.folder / "cache").rglob("*first*"))

    for name in ("checkpoint-4", "final", "run.json"):
        path = workshop.out / name
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    again = workshop.run("train")
    assert again.code == 0, again.err
    assert [(entry["step"], entry["loss"]) for entry in workshop.metrics() if "loss" in entry] == losses
    assert workshop.json("data_report.json") == report


def test_a_stream_needs_an_end(workshop: Workshop) -> None:
    del workshop.config["training"]["max_steps"]
    workshop.config["data"]["streaming"] = True
    outcome = workshop.run("check")
    assert outcome.code == 2
    assert "training.max_steps: a stream has no end, so data.streaming needs it" in outcome.err
