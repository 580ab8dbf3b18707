"""Merged folders: the logits of base + adapter, everything `from_pretrained` needs, and the live model untouched."""

from __future__ import annotations

import json
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import CheckpointError, ConfigError
from sft_toolkit.lora import merge as merging
from sft_toolkit.lora.inject import inject
from sft_toolkit.lora.merge import merge, merge_live
from sft_toolkit.model.loading import align, new_token_ids
from tests.tiny import CHATML, tiny_model, tiny_tokenizer
from tests.unit.test_lora_inject import IDS, VARIANTS, difference, logits, train


def base_folder(tmp_path: Path, dtype: torch.dtype = torch.float32, **overrides: Any) -> Path:
    folder = tmp_path / "base"
    model: Any = tiny_model(**overrides)
    model.to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def adapter_on(base: Path, tmp_path: Path, args: LoraArguments) -> tuple[Any, torch.Tensor, Path]:
    """A trained adapter on the saved base: the live model, its logits, the adapter's folder."""
    model = inject(load(base), args)
    expected = train(model)
    model.save_pretrained(tmp_path / "adapter")
    return model, expected, tmp_path / "adapter"


@pytest.mark.parametrize("variant", VARIANTS)
def test_merged_folder_has_the_logits_of_the_pair(tmp_path: Path, variant: Any) -> None:
    _, expected, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4, variant=variant))
    report = merge(adapter, tmp_path / "merged")
    assert difference(logits(load(tmp_path / "merged")), expected) < 1e-5
    assert report.max_logit_difference < 1e-5
    assert (report.dtype, report.output) == ("float32", str(tmp_path / "merged"))
    assert (
        json.loads((tmp_path / "merged/merge.json").read_text())["max_logit_difference"] == report.max_logit_difference
    )


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(
    "args",
    [
        LoraArguments(r=4, targets=["q_proj", "lm_head"]),
        LoraArguments(r=4, targets=["q_proj", "embed_tokens"]),
        LoraArguments(r=4, modules_to_save=["embed_tokens"]),
        LoraArguments(r=4, modules_to_save=["embed_tokens", "lm_head"]),
    ],
    ids=["head", "embedding", "whole embedding", "both whole"],
)
def test_trained_embedding_and_head_merge_also_where_they_share_a_weight(
    tmp_path: Path, args: LoraArguments, tied: bool
) -> None:
    _, expected, adapter = adapter_on(base_folder(tmp_path, tie_word_embeddings=tied), tmp_path, args)
    merge(adapter, tmp_path / "merged")
    assert difference(logits(load(tmp_path / "merged")), expected) < 1e-5


def test_new_tokens_are_in_the_merged_folder(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    tokenizer, model = tiny_tokenizer(), load(base)
    tokenizer.add_tokens(["<a>", "<b>"], special_tokens=True)
    new = new_token_ids(model, tokenizer)
    align(model, tokenizer, end_of_turn_id=4)
    pair = inject(model, LoraArguments(r=4), new_token_ids=new)
    ids = torch.tensor([[5, 261, 6, 262]])
    expected = train(pair, ids)
    pair.save_pretrained(tmp_path / "adapter")
    tokenizer.save_pretrained(tmp_path / "adapter")
    merge(tmp_path / "adapter", tmp_path / "merged")
    assert difference(logits(load(tmp_path / "merged"), ids), expected) < 1e-5
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").convert_tokens_to_ids(["<a>", "<b>"]) == [261, 262]


def test_tokenizer_template_and_generation_config_come_from_the_adapter(tmp_path: Path) -> None:
    model, _, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    tokenizer = tiny_tokenizer("{{ messages[0]['content'] }}")
    tokenizer.save_pretrained(adapter)
    model.get_base_model().generation_config.eos_token_id = [2, 4]
    model.get_base_model().generation_config.save_pretrained(adapter)
    merge(adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == "{{ messages[0]['content'] }}"
    assert load(tmp_path / "merged").generation_config.eos_token_id == [2, 4]


def test_tokenizer_of_the_base_is_taken_where_the_adapter_has_none(tmp_path: Path) -> None:
    _, _, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    merge(adapter, tmp_path / "merged")
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").chat_template == CHATML


@pytest.mark.parametrize(
    ("stored", "asked", "expected"),
    [
        (torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, "float32", torch.float32),
        (torch.float32, "bfloat16", torch.bfloat16),
        (torch.float32, "float16", torch.float16),
    ],
)
def test_dtype_of_the_merged_weights(
    tmp_path: Path, stored: torch.dtype, asked: str | None, expected: torch.dtype
) -> None:
    _, _, adapter = adapter_on(base_folder(tmp_path, stored), tmp_path, LoraArguments(r=4))
    report = merge(adapter, tmp_path / "merged", dtype=asked)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype is expected
    assert 0 <= report.max_logit_difference <= report.tolerance


def test_live_model_is_not_touched(tmp_path: Path) -> None:
    model, expected, _ = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    before = {name: (id(p), p.detach().clone(), p.requires_grad) for name, p in model.named_parameters()}
    merge_live(model, tiny_tokenizer(), tmp_path / "merged")
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (identity, value, trains) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], value)
        assert after[name].requires_grad is trains
    assert difference(logits(model), expected) == 0
    assert difference(logits(load(tmp_path / "merged")), expected) < 1e-5


def test_live_model_that_accelerate_wrapped_is_merged(tmp_path: Path) -> None:
    model, expected, _ = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))

    class Unpicklable:
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return type(model).forward(*args, **kwargs)

        def __reduce_ex__(self, _: Any) -> Any:
            raise TypeError("can't be copied")

    wrapper = MethodType(Unpicklable(), model)
    model._original_forward, model.forward = model.forward, wrapper
    merge_live(model, tiny_tokenizer(), tmp_path / "merged", dtype="float32")
    assert model.forward is wrapper
    assert difference(logits(load(tmp_path / "merged")), expected) < 1e-5


def test_weights_that_are_not_whole_are_refused(tmp_path: Path) -> None:
    model = inject(tiny_model(), LoraArguments(r=4))
    next(model.parameters()).ds_id = 0
    with pytest.raises(CheckpointError, match="weights are spread over processes and can't be merged in place"):
        merge_live(model, tiny_tokenizer(), tmp_path / "merged")


def test_a_merge_that_changes_the_model_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    monkeypatch.setitem(merging.TOLERANCE, "bfloat16", 1e-9)
    with pytest.raises(CheckpointError, match="rounding to bfloat16 changes the model too much: logits differ by"):
        merge(adapter, tmp_path / "merged", dtype="bfloat16")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]


def test_a_folder_that_reloads_as_another_model_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    save = LlamaForCausalLM.save_pretrained
    monkeypatch.setattr(LlamaForCausalLM, "save_pretrained", lambda _, folder: save(tiny_model(seed=1), folder))
    with pytest.raises(CheckpointError, match="the folder reloads as another model: logits differ by"):
        merge(adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_broken_adapter_is_refused(tmp_path: Path) -> None:
    model, _, _ = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    with torch.no_grad():
        next(p for p in model.parameters() if p.requires_grad).fill_(float("nan"))
    with pytest.raises(CheckpointError, match="base \\+ adapter give NaN or infinite logits"):
        merge_live(model, tiny_tokenizer(), tmp_path / "merged")


def test_an_earlier_merge_is_replaced_and_anything_else_is_not(tmp_path: Path) -> None:
    _, _, adapter = adapter_on(base_folder(tmp_path), tmp_path, LoraArguments(r=4))
    merge(adapter, tmp_path / "merged")
    merge(adapter, tmp_path / "merged", dtype="bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "merged").dtype is torch.bfloat16
    with pytest.raises(ConfigError, match=r"^--output: '.*base' is not empty and no result of an earlier merge"):
        merge(adapter, tmp_path / "base")


def test_a_base_that_is_gone_is_named(tmp_path: Path) -> None:
    base = base_folder(tmp_path)
    _, _, adapter = adapter_on(base, tmp_path, LoraArguments(r=4))
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=rf"^base of the adapter '{adapter}': '{base}': no such file or folder"):
        merge(adapter, tmp_path / "merged")
    merge(adapter, tmp_path / "merged", base=str(tmp_path / "moved"))
    merge(adapter, tmp_path / "merged", base=load(tmp_path / "moved"))


def test_the_probe_reaches_the_newest_rows() -> None:
    assert merging._probe(263)[:, -4:].tolist() == [[259, 260, 261, 262]] * 2
    assert IDS.max() < 261
