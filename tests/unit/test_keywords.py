"""An unknown keyword of the Python API names the right one, and where it belongs; nothing else changes."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import pytest

from sft_toolkit import ConfigError, LoraArguments, SFTArguments, SFTTrainer
from sft_toolkit.args import DataArguments, ModelArguments
from sft_toolkit.config_file.in_python import OF_TRAINER

_OF_TRAINER = "SFTTrainer: unknown keyword '{}'; {}"
_OF_ARGUMENTS = "SFTArguments: unknown keyword '{}'; {}"


def problems(make: Any, **given: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        make(**given)
    assert isinstance(caught.value, TypeError)  # as Python's own, for code that tries one name after the other
    return caught.value.problems


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("tokenizer", "write processing_class"),
        ("eval_datasets", "did you mean 'eval_dataset'?"),
        ("max_seq_length", "write args=SFTArguments(max_length=...)"),
        ("packing", "write args=SFTArguments(packing=...)"),
        ("learning_rat", "did you mean 'learning_rate', which belongs to SFTArguments?"),
        ("evaluation_strategy", "renamed in transformers 5; write args=SFTArguments(eval_strategy=...)"),
        ("lora_config", "write peft_config"),
        ("lora_alpha", "write peft_config=LoraArguments(alpha=...)"),
        ("dataset_text_field", "call the column text: dataset.rename_column(field, 'text')"),
    ],
)
def test_a_keyword_of_the_trainer(name: str, right: str) -> None:
    assert problems(SFTTrainer, **{name: None}) == [_OF_TRAINER.format(name, right)]


@pytest.mark.parametrize(
    ("name", "right"),
    [
        ("max_seq_length", "write max_length"),
        ("num-epochs", "write num_train_epochs"),
        ("learning_rat", "did you mean 'learning_rate'?"),
        ("group_by_length", "renamed in transformers 5; write sampler='by_length'"),
        ("warmup_ratio", "renamed in transformers 5; write warmup_steps (a value below 1 is a share of all steps)"),
        ("eval_dataset", "it belongs to SFTTrainer: SFTTrainer(eval_dataset=...)"),
        ("r", "it belongs to LoraArguments: LoraArguments(r=...)"),
        ("val_size", "split the rows: dataset.train_test_split(test_size=...), and pass eval_dataset= of SFTTrainer"),
        ("logging_dir", "removed in transformers 5; the log is metrics.jsonl in output_dir; TensorBoard reads "
         "TENSORBOARD_LOGGING_DIR"),
    ],
)  # fmt: skip
def test_a_keyword_of_the_arguments(name: str, right: str) -> None:
    assert problems(SFTArguments, output_dir="out", **{name: None}) == [_OF_ARGUMENTS.format(name, right)]


@pytest.mark.parametrize(
    ("make", "name", "right"),
    [
        (LoraArguments, "lora_alpha", "; write alpha"),
        (LoraArguments, "rank_pattern", "; a field of peft.LoraConfig: write extra={'rank_pattern': ...}"),
        (LoraArguments, "max_length", "; it belongs to SFTArguments: SFTArguments(max_length=...)"),
        (LoraArguments, "foo", " (it takes r, alpha, dropout, targets, modules_to_save, variant, adapter, "
         "allow_other_base, save_merged, extra)"),
        (ModelArguments, "torch_dtype", "; renamed in transformers 5; write dtype"),
        (DataArguments, "cutoff_len", "; write max_length"),
    ],
)  # fmt: skip
def test_a_keyword_of_a_section(make: type, name: str, right: str) -> None:
    assert problems(make, **{name: 1}) == [f"{make.__name__}: unknown keyword '{name}'{right}"]


def test_the_parameters_of_the_trainer_are_these() -> None:
    assert tuple(inspect.signature(SFTTrainer.__init__).parameters)[1:] == OF_TRAINER


def test_all_unknown_keywords_are_named_at_once() -> None:
    assert len(problems(SFTTrainer, tokenizer=1, lora=2, packing=True)) == 3


def test_a_subclass_has_keywords_of_its_own() -> None:
    class Open(SFTTrainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self.mine = kwargs.pop("mine")

    class Closed(SFTTrainer):
        def __init__(self, mine: int) -> None:
            self.mine = mine

    assert (Open(mine=1).mine, Closed(mine=2).mine) == (1, 2)
    assert problems(Closed, min=3) == ["Closed: unknown keyword 'min'; did you mean 'mine'?"]


def test_signatures_copies_and_pickles_are_as_ever(tmp_path: Path) -> None:
    assert list(inspect.signature(SFTTrainer).parameters)[:2] == ["model", "args"]
    assert next(iter(inspect.signature(SFTArguments).parameters)) == "output_dir"
    args = SFTArguments(str(tmp_path), max_length=77)
    for twin in (copy.copy(args), copy.deepcopy(args), pickle.loads(pickle.dumps(args))):
        assert twin.max_length == 77
