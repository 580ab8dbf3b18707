"""Fractional weights of messages, from the row to the batch: the very tokens of a turn, whatever is cut or packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sft_toolkit import ConfigError, SFTTrainer
from sft_toolkit.args import DataArguments, SourceArguments, Supervise
from sft_toolkit.data import preview
from sft_toolkit.data.collate import PackedCollator, PaddedCollator
from sft_toolkit.data.conversation import Conversation, Message, RowError, TokenRow
from sft_toolkit.data.formats import to_example
from sft_toolkit.data.lengths import fit
from sft_toolkit.data.prepare import prepare
from sft_toolkit.data.preview_page import page
from sft_toolkit.data.readers.raw import RawRow
from sft_toolkit.data.render import Renderer, Tokens
from sft_toolkit.data.token_dataset import blank_row
from sft_toolkit.data.transforms import SeededTransform
from tests.tiny import chat, tiny_model, tiny_tokenizer
from tests.training import sgd_arguments
from tests.unit.test_prepare import written

TOKENIZER = tiny_tokenizer()


def weighted(*weights: float | None) -> dict[str, Any]:
    """Questions `a` with answers `b`, one per weight."""
    turns = [[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": w}] for w in weights]
    return {"messages": [message for turn in turns for message in turn]}


def tokens_of(*weights: float | None, supervise: Supervise = "assistant") -> Tokens:
    messages = [Message(m["role"], m["content"], weight=m.get("weight")) for m in weighted(*weights)["messages"]]
    (tokens,) = Renderer(TOKENIZER, supervise).encode([Conversation(tuple(messages))])
    assert isinstance(tokens, Tokens)
    return tokens


def learned(tokens: Tokens) -> list[tuple[str, float]]:
    """(token, weight) of each learned token."""
    weights = tokens.weights or [1.0] * len(tokens.labels)
    pairs = zip(tokens.labels, weights, strict=True)
    return [(str(TOKENIZER.decode([label])), weight) for label, weight in pairs if label != -100]


def test_a_weight_is_that_of_its_turn_and_its_end_token() -> None:
    assert learned(tokens_of(0.5, None)) == [("b", 0.5), ("<|im_end|>", 0.5), ("b", 1.0), ("<|im_end|>", 1.0)]
    assert learned(tokens_of(0, 2)) == [("b", 2.0), ("<|im_end|>", 2.0)]
    assert learned(tokens_of(0.25, 3, supervise="last_assistant")) == [("b", 3.0), ("<|im_end|>", 3.0)]


def test_rows_without_fractions_carry_no_weights() -> None:
    assert tokens_of(1, None, 0).weights is None


def test_everything_weighs_one_but_the_turns_that_say_otherwise() -> None:
    tokens = tokens_of(0.5, 0, supervise="all")
    texts = "".join(text for text, weight in learned(tokens) if weight == 1.0)
    ask = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert texts == f"{ask}\n{ask}\n"
    assert [pair for pair in learned(tokens) if pair[1] != 1.0] == [("b", 0.5), ("<|im_end|>", 0.5)]


@pytest.mark.parametrize(
    ("policy", "max_length", "left"),
    [
        ("truncate_right", 21, [("b", 0.5)]),
        ("cut_at_turn", 30, [("b", 0.5), ("<|im_end|>", 0.5)]),
        ("truncate_prompt_left", 30, [("b", 2.0), ("<|im_end|>", 2.0)]),
    ],
)
def test_cut_rows_keep_the_weights_of_what_is_left(policy: Any, max_length: int, left: list[tuple[str, float]]) -> None:
    cut = fit(tokens_of(0.5, 2), max_length, policy).tokens
    assert cut is not None
    assert cut.weights is not None
    assert len(cut.weights) == len(cut.labels)
    assert learned(cut) == left


def test_tokenised_rows_bring_weights_of_their_own() -> None:
    row = {"input_ids": [5, 6, 7, 0], "labels": [-100, 6, 7, -100], "loss_weights": [1, 0.5, 0, 1]}
    assert to_example(RawRow("a", 1, row), "tokenized") == TokenRow([5, 6, 7, 0], [-100, 6, -100, -100], [1, 0.5, 0, 1])
    masked = to_example(RawRow("a", 1, {**row, "attention_mask": [1, 1, 1, 0]}), "tokenized")
    assert masked == TokenRow([5, 6, 7], [-100, 6, -100], [1, 0.5, 0])


@pytest.mark.parametrize(
    ("weights", "problem"),
    [
        ([1, 1], "input_ids has 3 tokens, loss_weights has 2"),
        ([1, -1, 1], "loss_weights holds -1.0; expected finite numbers of at least 0"),
        ([1, "x", 1], r"loss_weights\[1\] is text, not a number"),
    ],
)
def test_weights_that_are_none_are_refused(weights: list[Any], problem: str) -> None:
    row = {"input_ids": [5, 6, 7], "labels": [5, 6, 7], "loss_weights": weights}
    with pytest.raises(RowError, match=problem):
        to_example(RawRow("a", 1, row), "tokenized")


ROW = {"input_ids": [5, 6, 7], "labels": [-100, 6, 7], "loss_weights": [1.0, 0.5, 2.0]}
PLAIN = {"input_ids": [5, 6], "labels": [5, 6]}


def test_batches_carry_weights_where_something_is_learned() -> None:
    padded = PaddedCollator(0)([ROW, PLAIN, blank_row()])
    assert padded["loss_weights"].tolist() == [[0, 0.5, 2], [0, 1, 0], [0, 0, 0]]
    packed = PackedCollator()([{"documents": [ROW, PLAIN]}, {"documents": [blank_row()]}])
    assert packed["loss_weights"].tolist() == [[0, 0.5, 2, 0, 1, 0]]


def test_a_batch_without_weights_carries_ones_if_its_data_set_has_some() -> None:
    assert "loss_weights" not in PaddedCollator(0)([PLAIN])
    assert PaddedCollator(0, weighted=True)([PLAIN])["loss_weights"].tolist() == [[0, 1]]
    assert PackedCollator(weighted=True)([{"documents": [PLAIN]}])["loss_weights"].tolist() == [[0, 1]]
    with pytest.raises(ValueError, match="2 tokens, 1 loss_weights"):
        PaddedCollator(0)([{**PLAIN, "loss_weights": [1.0]}])


def test_prepared_rows_have_the_column_only_where_it_says_something(tmp_path: Path) -> None:
    plain = written(tmp_path / "a.jsonl", [{"messages": chat("a", "b")}])
    half = written(tmp_path / "b.jsonl", [weighted(0.5)])
    data = DataArguments(train=[SourceArguments(path=plain)], cache_dir=str(tmp_path / "cache"))
    train: Any = prepare(data, TOKENIZER).train
    assert train.column_names == ["input_ids", "labels", "row", "source"]
    data.train, data.eval = [SourceArguments(path=plain), SourceArguments(path=half)], {"dev": data.train}
    prepared = prepare(data, TOKENIZER)
    train = prepared.train
    assert [row["loss_weights"] and row["loss_weights"][20:22] for row in train] == [None, [0.5, 0.5]]
    assert prepared.evals["dev"].column_names == ["input_ids", "labels", "row", "source"]


def test_a_transform_keeps_weights_in_step_with_its_tokens() -> None:
    halve = SeededTransform(lambda row, rng: {key: values[:2] for key, values in row.items()}, 0, None, "halve")
    assert halve(ROW, 0, 0) == {"input_ids": [5, 6], "labels": [-100, 6], "loss_weights": [1.0, 0.5]}
    forgets = SeededTransform(lambda row, rng: {"input_ids": [5], "labels": [5]}, 0, None, "forgets")
    assert forgets(PLAIN, 0, 0) == {"input_ids": [5], "labels": [5]}
    with pytest.raises(ValueError, match="returned 1 ids and 0 loss_weights; as many are needed"):
        forgets(ROW, 0, 0)


def test_weights_that_can_not_reach_the_loss_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="compute_loss_func: the weights of messages can't reach it"):
        SFTTrainer(
            tiny_model(),
            sgd_arguments(tmp_path),
            train_dataset=[weighted(0.5)],
            processing_class=TOKENIZER,
            compute_loss_func=lambda outputs, labels, num_items_in_batch: outputs.logits.sum(),
        )


def test_the_preview_shows_weights(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [weighted(0.5, 2)])
    data = DataArguments(train=[SourceArguments(path=path)], cache_dir=str(tmp_path / "cache"))
    record = next(preview.records(prepare(data, TOKENIZER).train, TOKENIZER, 1))
    assert [w for w, label in zip(record["loss_weights"], record["labels"], strict=True) if label != -100] == [
        *[0.5, 0.5],
        *[2.0, 2.0],
    ]
    shown = preview.terminal(record, TOKENIZER, color=False)
    assert "assistant\n0.5×⟦b⟧⟦<|im_end|>⟧\n" in shown
    assert "assistant\n2×⟦b⟧⟦<|im_end|>⟧\n" in shown
    html = page([record], TOKENIZER, "verdict")
    assert '<span class="learn light" title="token 20, weight 0.5"><small>0.5×</small>b</span>' in html
    assert '<span class="learn special heavy" title="token 44, weight 2">&lt;|im_end|&gt;</span>' in html
