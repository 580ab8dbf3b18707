"""Which values of section `training` go together, and which keys have no effect: said with the line, without torch."""

from __future__ import annotations

from pathlib import Path

import pytest

from sft_toolkit.config import load_config, resolved_yaml
from tests.unit.config_file.texts import Load, Problems, training

HELD_OUT = "data: {train: train.jsonl, eval: train.jsonl}\n"
HOW = "needs held-out rows (data.eval or data.val_split) and training.eval_strategy: steps or epoch"


def with_held_out(lines: str) -> str:
    return training(lines).replace("data: {train: train.jsonl}\n", HELD_OUT)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("max_steps: 0", "max_steps: 0 trains nothing; leave it out to go by num_train_epochs"),
        ("num_train_epochs: 0", "num_train_epochs: 0 trains nothing"),
        ("save_strategy: best", f"save_strategy: best compares evaluations; {HOW}"),
        ("eval_on_start: true", "eval_on_start: needs held-out rows (data.eval or data.val_split)"),
        ("load_best_model_at_end: true", f"load_best_model_at_end: compares evaluations; {HOW}"),
        ("lr_scheduler_type: greedy", f"lr_scheduler_type: greedy follows the evaluation loss; {HOW}"),
        ("lr_scheduler_type: reduce_lr_on_plateau",
         f"lr_scheduler_type: reduce_lr_on_plateau follows the evaluation loss; {HOW}"),
        ("dataloader_persistent_workers: true",
         "dataloader_persistent_workers: needs worker processes; set training.dataloader_num_workers"),
        ("dataloader_prefetch_factor: 2",
         "dataloader_prefetch_factor: needs worker processes; set training.dataloader_num_workers"),
        ("lr_scheduler_kwargs: x.json", "lr_scheduler_kwargs: expected a mapping or null, not x.json"),
        ("seed: 4294967296", "seed: 4294967296 is above the maximum, 4.29497e+09"),
        ("neftune_noise_alpha: -1", "neftune_noise_alpha: -1 is below the minimum, 0"),
        ("torch_empty_cache_steps: 0", "torch_empty_cache_steps: 0 is below the minimum, 1"),
    ],
)  # fmt: skip
def test_refused(problems: Problems, lines: str, message: str) -> None:
    assert problems(training(lines)) == [f"run.yaml:5: training.{message}"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("save_strategy: best", "save_strategy: best needs training.metric_for_best_model, such as loss"),
        ("load_best_model_at_end: true",
         "load_best_model_at_end: needs checkpoints where it evaluates: training.eval_strategy is epoch, "
         "save_strategy is steps; write the same for both, or save_strategy: best"),
        ("{load_best_model_at_end: true, eval_strategy: steps, eval_steps: 200}",
         "load_best_model_at_end: needs training.save_steps (500) to be a multiple of eval_steps (200)"),
        ("{load_best_model_at_end: true, eval_strategy: steps, eval_steps: 0.3, save_steps: 0.5}",
         "load_best_model_at_end: needs training.save_steps (0.5) to be a multiple of eval_steps (0.3)"),
        ("metric_for_best_model: los",
         "metric_for_best_model: an evaluation reports no 'los'; did you mean 'loss'? (reported: loss)"),
        ("metric_for_best_model: los\ncallbacks: [transformers.EarlyStoppingCallback]",
         "metric_for_best_model: an evaluation reports no 'los'; did you mean 'loss'? (reported: loss)"),
        ("save_steps: 1.5", "save_steps: 1.5 is neither a number of updates nor a share of all below 1"),
        ("save_steps: 0", "save_steps: 0 is no interval; write the number of updates, or a share of all below 1"),
    ],
)  # fmt: skip
def test_refused_beside_held_out_rows(problems: Problems, lines: str, message: str) -> None:
    flow = lines.startswith("{")
    text = with_held_out("") if flow else with_held_out(lines)
    if flow:
        text = text.replace("training:\n  output_dir: out\n", f"training: {{output_dir: out, {lines[1:]}\n")
    found = problems(text)
    assert [problem.partition(" ")[2] for problem in found] == [f"training.{message}"]


@pytest.mark.parametrize(
    "lines",
    [
        "save_strategy: best\n  metric_for_best_model: loss",
        "save_strategy: best\n  metric_for_best_model: eval_loss",
        "load_best_model_at_end: true\n  save_strategy: epoch",
        "load_best_model_at_end: true\n  eval_strategy: steps\n  eval_steps: 0.1\n  save_steps: 0.3",
        "lr_scheduler_type: greedy",
        "save_strategy: best\n  metric_for_best_model: token_accuracy",
        "metric_for_best_model: my_own\ncallbacks: [json.loads]",
        "dataloader_num_workers: 1\n  dataloader_prefetch_factor: 2\n  dataloader_persistent_workers: true",
        "max_grad_norm: 1e9",
        "max_steps: 5\n  eval_strategy: 'no'",
    ],
)
def test_accepted(load: Load, lines: str) -> None:
    load(with_held_out(lines))


def test_several_held_out_sets_report_a_loss_each(problems: Problems, load: Load) -> None:
    sets = "data: {train: train.jsonl, eval: {short: train.jsonl, long: train.jsonl}}\n"
    text = training("save_strategy: best\n  metric_for_best_model: ").replace("data: {train: train.jsonl}\n", sets)
    assert (
        load(text.replace("best_model: ", "best_model: short_loss")).training["metric_for_best_model"] == "short_loss"
    )
    (problem,) = problems(text.replace("best_model: ", "best_model: loss"))
    assert problem.endswith(
        "an evaluation reports no 'loss'; did you mean 'long_loss'? (reported: short_loss, long_loss)"
    )


@pytest.mark.parametrize(
    ("text", "warning"),
    [
        ("save_steps: 5\n  save_strategy: epoch",
         "5: training.save_steps: has no effect: training.save_strategy is epoch"),
        ("num_train_epochs: 2\n  max_steps: 4",
         "5: training.num_train_epochs: has no effect: training.max_steps: 4 decides"),
        ("do_train: false", "5: training.do_train: has no effect: train trains; prepare and check do not"),
        ("local_rank: 3", "5: training.local_rank: has no effect: the launcher says it"),
        ("do_eval: true", "5: training.do_eval: has no effect: training.eval_strategy decides, and is no"),
        ("do_predict: true",
         "5: training.do_predict: has no effect: nothing predicts here; evaluation.generate answers held-out rows"),
        ("trackio_space_id: x", "5: training.trackio_space_id: has no effect: it needs training.report_to: trackio"),
        ("run_name: x\nlora: {allow_other_base: true}",
         "6: lora.allow_other_base: has no effect: it belongs to lora.adapter"),
        ("run_name: x\nevaluation: {while_training: true}",
         "6: evaluation.while_training: has no effect: evaluation.generate is 0"),
        ("run_name: x\nevaluation: {show: 2}", "6: evaluation.show: has no effect: evaluation.generate is 0"),
        ("run_name: x\ndistributed: {nvme_path: .}",
         "6: distributed.nvme_path: has no effect: nothing is offloaded to nvme"),
    ],
)  # fmt: skip
def test_keys_without_effect_are_named(load: Load, text: str, warning: str) -> None:
    assert load(training(text)).warnings == [f"run.yaml:{warning}"]


def test_hub_options_of_local_files_are_named(load: Load, folder: Path) -> None:
    (folder / "model").mkdir()
    text = (
        "model: {name_or_path: model, revision: main}\n"
        "data:\n  train:\n    - {path: train.jsonl, split: test}\n  max_refused: 0.1\n"
        "training: {output_dir: out}\n"
    )
    assert load(text).warnings == [
        "run.yaml:1: model.revision: has no effect: model.name_or_path is a local folder",
        "run.yaml:4: data.train.0.split: has no effect: that is for hub data sets, and the path is local",
        "run.yaml:5: data.max_refused: has no effect: it belongs to data.on_bad_row: drop",
    ]


def test_a_default_that_is_written_out_is_no_remark(load: Load, folder: Path) -> None:
    (folder / "model").mkdir()
    run = load("model: {name_or_path: model}\ndata: {train: train.jsonl}\ntraining: {output_dir: out, max_steps: 3}\n")
    (folder / "resolved.yaml").write_text(
        resolved_yaml(run, {**run.training, "save_steps": 500, "save_strategy": "no"})
    )
    assert load_config("resolved.yaml").warnings == []
