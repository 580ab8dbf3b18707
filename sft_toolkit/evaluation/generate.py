"""Greedy answers in batches, from the ids that training saw before the first label."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig

IGNORE_INDEX = -100


def prompt_and_reference(row: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Split a token row at its first label.

    Args:
        row: `input_ids` and `labels` of equal length, -100 where nothing is learned.

    Returns:
        The ids before the first label, and the first unbroken run of labels: the first supervised answer with the id
        that ends it. Both are empty for a row without labels.
    """
    ids, labels = list(row["input_ids"]), list(row["labels"])
    first = next((i for i, label in enumerate(labels) if label != IGNORE_INDEX), None)
    if first is None:
        return [], []
    end = next((i for i in range(first, len(labels)) if labels[i] == IGNORE_INDEX), len(labels))
    return ids[:first], labels[first:end]


def generate_answers(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    batch_size: int,
    stop_ids: Collection[int],
) -> list[list[int]]:
    """The most likely next tokens of each prompt, one by one, until a stop id or the limit.

    Prompts of similar length share a batch, the longest come first (memory that does not suffice fails at once), and
    shorter ones are padded on the left. The model is in evaluation mode meanwhile and comes back as it was; its
    configurations stay as they are. Activation checkpointing is on only while training, so the key-value cache works.

    Args:
        model: a model with `generate` (transformers, PEFT); called on every rank where it is spread over several.
        tokenizer: gives the pad id; any id would do, since the mask goes by length.
        prompts: ids, none empty.
        max_new_tokens: longest answer, in tokens.
        batch_size: prompts answered at once.
        stop_ids: ids that end an answer, beside the tokenizer's end of sequence.

    Returns:
        The new ids of each prompt, in the order of `prompts`, without the stop id.
    """
    if any(len(prompt) == 0 for prompt in prompts):
        raise ValueError("a prompt without any token can't be answered")
    stops = sorted({int(i) for i in stop_ids} | ({tokenizer.eos_token_id} - {None}))
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else (stops or [0])[0]
    settings = _greedy(max_new_tokens, stops, pad)
    longest_first = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
    answers: list[list[int]] = [[] for _ in prompts]
    with _evaluation_mode(model), torch.no_grad():
        for start in range(0, len(prompts), batch_size):
            chosen = longest_first[start : start + batch_size]
            batch = _left_padded([prompts[i] for i in chosen], pad, next(model.parameters()).device)
            out = model.generate(**batch, generation_config=settings)  # type: ignore[operator]
            new = out[:, batch["input_ids"].shape[1] :].tolist()
            for i, ids in zip(chosen, new, strict=True):
                answers[i] = _until(ids, stops)
    return answers


def _greedy(max_new_tokens: int, stops: list[int], pad: int) -> GenerationConfig:
    """Every usual setting is given, since what is left open comes from the model's own file.

    A repetition penalty there would change greedy answers; a temperature would only be warned about.
    """
    return GenerationConfig(  # type: ignore[no-untyped-call]
        max_new_tokens=max_new_tokens,
        do_sample=False,
        temperature=1.0,
        top_k=50,
        top_p=1.0,
        num_beams=1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        min_length=0,
        use_cache=True,
        eos_token_id=stops or None,
        pad_token_id=pad,
    )


def _left_padded(prompts: list[Sequence[int]], pad: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, int64 (B, longest), the prompts at the right edge."""
    longest = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return {"input_ids": torch.tensor(ids, device=device), "attention_mask": torch.tensor(mask, device=device)}


def _until(ids: list[int], stops: Collection[int]) -> list[int]:
    end = next((i for i, token in enumerate(ids) if token in stops), len(ids))
    return ids[:end]


@contextmanager
def _evaluation_mode(model: nn.Module) -> Iterator[None]:
    """`model.eval()`; afterwards each module trains again or not as it did, and not all alike."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True
