"""Loading a tokenizer and a model: dtypes, pad and end tokens, and every way of not finding them."""

from __future__ import annotations

import importlib.util
import json
import logging
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.trainer_utils import align_special_tokens

from sft_toolkit.args import ModelArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.model.gguf import forget_gguf, only_gguf
from sft_toolkit.model.loading import align, load_model, load_tokenizer, new_token_ids, table_rows, weights_dtype
from sft_toolkit.model.source import source_of
from tests.tiny import CHATML, tiny_model, tiny_tokenizer


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "tiny-base"
    tiny_model().save_pretrained(path)
    tiny_tokenizer().save_pretrained(path)
    return path


def load(folder: Path, **wanted: Any) -> Any:
    options = {"trains_all_weights": True, "precision": "fp32", "packing": False, **wanted}
    return load_model(ModelArguments(name_or_path=str(folder)), **options)


# ---------------------------------------------------------------- tokenizer


def test_tokenizer_keeps_its_pad_and_template(folder: Path) -> None:
    tokenizer = load_tokenizer(ModelArguments(name_or_path=str(folder)))
    assert (tokenizer.pad_token, tokenizer.pad_token_id) == ("<pad>", 0)
    assert tokenizer.chat_template == CHATML


def test_missing_pad_becomes_the_end_token_and_is_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    bare = tiny_tokenizer()
    bare.pad_token = None
    bare.save_pretrained(folder)
    with caplog.at_level(logging.INFO, "sft_toolkit.model.loading"):
        tokenizer = load_tokenizer(ModelArguments(name_or_path=str(folder)))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 4
    assert caplog.messages == [
        "the tokenizer has no pad token: '<|im_end|>' is used, and padding is masked by its length"
    ]


def test_template_file_replaces_the_template(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    text = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
    file.write_text(text)
    assert load_tokenizer(ModelArguments(name_or_path=str(folder), chat_template=str(file))).chat_template == text


def test_broken_template_file_names_the_line(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text("{% for m in messages %}\n{{ m['content' }}\n{% endfor %}")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelArguments(name_or_path=str(folder), chat_template=str(file)))
    assert str(caught.value) == f"model.chat_template: {file}:2: unexpected '}}', expected ']'"


def test_missing_template_file_names_the_neighbour(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "chatml.jinja").write_text("x")
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelArguments(name_or_path=str(folder), chat_template=str(tmp_path / "chat_ml.jinja")))
    assert str(caught.value) == (
        f"model.chat_template: '{tmp_path}/chat_ml.jinja': no such file or folder; "
        f"did you mean '{tmp_path}/chatml.jinja'?"
    )


# ---------------------------------------------------------------- not there


def test_missing_folder_names_the_neighbour(folder: Path) -> None:
    wrong = folder.parent / "tiny_bass"
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelArguments(name_or_path=str(wrong)))
    assert str(caught.value) == (
        f"model.name_or_path: '{wrong}': no such file or folder; did you mean '{folder}'? "
        "(give an existing folder, or a hub id such as org/name)"
    )


def test_hub_id_without_a_network_is_said_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name(*_: Any, **__: Any) -> None:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(ModelArguments(name_or_path="no-such-org/no-such-model"))
    assert str(caught.value) == (
        "model.name_or_path: the tokenizer of 'no-such-org/no-such-model' can't be loaded: there is no folder of that "
        "name here (no such file or folder; the folder 'no-such-org' does not exist), and the hub can't be reached. "
        "Offline, give a folder or a hub id whose files are in the cache"
    )


def test_folder_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(ConfigError) as caught:
        source_of(ModelArguments(name_or_path=str(tmp_path)))
    assert str(caught.value) == (
        f"model.name_or_path: '{tmp_path}' holds no model (no config.json); it holds notes.txt"
    )


def test_adapter_given_as_model_says_which_keys_to_write(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(ConfigError) as caught:
        source_of(ModelArguments(name_or_path=str(tmp_path)))
    assert str(caught.value) == (
        f"model.name_or_path: '{tmp_path}' holds no model (no config.json); it is an adapter: write "
        f"model.name_or_path: org/base and lora.adapter: {tmp_path}"
    )


@pytest.mark.parametrize("given", ["folder", "file"])
def test_gguf_without_its_key_says_which_key_to_write(tmp_path: Path, given: str) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    name = tmp_path if given == "folder" else tmp_path / "tiny.gguf"
    with pytest.raises(ConfigError) as caught:
        source_of(ModelArguments(name_or_path=str(name)))
    assert "model.gguf_file: tiny.gguf" in str(caught.value)


def test_wrong_gguf_name_names_the_neighbour(tmp_path: Path) -> None:
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    with pytest.raises(ConfigError) as caught:
        source_of(ModelArguments(name_or_path=str(tmp_path), gguf_file="tinny.gguf"))
    assert str(caught.value) == (
        f"model.gguf_file: '{tmp_path}/tinny.gguf': no such file or folder; did you mean '{tmp_path}/tiny.gguf'?"
    )


def test_damaged_weights_are_a_configuration_error(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(bytes(16))
    with pytest.raises(ConfigError, match=r"^model\.name_or_path: the model of '.*tiny-base' can't be loaded: "):
        load(folder)


def test_unknown_attention_is_a_configuration_error(folder: Path) -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        load_model(
            ModelArguments(name_or_path=str(folder), attn_implementation="nonsense"),
            trains_all_weights=True,
            precision="fp32",
            packing=False,
        )


def test_a_gguf_leaves_no_trace_that_would_spoil_the_saved_folder(tmp_path: Path) -> None:
    model: Any = tiny_model()
    model.hf_quantizer, model.quantization_method, model.is_quantized = object(), "gguf", True
    model.config.quantization_config, model.config._model_name_or_path = {"quant_method": "gguf"}, "Title of a File"
    forget_gguf(model, "folder/of/the/gguf")
    assert (model.name_or_path, model.config._name_or_path, model.is_quantized) == (*["folder/of/the/gguf"] * 2, False)
    model.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not {"quantization_config", "_model_name_or_path"} & set(saved)
    assert not {"hf_quantizer", "quantization_method"} & set(vars(model))


def test_the_only_gguf_of_a_folder_is_found(tmp_path: Path) -> None:
    assert only_gguf(tmp_path / "nowhere") is None
    (tmp_path / "a.gguf").touch()
    assert only_gguf(tmp_path) == "a.gguf"
    (tmp_path / "config.json").touch()
    assert only_gguf(tmp_path) is None
    (tmp_path / "config.json").unlink()
    (tmp_path / "b.gguf").touch()
    assert only_gguf(tmp_path) is None


# ---------------------------------------------------------------- dtypes


@pytest.mark.parametrize(
    ("dtype", "full", "precision", "expected"),
    [
        ("auto", True, "bf16", torch.float32),
        ("auto", True, "fp16", torch.float32),
        ("auto", False, "bf16", torch.bfloat16),
        ("auto", False, "fp16", torch.float16),
        ("auto", False, "fp32", torch.float32),
        ("auto", False, "no", torch.float32),
        ("bfloat16", True, "bf16", torch.bfloat16),
        ("float16", False, "fp16", torch.float16),
    ],
)
def test_dtype_of_the_weights(dtype: Any, full: bool, precision: str, expected: torch.dtype) -> None:
    assert weights_dtype(ModelArguments(dtype=dtype), trains_all_weights=full, precision=precision) is expected


def test_full_training_of_fp16_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="float16 weights can't be trained in full"):
        weights_dtype(ModelArguments(dtype="float16"), trains_all_weights=True, precision="fp16")


def test_bf16_checkpoint_is_trained_in_fp32_and_loaded_in_bf16_below_an_adapter(folder: Path) -> None:
    model: Any = tiny_model()
    model.to(torch.bfloat16).save_pretrained(folder)
    assert {p.dtype for p in load(folder, precision="bf16").parameters()} == {torch.float32}
    assert {p.dtype for p in load(folder, precision="bf16", trains_all_weights=False).parameters()} == {torch.bfloat16}


def test_quantisation_that_can_not_be_met_is_refused_before_the_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sft_toolkit.model.loading.find_spec", lambda name: None)
    (folder / "model.safetensors").unlink()
    model = ModelArguments(name_or_path=str(folder), quantize="nf4")
    with pytest.raises(ConfigError) as caught:
        load_model(model, trains_all_weights=True, precision="fp32", packing=False)
    assert caught.value.problems == [
        "model.quantize: nf4: needs bitsandbytes: pip install 'sft-toolkit[bitsandbytes]'",
        "model.quantize: nf4: quantised weights can't be trained in full: add a lora section",
    ]


def test_a_checkpoint_of_quantised_weights_names_the_package_that_reads_it(folder: Path) -> None:
    if importlib.util.find_spec("bitsandbytes") is not None:
        pytest.skip("bitsandbytes is installed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"^model\.name_or_path: the model of .* can't be loaded: .*bitsandbytes"):
        load(folder, trains_all_weights=False)


def test_packing_is_refused_where_a_state_runs_through_the_row(tmp_path: Path) -> None:
    from transformers import MambaConfig, MambaForCausalLM

    MambaForCausalLM(MambaConfig(vocab_size=16, hidden_size=8, state_size=4, num_hidden_layers=1)).save_pretrained(
        tmp_path
    )
    with pytest.raises(ConfigError, match=r"^data\.packing: MambaForCausalLM carries a state"):
        load(tmp_path, packing=True)


# ---------------------------------------------------------------- ids


def test_generation_stops_at_the_end_of_turn_too() -> None:
    model, tokenizer = tiny_model(eos_token_id=2), tiny_tokenizer()
    tokenizer.eos_token = "</s>"
    notes = align(model, tokenizer, end_of_turn_id=4)
    assert model.generation_config.eos_token_id == [2, 4]
    assert notes == ["generation stops at '</s>' (2), '<|im_end|>' (4)"]
    align_special_tokens(model, tokenizer)  # what Trainer does on its own afterwards
    assert model.generation_config.eos_token_id == [2, 4]


def test_an_aligned_model_is_left_alone() -> None:
    model = tiny_model()
    assert align(model, tiny_tokenizer(), end_of_turn_id=4) == []
    assert model.generation_config.eos_token_id == 4


def test_ends_of_the_model_are_kept() -> None:
    model = tiny_model(eos_token_id=[2, 3])
    align(model, tiny_tokenizer(), end_of_turn_id=4)
    assert model.config.eos_token_id == [4, 2, 3]
    assert model.generation_config.eos_token_id == [4, 2, 3]


def test_pad_of_the_tokenizer_reaches_both_configs() -> None:
    model = tiny_model()
    align(model, tiny_tokenizer(pad="<|im_end|>"), end_of_turn_id=4)
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (4, 4)


def test_new_tokens_get_rows_and_the_caller_is_told() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    tokenizer.add_tokens(["<a>", "<b>"], special_tokens=True)
    assert new_token_ids(model, tokenizer) == [261, 262]
    assert align(model, tokenizer, end_of_turn_id=4)[0].startswith("the embedding grew from 261 to 263 rows")
    assert (table_rows(model), model.lm_head.weight.shape[0], model.config.vocab_size) == (263, 263, 263)
    assert new_token_ids(model, tokenizer) == []


def test_a_generation_config_that_could_not_be_saved_is_mended(tmp_path: Path) -> None:
    model = tiny_model()
    model.generation_config = GenerationConfig(temperature=0.6, do_sample=False)
    notes = align(model, tiny_tokenizer(), end_of_turn_id=4)
    assert notes[-1] == "generation config: do_sample is on, as its sampling values ask for"
    model.save_pretrained(tmp_path)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path).generation_config
    assert (saved.eos_token_id, saved.temperature, saved.do_sample) == (4, 0.6, True)
