"""An adapter knows its base: refused on another one, at any dtype and table size; several are merged by weight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from sft_toolkit.args import LoraArguments
from sft_toolkit.cli import main
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora import origin, portable
from sft_toolkit.lora.inject import inject
from sft_toolkit.lora.merge import merge
from tests.tiny import tiny_model, tiny_tokenizer
from tests.unit.test_lora_inject import difference, logits
from tests.unit.test_lora_states import load, train


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("origin") / "base"
    tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def saved(folder: Path, base: Path, args: LoraArguments, seed: int = 0) -> Path:
    """A trained adapter on `base`."""
    torch.manual_seed(seed)
    model = inject(load(base), args)
    train(model)
    model.save_pretrained(folder)
    portable.finish(model, folder, portable=True)
    return folder


@pytest.fixture
def adapter(tmp_path: Path, base: Path) -> Path:
    return saved(tmp_path / "adapter", base, LoraArguments(r=4))


def test_the_base_is_written_beside_the_adapter(tmp_path: Path, base: Path) -> None:
    model = load(base)
    model.config._commit_hash = "0123abc"  # what transformers keeps of a model from the hub
    pair = inject(model, LoraArguments(r=4))
    pair.save_pretrained(tmp_path)
    portable.finish(pair, tmp_path, portable=True)
    found = json.loads((tmp_path / "base_model.json").read_text())
    assert (found["name_or_path"], found["revision"], found["architecture"]) == (
        str(base),
        "0123abc",
        "LlamaForCausalLM",
    )
    assert len(found["fingerprint"]) == 16  # embedding, head, 2 x 7 matrices
    first = load(base).model.embed_tokens.weight[0, 0].to(torch.bfloat16)
    assert found["fingerprint"]["model.embed_tokens.weight"][0] == float(first)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["revision"] == "0123abc"


def test_another_base_is_refused_unless_it_is_meant(adapter: Path, base: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(tiny_model(seed=1), LoraArguments(adapter=str(adapter)))
    assert str(caught.value) == (
        f"lora.adapter: '{adapter}' was trained on another base ('{base}', LlamaForCausalLM): 1% of the compared "
        "weights are the same. Load that base, or say lora.allow_other_base: true if this is meant"
    )
    inject(tiny_model(seed=1), LoraArguments(adapter=str(adapter), allow_other_base=True))


def test_a_fine_tuned_sister_of_the_base_is_another_base(adapter: Path) -> None:
    sister = tiny_model()
    optimizer = torch.optim.AdamW(sister.parameters(), lr=1e-4)
    ids = torch.arange(5, 45).view(2, 20)
    for _ in range(5):
        sister(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
    with pytest.raises(ConfigError, match="was trained on another base"):
        inject(sister, LoraArguments(adapter=str(adapter)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_same_base_is_known_at_another_dtype_and_with_new_rows(adapter: Path, base: Path, dtype: Any) -> None:
    smaller = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    smaller.resize_token_embeddings(270)
    inject(smaller, LoraArguments(adapter=str(adapter)))
    share = origin.agreement(origin.fingerprint(load(base)), origin.fingerprint(smaller))
    assert share is not None
    assert share >= 0.97


def test_an_adapter_saved_by_others_is_taken_as_before(adapter: Path) -> None:
    (adapter / "base_model.json").unlink()
    inject(tiny_model(seed=1), LoraArguments(adapter=str(adapter)))


def test_merging_asks_for_the_same_base(adapter: Path, tmp_path: Path) -> None:
    tiny_model(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"^--adapter: .* or say --allow-other-base if this is meant"):
        merge(adapter, tmp_path / "merged", base=str(tmp_path / "other"))
    merge(adapter, tmp_path / "merged", base=str(tmp_path / "other"), allow_other_base=True)


# ---------------------------------------------------------------- several


def test_several_adapters_are_added_up_by_weight(
    tmp_path: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = saved(tmp_path / "one", base, LoraArguments(r=4, targets=["q_proj", "up_proj"]))
    two = saved(tmp_path / "two", base, LoraArguments(r=2, variant="pissa", targets=["q_proj", "v_proj"]), seed=3)
    merge(one, tmp_path / "m1")
    merge(two, tmp_path / "m2")
    command = ["merge", "--adapter", str(one), "--adapter", str(two), "--weights", "0.25", "-2", "--output"]
    assert main([*command, str(tmp_path / "both")]) == 0
    assert "merged model in" in capsys.readouterr().out
    plain, first, second, both = (
        load(folder).state_dict() for folder in (base, tmp_path / "m1", tmp_path / "m2", tmp_path / "both")
    )
    for name, weight in plain.items():
        expected = weight + 0.25 * (first[name] - weight) - 2 * (second[name] - weight)
        assert difference(both[name], expected) < 1e-6, name
    merge([one, two], tmp_path / "both")
    assert (
        difference(
            load(tmp_path / "both").state_dict()["model.layers.0.mlp.up_proj.weight"],
            first["model.layers.0.mlp.up_proj.weight"],
        )
        < 1e-6
    )


def test_what_is_no_plain_update_is_not_added_up(tmp_path: Path, base: Path, adapter: Path) -> None:
    dora = saved(tmp_path / "dora", base, LoraArguments(r=4, variant="dora"))
    with pytest.raises(ConfigError, match=r"dora' can't be weighted or added to others: it is DoRA"):
        merge([adapter, dora], tmp_path / "merged")
    with pytest.raises(ConfigError, match=r"--weights: 1 for 2 adapters; give one for each --adapter"):
        merge([adapter, adapter], tmp_path / "merged", weights=[0.5])


def test_adapters_trained_here_stand_beside_one_another_and_are_switched(tmp_path: Path, base: Path) -> None:
    folders, expected = [], []
    for number, args in enumerate([LoraArguments(r=4), LoraArguments(r=4, variant="pissa")]):
        torch.manual_seed(number)
        model = inject(load(base), args)
        train(model)
        expected.append(logits(model))
        model.save_pretrained(tmp_path / str(number))
        portable.finish(model, tmp_path / str(number), portable=True)
        folders.append(tmp_path / str(number))
    both = PeftModel.from_pretrained(load(base), str(folders[0]), adapter_name="a")
    both.load_adapter(str(folders[1]), adapter_name="b")
    for name, wanted in (("b", expected[1]), ("a", expected[0])):
        both.set_adapter(name)
        assert difference(logits(both), wanted) < 1e-5
