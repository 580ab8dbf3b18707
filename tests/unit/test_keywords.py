"""Python calls with a keyword that is not there say which one is meant, and stay TypeErrors."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path

import pytest

from sft_toolkit import SFTArguments, SFTTrainer
from sft_toolkit.args import LoraArguments, ModelArguments
from sft_toolkit.config_file.in_python import _TRAINER_PARAMETERS
from sft_toolkit.errors import ConfigError, UnknownKeywordError


@pytest.mark.parametrize(
    ("cls", "keyword", "said"),
    [
        (SFTTrainer, "tokenizer", "write processing_class="),
        (SFTTrainer, "max_seq_length", "write SFTArguments(max_length=...)"),
        (SFTTrainer, "packing", "write SFTArguments(packing=...)"),
        (SFTTrainer, "dataset", "write train_dataset="),
        (SFTTrainer, "formatting_func", "map the rows before: train_dataset.map(...)"),
        (SFTTrainer, "dataset_text_field", "rename the column to 'text': train_dataset.rename_column(...)"),
        (SFTTrainer, "train_datset", "did you mean 'train_dataset'?"),
        (SFTArguments, "max_seq_length", "write max_length="),
        (SFTArguments, "evaluation_strategy", "write eval_strategy="),
        (SFTArguments, "warmup_ratio", "write warmup_steps= (a value below 1 is a share of all steps)"),
        (SFTArguments, "no_cuda", "write use_cpu="),
        (SFTArguments, "learning_rat", "did you mean 'learning_rate'?"),
        (SFTArguments, "tokenizer", "write SFTTrainer(processing_class=...)"),
        (SFTArguments, "peft_config", "write SFTTrainer(peft_config=...)"),
        (LoraArguments, "rank", "write r="),
        (LoraArguments, "learning_rate", "write SFTArguments(learning_rate=...)"),
        (ModelArguments, "torch_dtype", "write dtype="),
    ],
)
def test_the_right_keyword_is_named(cls: type, keyword: str, said: str) -> None:
    with pytest.raises(TypeError) as refused:
        cls(**{keyword: 1})
    assert isinstance(refused.value, ConfigError)
    assert str(refused.value) == f"{cls.__name__}({keyword}=...): unknown keyword; {said}"


def test_all_are_said_at_once() -> None:
    with pytest.raises(UnknownKeywordError) as refused:
        SFTArguments(foo_bar_baz=1, no_cuda=True)  # type: ignore[call-arg]
    assert refused.value.problems == [
        "SFTArguments(foo_bar_baz=...): unknown keyword",
        "SFTArguments(no_cuda=...): unknown keyword; write use_cpu=",
    ]


def test_the_parameters_of_the_trainer_are_these() -> None:
    taken = list(inspect.signature(SFTTrainer.__init__).parameters)[1:]
    assert sorted(taken) == sorted(_TRAINER_PARAMETERS)


def test_a_subclass_with_keywords_of_its_own_and_copies_are_made(tmp_path: Path) -> None:
    class Mine(LoraArguments):
        def __init__(self, extra_rank: int) -> None:
            super().__init__(r=extra_rank)

    assert Mine(extra_rank=4).r == 4
    args = SFTArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[])
    assert copy.copy(args).output_dir == pickle.loads(pickle.dumps(args)).output_dir == str(tmp_path)
