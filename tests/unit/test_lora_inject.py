"""New adapters, continued adapters, new tokens: what is trained, in which dtype, and what reloads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel
from torch import nn

from sft_toolkit.args import LoraArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.config import to_peft
from sft_toolkit.lora.inject import inject, trainable_share
from sft_toolkit.model.loading import align, new_token_ids
from tests.tiny import tiny_model, tiny_tokenizer

IDS = torch.arange(5, 45).view(2, 20)
VARIANTS = ["lora", "rslora", "dora", "pissa", "olora"]


def train(model: Any, ids: torch.Tensor = IDS, steps: int = 3) -> torch.Tensor:
    """A few steps, then the logits."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(steps):
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return logits(model, ids)


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    model.eval()
    found: torch.Tensor = model(input_ids=ids).logits
    return found


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max())


# ---------------------------------------------------------------- configuration


@pytest.mark.parametrize(
    ("args", "r", "alpha"),
    [
        (LoraArguments(), 16, 32),
        (LoraArguments(r=4), 4, 8),
        (LoraArguments(r=4, alpha=6.0), 4, 6),
        (LoraArguments(r=4, alpha=0.5), 4, 0.5),
        (LoraArguments(r=16, variant="rslora"), 16, 8),
    ],
)
def test_rank_and_alpha(args: LoraArguments, r: int, alpha: float) -> None:
    config = to_peft(args, tiny_model())
    assert (config.r, config.lora_alpha, type(config.lora_alpha)) == (r, alpha, type(alpha))
    assert config.task_type == "CAUSAL_LM"


@pytest.mark.parametrize(
    ("variant", "fields"),
    [
        ("lora", (False, False, True)),
        ("rslora", (True, False, True)),
        ("dora", (False, True, True)),
        ("pissa", (False, False, "pissa")),
        ("olora", (False, False, "olora")),
    ],
)
def test_variants(variant: Any, fields: tuple[Any, ...]) -> None:
    config = to_peft(LoraArguments(variant=variant), tiny_model())
    assert (config.use_rslora, config.use_dora, config.init_lora_weights) == fields


def test_further_fields_of_peft_pass_through() -> None:
    args = LoraArguments(extra={"layers_to_transform": [1], "rank_pattern": {"q_proj": 2}})
    config = to_peft(args, tiny_model())
    assert (config.layers_to_transform, config.rank_pattern) == ([1], {"q_proj": 2})


def test_further_fields_that_are_wrong_are_refused_together() -> None:
    args = LoraArguments(variant="pissa", extra={"lora_alpha": 8, "bais": "all", "init_lora_weights": "gaussian"})
    with pytest.raises(ConfigError) as caught:
        to_peft(args, tiny_model())
    assert caught.value.problems == [
        "lora.lora_alpha: write lora.alpha instead",
        "lora.bais: unknown key; did you mean 'bias'?",
        "lora.init_lora_weights: gaussian contradicts lora.variant: pissa",
    ]


# ---------------------------------------------------------------- new adapters


def test_trainable_share_is_exact_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "sft_toolkit.lora.inject"):
        model = inject(tiny_model(), LoraArguments(r=4, targets=["q_proj"]))
    assert trainable_share(model) == (512, 35808)  # 2 layers x (4 x 32 + 32 x 4)
    assert caplog.messages[-1] == "trainable: 512 of 35,808 parameters (1.43 %)"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_everything_trained_is_fp32_on_a_smaller_base(dtype: torch.dtype) -> None:
    base: nn.Module = tiny_model()
    model = inject(base.to(dtype), LoraArguments(r=4, modules_to_save=["lm_head"]))
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    assert (trained, model.get_base_model().model.embed_tokens.weight.dtype) == ({torch.float32}, dtype)


def test_gradients_flow_through_reentrant_checkpointing() -> None:
    base = tiny_model()
    model = inject(base, LoraArguments(r=4))
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
    model.train()
    model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_any_configuration_of_peft_is_taken_and_not_changed() -> None:
    config = LoraConfig(r=2, target_modules=["q_proj"])
    model = inject(tiny_model(), config)
    assert trainable_share(model)[0] == 256  # 2 layers x (2 x 32 + 32 x 2)
    assert (config.target_modules, config.base_model_name_or_path) == ({"q_proj"}, None)
    assert config is not model.peft_config["default"]
    ia3 = inject(tiny_model(), IA3Config(target_modules=["k_proj"], feedforward_modules=[]))
    assert trainable_share(ia3)[0] == 32  # 2 layers x 16
    with pytest.raises(ConfigError, match="target_modules: 'qq_proj' matches no module; did you mean 'q_proj'"):
        inject(tiny_model(), LoraConfig(target_modules=["q_proj", "qq_proj"]))


def test_a_plain_module_takes_an_adapter() -> None:
    model = inject(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), LoraArguments(r=2, targets=["0"]))
    assert trainable_share(model) == (16, 46)
    assert model(torch.ones(1, 4)).shape == (1, 2)


def test_a_second_adapter_is_refused() -> None:
    with pytest.raises(ConfigError, match="the model carries an adapter already"):
        inject(inject(tiny_model(), LoraArguments()), LoraArguments())


# ---------------------------------------------------------------- continued adapters


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_continued_adapter_is_the_saved_one(tmp_path: Path, variant: Any, tied: bool) -> None:
    base = logits(tiny_model(tie_word_embeddings=tied))
    model = inject(tiny_model(tie_word_embeddings=tied), LoraArguments(r=4, variant=variant))
    assert difference(logits(model), base) < 1e-6
    expected = train(model)
    model.save_pretrained(tmp_path)
    again = inject(tiny_model(tie_word_embeddings=tied), LoraArguments(adapter=str(tmp_path)))
    assert difference(expected, base) > 1e-3
    assert difference(logits(again), expected) < 1e-6
    assert list(again.peft_config) == ["default"]
    assert trainable_share(again) == trainable_share(model)
    plain = PeftModel.from_pretrained(tiny_model(tie_word_embeddings=tied), str(tmp_path))
    assert difference(logits(plain), expected) < 1e-6


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    inject(tiny_model(), LoraArguments(r=8, targets=["q_proj", "v_proj"])).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_contradictions_with_the_file_are_refused(saved: Path) -> None:
    args = LoraArguments(r=16, alpha=8, targets=["q_proj"], variant="dora", adapter=str(saved), extra={"bias": "all"})
    with pytest.raises(ConfigError) as caught:
        inject(tiny_model(), args)
    hint = "leave the key out to continue it"
    assert caught.value.problems == [
        f"lora.r: asked for 16, but '{saved}' was saved with 8; {hint}",
        f"lora.alpha: asked for 8, but '{saved}' was saved with 16; {hint}",
        f"lora.targets: asked for ['q_proj'], but '{saved}' was saved with ['q_proj', 'v_proj']; {hint}",
        f"lora.use_dora: asked for True, but '{saved}' was saved with False; {hint}",
        f"lora.bias: asked for all, but '{saved}' was saved with none; {hint}",
    ]


def test_values_equal_to_the_file_and_another_dropout_pass(saved: Path) -> None:
    args = LoraArguments(r=8, alpha=16, targets=["v_proj", "q_proj"], dropout=0.25, adapter=str(saved))
    model = inject(tiny_model(), args)
    assert (model.peft_config["default"].r, model.peft_config["default"].lora_dropout) == (8, 0.25)


def test_an_adapter_of_another_model_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError, match=rf"^lora\.adapter: '{saved}' does not fit LlamaForCausalLM: .*size mismatch"):
        inject(tiny_model(hidden_size=16), LoraArguments(adapter=str(saved)))
    with pytest.raises(
        ConfigError, match=r"4 tensors are on one side only, such as base_model\.model\.model\.layers\.1\."
    ):
        inject(tiny_model(num_hidden_layers=1), LoraArguments(adapter=str(saved)))


def test_a_folder_that_is_no_adapter_is_refused(saved: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        inject(tiny_model(), LoraArguments(adapter=str(saved.parent / "adaptr")))
    assert str(caught.value) == (
        f"lora.adapter: '{saved.parent}/adaptr': no such file or folder; did you mean '{saved}'?"
    )
    (saved / "adapter_model.safetensors").write_bytes(bytes(16))
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is no safetensors file \(header of 0 bytes"):
        inject(tiny_model(), LoraArguments(adapter=str(saved)))
    (saved / "adapter_model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"is no adapter: no adapter_model\.safetensors; it holds README\.md, adapter_con"
    ):
        inject(tiny_model(), LoraArguments(adapter=str(saved)))


# ---------------------------------------------------------------- new tokens


@pytest.mark.parametrize("tied", [False, True])
def test_new_tokens_are_learned_and_reload_on_a_fresh_base(tmp_path: Path, tied: bool) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"], special_tokens=True)
    base = tiny_model(tie_word_embeddings=tied)
    new = new_token_ids(base, tokenizer)
    align(base, tokenizer, end_of_turn_id=4)
    table: Any = base.get_input_embeddings()
    before = table.weight.detach().clone()
    model = inject(base, LoraArguments(r=4), new_token_ids=new)
    ids = torch.tensor([[5, 261, 6, 262, 7, 261]])
    expected = train(model, ids)
    model.save_pretrained(tmp_path)
    again = inject(tiny_model(tie_word_embeddings=tied), LoraArguments(adapter=str(tmp_path)))
    assert difference(logits(again, ids), expected) < 1e-5
    merged = again.merge_and_unload().get_input_embeddings().weight
    changed = (merged - before).abs().amax(dim=1) > 0
    assert changed.nonzero().flatten().tolist() == [261, 262]


def test_new_tokens_leave_a_fully_trained_embedding_as_asked() -> None:
    args = LoraArguments(r=4, modules_to_save=["embed_tokens", "lm_head"])
    model = inject(tiny_model(), args, new_token_ids=[259, 260])
    assert model.peft_config["default"].trainable_token_indices is None


@pytest.mark.parametrize("tied", [False, True])
def test_where_rows_are_out_of_reach_the_table_is_trained(
    tied: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for module in ("inject", "checks"):
        monkeypatch.setattr(f"sft_toolkit.lora.{module}.rows_are_out_of_reach", lambda: True)
    model: Any = inject(tiny_model(tie_word_embeddings=tied), LoraArguments(r=4), new_token_ids=[259, 260])
    names = ["model.embed_tokens"] if tied else ["model.embed_tokens", "lm_head"]
    assert caplog.messages[0] == (
        f"the whole of {' and '.join(names)} is trained for 2 new tokens: under ZeRO-3, peft trains single rows of a "
        "table on CUDA devices only"
    )
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    trained = [layer.modules_to_save["default"].weight for layer in (table, head)]
    assert all(weight.requires_grad for weight in trained)
    assert (trained[0] is trained[1]) is tied
    with pytest.raises(ConfigError, match="trainable_token_indices: under ZeRO-3, peft trains single rows"):
        inject(tiny_model(), LoraConfig(r=4, trainable_token_indices={"embed_tokens": [3]}, task_type="CAUSAL_LM"))


def test_new_tokens_that_no_adapter_trains_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    ia3 = IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    with caplog.at_level(logging.WARNING, "sft_toolkit.lora.inject"):
        inject(tiny_model(), ia3, new_token_ids=[259, 260])
    assert caplog.messages == ["IA3Config does not train the rows of 2 new tokens, which stay random"]


def test_a_table_that_was_only_resized_reloads(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path / "base")
    base = tiny_model()
    base.resize_token_embeddings(263)
    base.config._name_or_path = base.name_or_path = str(tmp_path / "base")
    model = inject(base, LoraArguments(r=4))
    ids = torch.tensor([[5, 261, 6, 262]])
    expected = train(model, ids)
    with pytest.warns(UserWarning, match="the embedding layer has been resized"):
        model.save_pretrained(tmp_path / "adapter")
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["trainable_token_indices"] is None
    again = inject(tiny_model(), LoraArguments(adapter=str(tmp_path / "adapter")))
    assert difference(logits(again, ids), expected) < 1e-5
