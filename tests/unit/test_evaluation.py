from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import evaluate
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GenerationConfig, LlamaForCausalLM

import sft_toolkit.evaluation as evaluation
from sft_toolkit.args import EvaluationArguments
from sft_toolkit.errors import ConfigError, DataError
from sft_toolkit.evaluation.generate import generate_answers, prompt_and_reference
from sft_toolkit.evaluation.metrics import ExactMatch, JsonFields, JsonValidity, RougeL, TokenF1, compute
from sft_toolkit.evaluation.score import ScoredAnswers, score
from sft_toolkit.registry import register
from tests.tiny import tiny_model, tiny_tokenizer

PROMPTS = [[3, 40, 41], [3, 50, 51, 52, 53, 54, 55], [60], [3, 70, 71, 72]]
IM_END = 4


def one_by_one(model: LlamaForCausalLM, prompt: list[int], length: int, stops: set[int]) -> list[int]:
    """The definition: the whole text through the model for each token, no cache, no padding, no batch."""
    ids = list(prompt)
    with torch.no_grad():  # the tiny model has no dropout, so its mode does not matter
        while len(ids) < len(prompt) + length:
            best = int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())
            if best in stops:
                break
            ids.append(best)
    return ids[len(prompt) :]


def answers(model: Any, **changes: Any) -> list[list[int]]:
    options: dict[str, Any] = {"max_new_tokens": 6, "batch_size": 3, "stop_ids": [IM_END]}
    return generate_answers(model, tiny_tokenizer(), PROMPTS, **{**options, **changes})


def trained_to_say(answer: str) -> LlamaForCausalLM:
    """A tiny model that answers `q1` with `answer`."""
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = torch.tensor([row_of("q1", answer)["input_ids"]])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(60):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert tokenizer.eos_token_id == IM_END
    return model


def row_of(user: str, assistant: str) -> dict[str, list[int]]:
    tokenizer = tiny_tokenizer()
    prompt = tokenizer(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")["input_ids"]
    answer = tokenizer(f"{assistant}<|im_end|>")["input_ids"]
    end = tokenizer("\n")["input_ids"]
    return {"input_ids": prompt + answer + end, "labels": [-100] * len(prompt) + answer + [-100]}


# ---------------------------------------------------------------- prompts


@pytest.mark.parametrize(
    ("labels", "expected"),
    [
        ([-100, -100, 7, 8, -100], ([5, 6], [7, 8])),
        ([-100, 6, -100, 8, 9], ([5], [6])),
        ([5, 6, 7, 8, 9], ([], [5, 6, 7, 8, 9])),
        ([-100] * 5, ([], [])),
        ([-100, -100, -100, -100, 9], ([5, 6, 7, 8], [9])),
    ],
)
def test_a_row_is_split_at_its_first_label(labels: list[int], expected: tuple[list[int], list[int]]) -> None:
    assert prompt_and_reference({"input_ids": [5, 6, 7, 8, 9], "labels": labels}) == expected


# ---------------------------------------------------------------- generation


@pytest.mark.parametrize("batch_size", [1, 2, 4])
def test_batched_answers_equal_those_of_one_prompt_at_a_time(batch_size: int) -> None:
    model = tiny_model()
    assert answers(model, batch_size=batch_size) == [one_by_one(model, p, 6, {IM_END}) for p in PROMPTS]


def test_an_answer_ends_before_its_stop_id() -> None:
    model = tiny_model()
    free = [one_by_one(model, prompt, 6, set()) for prompt in PROMPTS]
    stop = free[0][2]
    assert answers(model, stop_ids=[stop]) == [one_by_one(model, p, 6, {stop, IM_END}) for p in PROMPTS]
    assert len(answers(model, stop_ids=[stop])[0]) == 2


def test_sampling_settings_of_the_model_folder_change_nothing() -> None:
    plain, model = tiny_model(), tiny_model()
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.7, top_k=3, repetition_penalty=50.0, num_beams=3, min_length=30, eos_token_id=9
    )
    before = model.generation_config.to_dict(), model.config.to_dict()
    assert answers(model) == answers(plain)
    assert (model.generation_config.to_dict(), model.config.to_dict()) == before


def test_generating_says_nothing(caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder) -> None:
    model = tiny_model()
    sampling = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
    model.generation_config = GenerationConfig(**sampling)
    logging.getLogger("transformers").addHandler(caplog.handler)
    answers(model)
    logging.getLogger("transformers").removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == []
    assert [str(warning.message) for warning in recwarn] == []


def test_activation_checkpointing_and_a_switched_off_cache_do_not_disturb() -> None:
    model = tiny_model()
    expected = answers(model)
    model.train()
    model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.config.use_cache = False
    assert answers(model) == expected
    assert (model.training, model.config.use_cache, model.is_activation_checkpointing) == (True, False, True)


def test_the_training_mode_of_each_module_comes_back() -> None:
    model = tiny_model().train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    answers(model)
    assert [module.training for module in model.modules()] == before
    assert True in before
    assert False in before


def test_an_adapter_answers_as_its_merged_model() -> None:
    torch.manual_seed(0)
    model = get_peft_model(tiny_model(), LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "v_proj"]))
    adapted = answers(model)
    merged = model.merge_and_unload()
    assert adapted == answers(merged)
    assert adapted != answers(tiny_model())


def test_the_random_state_is_not_touched() -> None:
    model = tiny_model()
    before = torch.get_rng_state()
    answers(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="a prompt without any token"):
        generate_answers(tiny_model(), tiny_tokenizer(), [[]], max_new_tokens=1, batch_size=1, stop_ids=[])


# ---------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    ("metric", "prediction", "reference", "expected"),
    [
        (ExactMatch, " a b\n", "a b", 1.0),
        (ExactMatch, "A b", "a b", 0.0),
        (TokenF1, "the cat sat.", "the dog sat.", 0.75),
        (TokenF1, "sat the. cat", "the cat sat.", 1.0),
        (TokenF1, "a a a", "a", 0.5),
        (TokenF1, "", "", 1.0),
        (TokenF1, "", "a", 0.0),
        (RougeL, "sat the cat", "the cat sat", 2 / 3),
        (RougeL, "", "", 1.0),
        (JsonValidity, '{"a": [1, 2]}', "", 1.0),
        (JsonValidity, '{"a": 1} ok', "", 0.0),
        (JsonValidity, '{"a": NaN}', "", 0.0),
        (JsonValidity, "", "", 0.0),
        (JsonFields, '{"b": 2, "a": 1}', '{"a": 1, "b": 2}', 1.0),
        (JsonFields, '{"a": 1, "b": 3, "c": 0}', '{"a": 1, "b": 2}', 0.5),
        (JsonFields, '{"a": true}', '{"a": 1}', 0.0),
        (JsonFields, '{"a": {"x": 1, "y": 2}, "l": [1]}', '{"a": {"x": 1, "y": 0}, "l": [1], "n": null}', 0.5),
        (JsonFields, "[1]", '{"a": 1}', 0.0),
        (JsonFields, "no", '{"a": 1}', 0.0),
        (JsonFields, "{}", "{}", 1.0),
    ],
)
def test_the_score_of_one_answer(metric: Any, prediction: str, reference: str, expected: float, tmp_path: Path) -> None:
    assert issubclass(metric, evaluate.Metric)
    ready = metric(cache_dir=str(tmp_path), keep_in_memory=True)
    found = ready.compute(predictions=[prediction], references=[reference])
    assert found == {metric.key: pytest.approx(expected)}


def test_all_metrics_at_once_by_name_offline_and_without_a_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    names = ["exact_match", "token_f1", "json_validity", "json_fields", "rouge_l"]
    found = compute(names, ['{"a": 1}', "no"], ['{"a": 1}', '{"a": 2}'])
    assert found == {"exact_match": 0.5, "token_f1": 0.5, "json_validity": 0.5, "json_fields": 0.5, "rouge_l": 0.5}
    assert list(found) == names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("predictions", "references", "expected"),
    [
        (["the cat sat on the mat"], ["the cat sat on the mat"], 1.0),
        (["", ""], ["a", "b"], 0.0),
        ([""], [""], 1.0),
        # 1-grams 4/5, 2-grams (2 + 1)/(4 + 1), 3-grams (0 + 1)/(3 + 1), 4-grams (0 + 1)/(2 + 1), no brevity penalty
        (["a b x d e"], ["a b c d e"], (4 / 5 * 3 / 5 * 1 / 4 * 1 / 3) ** 0.25),
        # one of two words; the counts of the rows are added up; 2 words for 4 expected
        (["a", "x"], ["a b", "c d"], (1 / 2 * 1 * 1 * 1) ** 0.25 * math.exp(1 - 4 / 2)),
    ],
)
def test_bleu_by_hand(predictions: list[str], references: list[str], expected: float) -> None:
    assert compute(["bleu"], predictions, references) == {"bleu": pytest.approx(expected)}


def test_metrics_of_the_user(tmp_path: Path) -> None:
    @register("metric", "test_length")
    def length(predictions: list[str], references: list[str]) -> float:
        return sum(map(len, predictions)) / len(predictions)

    @register("metric", "test_bounds")
    def bounds(predictions: list[str], references: list[str]) -> dict[str, int]:
        return {"shortest": min(map(len, predictions)), "longest": max(map(len, predictions))}

    register("metric", "test_ready")(ExactMatch(cache_dir=str(tmp_path), keep_in_memory=True))
    assert compute(["test_length", "test_bounds", "test_ready"], ["a", "bcd"], ["a", "b"]) == {
        "test_length": 2.0,
        "shortest": 1.0,
        "longest": 3.0,
        "exact_match": 0.5,
    }


def test_what_can_not_be_scored_is_refused() -> None:
    with pytest.raises(ValueError, match="there are no answers to score"):
        compute(["exact_match"], [], [])
    with pytest.raises(ConfigError, match="did you mean 'exact_match'"):
        compute(["exact_matc"], ["a"], ["a"])
    with pytest.raises(ValueError, match="json_fields needs references that are JSON objects, but one is 'hello'"):
        compute(["json_fields"], ["{}"], ["hello"])


# ---------------------------------------------------------------- scores


def test_a_model_that_learned_the_answer_scores_fully() -> None:
    rows = [row_of("q1", "yes"), row_of("q1", "no!")]
    found = score(trained_to_say("yes"), tiny_tokenizer(), rows, EvaluationArguments(generate=2, max_new_tokens=8))
    assert found == ScoredAnswers(
        prompts=["user\nq1\nassistant\n"] * 2,
        answers=["yes", "yes"],
        references=["yes", "no!"],
        scores={"exact_match": 0.5, "token_f1": 0.5},
    )


def test_only_the_first_rows_are_asked_and_those_that_can_not_be_are_said(caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"input_ids": [5, 6], "labels": [-100, -100]},
        {"input_ids": [5, 6], "labels": [5, 6]},
        row_of("q1", "yes"),
        row_of("q2", "never asked"),
    ]
    with caplog.at_level(logging.WARNING, logger="sft_toolkit"):
        found = score(tiny_model(), tiny_tokenizer(), rows, EvaluationArguments(generate=3, max_new_tokens=2))
    assert found.references == ["yes"]
    said = [record.message for record in caplog.records]
    assert said == ["2 of 3 held-out rows have no prompt or no label: not asked"]
    with pytest.raises(DataError, match="no held-out row has both a prompt and a supervised answer"):
        score(tiny_model(), tiny_tokenizer(), rows[:2], EvaluationArguments(generate=2))


def test_each_source_is_asked_and_scored_by_itself() -> None:
    rows = [row_of("q1", "yes"), row_of("q1", "yes"), row_of("q1", "yes"), row_of("q1", "no!"), row_of("q1", "no!")]
    args = EvaluationArguments(generate=3, max_new_tokens=8, metrics=["exact_match"])
    found = score(trained_to_say("yes"), tiny_tokenizer(), rows, args, [("kind", 3), ("harsh", 2)])
    assert found.references == ["yes", "yes", "no!"]
    assert found.scores == {
        "exact_match": pytest.approx(2 / 3),
        "kind_exact_match": 1.0,
        "harsh_exact_match": 0.0,
    }


def test_the_token_that_ends_the_references_ends_the_answers_too() -> None:
    tokenizer = tiny_tokenizer(extra_specials=["<|eot|>"])
    tokenizer.eos_token = "</s>"
    eot = tokenizer.convert_tokens_to_ids("<|eot|>")
    model = tiny_model(vocab_size=262)
    with torch.no_grad():
        model.model.norm.weight.zero_()  # all logits 0: the argmax is id 0, so move the wanted id up
        model.lm_head.weight.zero_()
    model.lm_head = torch.nn.Linear(32, 262)
    with torch.no_grad():
        model.lm_head.bias.zero_()[eot] = 1.0
    row = {"input_ids": [65, 66, 67, eot], "labels": [-100, -100, 67, eot]}
    found = score(model, tokenizer, [row], EvaluationArguments(generate=1, max_new_tokens=5))
    assert (found.answers, found.references) == ([""], [tokenizer.decode([67])])


def test_the_package_exports_lazily() -> None:
    assert dir(evaluation) == ["ScoredAnswers", "compute", "generate_answers", "prompt_and_reference"]
    assert evaluation.ScoredAnswers is ScoredAnswers
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = evaluation.nothing
