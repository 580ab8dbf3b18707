"""Packed rows attend per document: the same numbers as the documents alone, and stock attention everywhere else."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel, TrainerCallback
from transformers.masking_utils import create_causal_mask, create_chunked_causal_mask, create_sliding_window_causal_mask

from sft_toolkit import ConfigError, SFTTrainer
from sft_toolkit.attention import packed as packed_attention
from sft_toolkit.attention import per_document as attention
from sft_toolkit.attention.isolation import difference_from_parts, leaks_between_documents
from sft_toolkit.attention.per_document import PER_DOCUMENT, Documents, attend_per_document, register_per_document
from tests.architectures import build
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import lora, rows_with_labels, sgd_arguments

LENGTHS = (7, 5, 5, 12, 3)
ROWS = rows_with_labels(1, 15, 3, 25)


def positions(*lengths: int) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def states(heads: int, tokens: int = sum(LENGTHS)) -> Tensor:
    return torch.randn(1, tokens, heads, 8).transpose(1, 2).requires_grad_()


def causal(*states: Tensor, scale: float | None = None) -> Tensor:
    query, key, value = states
    grouped = query.shape[-3] != key.shape[-3]
    return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)


# ---- The function that attends ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("key_heads", [4, 2])
def test_outputs_and_gradients_are_those_of_the_documents_alone(key_heads: int) -> None:
    torch.manual_seed(0)
    query, key, value = states(4), states(key_heads), states(key_heads)
    out, weights = attend_per_document(nn.Module(), query, key, value, Documents(LENGTHS), scaling=0.3)
    parts = zip(*(torch.split(s, list(LENGTHS), 2) for s in (query, key, value)), strict=True)
    alone = [causal(*part, scale=0.3) for part in parts]
    expected = torch.cat(alone, dim=2).transpose(1, 2)
    assert weights is None
    assert out.shape == (1, 32, 4, 8)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    upstream = torch.randn_like(out)
    for ours, theirs in zip(
        torch.autograd.grad(out, (query, key, value), upstream),
        torch.autograd.grad(expected, (query, key, value), upstream),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_a_window_masks_only_documents_that_are_longer() -> None:
    torch.manual_seed(0)
    query, key, value = states(2), states(2), states(2)
    out, _ = attend_per_document(nn.Module(), query, key, value, Documents(LENGTHS, window=5))
    at, document = torch.arange(32), torch.repeat_interleave(torch.arange(5), torch.tensor(LENGTHS))
    back = at[:, None] - at[None]
    seen = (back >= 0) & (back < 5) & (document[:, None] == document[None])
    expected = scaled_dot_product_attention(query, key, value, attn_mask=seen).transpose(1, 2)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6)
    assert Documents(LENGTHS, window=5).band(5, out.device) is None
    assert Documents((3,), window=2).band(3, out.device).tolist() == [  # type: ignore[union-attr]
        [True, False, False],
        [True, True, False],
        [False, True, True],
    ]


@pytest.mark.parametrize(
    ("asked", "name"),
    [
        ({"softcap": 50.0}, "logit soft-capping"),
        ({"s_aux": torch.zeros(2)}, "attention sinks"),
        ({"position_bias": torch.zeros(1)}, "a position bias"),
        ({"is_causal": False}, "attention that is not causal"),
    ],
)
def test_what_it_does_not_do_is_refused_by_name(asked: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError, match=f"does not do what Module asks for: {name}"):
        attend_per_document(nn.Module(), states(2), states(2), states(2), Documents(LENGTHS), **asked)


def test_keys_of_another_length_are_refused() -> None:
    with pytest.raises(ConfigError, match="32 queries and 40 keys on a row of 32 tokens"):
        attend_per_document(nn.Module(), states(2), states(2, 40), states(2, 40), Documents(LENGTHS))


def test_all_documents_reach_a_varlen_kernel_as_it_expects_them() -> None:
    """The kernel itself needs CUDA; this one has its arguments and does its work document by document."""
    seen: dict[str, Any] = {}

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, ends: Tensor, _: Tensor, *sizes: int, **options: Any
    ) -> Tensor:
        seen.update(options, shape=tuple(query.shape), ends=(ends.tolist(), ends.dtype), sizes=sizes)
        rows = [slice(a, b) for a, b in zip(ends.tolist(), ends.tolist()[1:], strict=False)]
        per_head = [[s[row].transpose(0, 1) for s in (query, key, value)] for row in rows]
        return torch.cat([causal(*s) for s in per_head], dim=1).transpose(0, 1)

    query, key, value = states(4), states(2), states(2)
    out = attention._attend_at_once(kernel, query, key, value, Documents(LENGTHS), None)
    expected, _ = attend_per_document(nn.Module(), query, key, value, Documents(LENGTHS))
    torch.testing.assert_close(out, expected)
    assert seen["shape"] == (32, 4, 8)
    assert seen["ends"] == ([0, 7, 12, 17, 29, 32], torch.int32)
    assert seen["sizes"] == (12, 12)
    assert (seen["window_size"], seen["enable_gqa"]) == ((-1, 0), True)
    attention._attend_at_once(kernel, query, key, value, Documents(LENGTHS, window=5), None)
    assert seen["window_size"] == (4, 0)


def test_the_varlen_kernel_of_this_torch_is_known_and_left_alone_on_the_cpu() -> None:
    half = states(2).to(torch.bfloat16)
    assert attention._varlen_kernel() is not None
    assert not attention._suits_varlen(half, half, 0.0)


# ---- The function that stands for the mask ---------------------------------------------------------------------------


def mask_of(make: Callable[..., Any], *, rows: int = 1, **given: Any) -> Any:
    """What a model with this attention gets from transformers as its mask."""
    register_per_document()
    model = build("Mistral", sliding_window=6)
    model.config.attention_chunk_size = 6
    model.set_attn_implementation(PER_DOCUMENT)
    length = given["attention_mask"].shape[1] if given.get("attention_mask") is not None else 32
    given = {"attention_mask": None, "position_ids": positions(length), **given}
    return make(config=model.config, inputs_embeds=torch.zeros(rows, length, 32), cache=None, **given)


def test_a_packed_row_becomes_its_documents() -> None:
    packed = positions(*LENGTHS)
    assert mask_of(create_causal_mask, position_ids=packed) == Documents(LENGTHS)
    assert mask_of(create_sliding_window_causal_mask, position_ids=packed) == Documents(LENGTHS, window=6)
    # Chunks of 6 are documents too, as far as attention goes.
    chunks = (6, 1, 5, 5, 6, 6, 3)
    assert mask_of(create_chunked_causal_mask, position_ids=packed) == Documents(chunks, window=6)


def test_everything_else_gets_the_mask_of_sdpa() -> None:
    assert mask_of(create_causal_mask) is None  # one document: sdpa attends without a mask
    padded = torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]])
    mask = mask_of(create_causal_mask, rows=2, attention_mask=padded, position_ids=None)
    assert mask[0, 0].tolist() == [[c <= r and c < 3 for c in range(4)] for r in range(4)]
    two_rows = mask_of(create_causal_mask, rows=2, position_ids=positions(*LENGTHS))
    assert two_rows.shape == (2, 1, 32, 32)
    looks_ahead = torch.full((1, 32), -1)
    looks_ahead[0, 20:23] = 0  # a block, as of an image, whose tokens see one another
    overlaid = mask_of(create_causal_mask, position_ids=positions(*LENGTHS), block_sequence_ids=looks_ahead)
    assert overlaid.shape == (1, 1, 32, 32)
    assert bool(overlaid[0, 0, 20, 22])


# ---- Whole models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_gradients_of_a_model_are_those_of_the_documents_alone(adapter: bool, checkpointing: bool) -> None:
    register_per_document()
    ids = torch.randint(5, 261, (1, 32), generator=torch.Generator().manual_seed(0))
    gradients = []
    for packed in (True, False):
        model: Any = build("Llama")
        model.set_attn_implementation(PER_DOCUMENT if packed else "sdpa")
        model = get_peft_model(model, lora()) if adapter else model
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        if packed:
            logits = model(input_ids=ids, position_ids=positions(*LENGTHS), use_cache=False).logits
        else:
            parts = torch.split(ids, list(LENGTHS), 1)
            logits = torch.cat([model(input_ids=part, use_cache=False).logits for part in parts], dim=1)
        logits.square().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.requires_grad})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-5, atol=1e-5)


def test_padded_batches_and_generation_are_those_of_sdpa_bit_for_bit() -> None:
    register_per_document()
    ids, mask = torch.randint(5, 261, (2, 9)), torch.ones(2, 9, dtype=torch.int64)
    mask[0, :4] = 0
    results = []
    for name in ("sdpa", PER_DOCUMENT):
        model: Any = tiny_model()
        model.set_attn_implementation(name)
        logits = model(input_ids=ids, attention_mask=mask).logits
        answer = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False)
        results.append((logits, answer))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_the_proofs_tell_isolated_documents_from_contaminated_ones() -> None:
    class Contaminated(nn.Module):
        """An all-ones mask: documents are told apart by nothing."""

        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model = model

        def forward(self, **inputs: Any) -> Any:
            return self.model(**inputs, attention_mask=torch.ones_like(inputs["input_ids"]))

    model = tiny_model()
    assert not leaks_between_documents(model, model)
    assert difference_from_parts(model, model) < 1e-6
    assert leaks_between_documents(Contaminated(model), model)
    assert difference_from_parts(Contaminated(model), model) > 1e-2


# ---- When it is used -------------------------------------------------------------------------------------------------


class Seen(TrainerCallback):
    """The attention of the model while it trains."""

    name = ""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.name = kwargs["model"].config._attn_implementation


def packed_trainer(folder: Path, model: Any = None, **changes: Any) -> tuple[SFTTrainer, Seen]:
    seen = Seen()
    settings = sgd_arguments(folder, **{"packing": True, "max_length": 128, **changes})
    return SFTTrainer(model or tiny_model(), settings, None, ROWS, ROWS, tiny_tokenizer(), callbacks=[seen]), seen


def test_packed_rows_train_per_document_and_the_model_gets_its_attention_back(tmp_path: Path) -> None:
    trainer, seen = packed_trainer(tmp_path)
    trainer.train()
    assert seen.name == PER_DOCUMENT
    assert trainer.paths.attention.path == f"{PER_DOCUMENT} (proven on this model)"
    assert trainer.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_it_is_proven_in_bf16_as_well(tmp_path: Path) -> None:
    trainer, seen = packed_trainer(tmp_path, tiny_model().bfloat16(), learning_rate=0.01)
    trainer.train()
    assert seen.name == PER_DOCUMENT
    assert trainer.paths.attention.proven is True


def test_it_comes_back_after_a_failure_too(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            raise RuntimeError("in the middle")

    trainer, _ = packed_trainer(tmp_path)
    trainer.add_callback(Failing())
    with pytest.raises(RuntimeError, match="in the middle"):
        trainer.train()
    assert trainer.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("name", "changes"),
    [("eager", {}), ("sdpa", {"packed_attention": "as_loaded"}), ("sdpa", {"packing": False})],
    ids=["eager-was-asked-for", "as-loaded", "padded"],
)
def test_other_runs_keep_the_attention_of_the_model(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    model = tiny_model()
    model.set_attn_implementation(name)
    trainer, seen = packed_trainer(tmp_path, model, **changes)
    trainer.train()
    assert seen.name == name
    assert trainer.paths.attention.path == "as the model was loaded"


def test_where_the_logits_change_the_model_keeps_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(packed_attention, "difference_from_parts", lambda *_: 0.25)
    trainer, seen = packed_trainer(tmp_path)
    with caplog.at_level(logging.WARNING):
        trainer.train()
    assert seen.name == "sdpa"
    assert trainer.paths.attention.path == "sdpa with a dense mask"
    assert "LlamaForCausalLM keeps its own attention, with a dense mask" in caplog.text
    assert "by 2.5e-01" in caplog.text


def test_where_a_layer_refuses_the_model_keeps_its_attention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: Any) -> float:
        raise ConfigError("a layer asks for attention sinks")

    monkeypatch.setattr(packed_attention, "difference_from_parts", refuse)
    trainer, seen = packed_trainer(tmp_path)
    with caplog.at_level(logging.INFO):
        trainer.train()
    assert seen.name == "sdpa"
    assert "LlamaForCausalLM keeps its own attention: a layer asks for attention sinks" in caplog.text


@pytest.mark.parametrize("before_training", [True, False])
def test_packed_evaluation_attends_per_document_as_well(tmp_path: Path, before_training: bool) -> None:
    trainer, _ = packed_trainer(tmp_path, learning_rate=0.0)
    if not before_training:
        trainer.train()
    names: list[str] = []
    handle = trainer.model.register_forward_pre_hook(  # type: ignore[union-attr]
        lambda model, _: names.append(model.config._attn_implementation)
    )
    loss = trainer.evaluate()["eval_loss"]
    handle.remove()
    assert set(names) == {PER_DOCUMENT}
    assert trainer.model.config._attn_implementation == "sdpa"  # type: ignore[union-attr]
    padded, _ = packed_trainer(tmp_path, packing=False)
    assert loss == pytest.approx(padded.evaluate()["eval_loss"], rel=1e-6)


def test_what_is_saved_in_the_middle_loads_without_this_package(tmp_path: Path) -> None:
    trainer, _ = packed_trainer(tmp_path, save_strategy="steps", save_steps=1)
    trainer.train()
    saved = tmp_path / "checkpoint-1"
    assert PER_DOCUMENT not in (saved / "config.json").read_text(encoding="utf-8")
    code = (
        "import json, sys, torch, transformers\n"
        f"model = transformers.AutoModelForCausalLM.from_pretrained({str(saved)!r})\n"
        "shape = list(model(torch.tensor([[5, 6, 7]])).logits.shape)\n"
        "print(json.dumps([model.config._attn_implementation, shape, 'sft_toolkit' in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout) == ["sdpa", [1, 3, 261], False]


def test_the_private_question_that_is_asked_of_transformers_still_exists() -> None:
    assert PreTrainedModel._can_set_attn_implementation() is True


# ---- Attention that leaks is found -----------------------------------------------------------------------------------


def test_an_attention_that_joins_documents_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def leaking(module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **given: Any) -> Any:
        return AttentionInterface()["sdpa"](module, query, key, value, None, **given)

    AttentionInterface.register("tests_leaking", leaking)
    model = tiny_model()
    model.set_attn_implementation("tests_leaking")
    trainer, _ = packed_trainer(tmp_path, model)
    with pytest.raises(ConfigError, match="attention 'tests_leaking', LlamaForCausalLM lets a packed document see"):
        trainer.train()
    assert trainer.state.global_step == 0


@pytest.mark.parametrize("lengths", [(12, 5, 12, 3), (7, 5, 5, 15), (6, 6, 5, 12, 3), (32,)])
def test_a_fast_attention_that_is_wrong_anywhere_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]
) -> None:
    right = attention.attend_per_document

    def wrong(module: Any, query: Any, key: Any, value: Any, documents: Any, *given: Any, **more: Any) -> Any:
        of_the_probe = isinstance(documents, Documents) and documents.lengths == LENGTHS
        mask = Documents(lengths) if of_the_probe else documents
        return right(module, query, key, value, mask, *given, **more)

    monkeypatch.setattr(attention, "attend_per_document", wrong)
    trainer, seen = packed_trainer(tmp_path)
    trainer.train()
    assert seen.name == "sdpa"
    assert trainer.paths.attention.path == "sdpa with a dense mask"
