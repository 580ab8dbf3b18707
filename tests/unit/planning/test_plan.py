"""`plan`: the model's configuration alone, every strategy, what fits and what to write."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import LlamaConfig

from sft_toolkit.args import LoraArguments, ModelArguments
from sft_toolkit.cli import main
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.inject import inject
from sft_toolkit.planning.memory import Setup, memory_of
from sft_toolkit.planning.plan import parse_size
from sft_toolkit.planning.shape import shape_from, shape_of
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels

SEVEN: dict[str, Any] = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
SEVENTY: dict[str, Any] = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_with_labels(1, 15)), encoding="utf-8")
    sections = {
        "model": {"name_or_path": str(tmp_path / "model")},
        "data": {"train": str(data)},
        "training": {"output_dir": str(tmp_path / "out"), "per_device_train_batch_size": 1},
    }
    path = tmp_path / "run.yaml"
    path.write_text(json.dumps(sections), encoding="utf-8")
    return path


def llama(folder: Path, heads: int, kv_heads: int, **sizes: Any) -> str:
    config = LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=32000)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return str(folder)


def test_published_sizes_from_the_configuration_alone(tmp_path: Path) -> None:
    seven = shape_from(ModelArguments(llama(tmp_path / "7b", 32, 32, **SEVEN)), None)
    seventy = shape_from(ModelArguments(llama(tmp_path / "70b", 64, 8, **SEVENTY)), LoraArguments(r=16))
    assert (seven.total, seven.trainable) == (6_738_415_616, 6_738_415_616)
    assert seventy.frozen == 68_976_648_192
    assert (seventy.hidden, seventy.kv_width, seventy.layers) == (8192, 1024, 80)


def test_qlora_takes_what_its_paper_says(tmp_path: Path) -> None:
    """Dettmers et al. 2023: LLaMA 65B, rank 64 on all linear layers, on one GPU of 48 GB."""
    sizes = {"hidden_size": 8192, "intermediate_size": 22016, "num_hidden_layers": 80}
    models = {"7b": llama(tmp_path / "7b", 32, 32, **SEVEN), "65b": llama(tmp_path / "65b", 64, 64, **sizes)}
    adapter = LoraArguments(r=64, targets="all-linear")
    shapes = {name: shape_from(ModelArguments(model), adapter) for name, model in models.items()}
    setup = Setup(max_length=512, quantize="nf4", loss_chunk=128)
    found = {name: memory_of(shape, setup) for name, shape in shapes.items()}
    weights = {name: (memory.device["weights"] - 4 * shapes[name].trainable) / 1e9 for name, memory in found.items()}
    assert shapes["65b"].frozen == 65_285_660_672
    assert weights == pytest.approx({"7b": 3.87, "65b": 34.46}, abs=0.01)
    assert found["65b"].per_device < 48 * 2**30
    whole = memory_of(shapes["65b"], replace(setup, quantize=None)).device["weights"]
    assert whole / 1e9 == pytest.approx(130.57 + 4 * 0.8, abs=0.01)


def test_the_shape_is_that_of_the_model_that_will_train(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    for lora in (None, LoraArguments(r=4, targets="all-linear")):
        model = tiny_model() if lora is None else inject(tiny_model(), lora)
        assert shape_from(ModelArguments(str(tmp_path)), lora) == shape_of(model)


def run_plan(run_file: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    assert main(["plan", "--config", str(run_file), *options]) == 0
    return capsys.readouterr().out


def test_seven_billion_on_eight_devices(run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = ["--device-memory", "24GiB", "--devices", "8", "--host-memory", "256GiB"]
    model = f"model.name_or_path={llama(tmp_path / '7b', 32, 32, **SEVEN)}"
    found = json.loads(run_plan(run_file, capsys, *machine, "--json", model))
    fits = {(s["strategy"], s["offload_optimizer"], s["offload_param"]): s["fits"] for s in found["strategies"]}
    assert fits == {
        ("ddp", False, False): False,
        ("zero1", False, False): False,
        ("zero2", False, False): False,
        ("zero3", False, False): True,
        ("fsdp", False, False): True,
        ("zero2", True, False): True,
        ("zero3", True, False): True,
        ("zero3", True, True): True,
    }
    said = run_plan(run_file, capsys, *machine, model)
    assert yaml.safe_load(said[said.index("distributed:") :]) == {
        "distributed": {"strategy": "zero3", "num_processes": 8}
    }
    small = [*machine[:1], "2GiB", *machine[2:]]
    assert "Nothing fits: the smallest is zero3 + optimizer and param on cpu" in run_plan(
        run_file, capsys, *small, model
    )


def test_this_machine_is_planned_for_without_options(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (only,) = json.loads(run_plan(run_file, capsys, "--json"))["strategies"]
    assert (only["strategy"], only["fits"], only["recommended"]) == ("none", True, True)
    assert only["device"]["weights"] == 4 * tiny_model().num_parameters()


def test_the_recommendation_is_a_section_that_is_accepted(run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = run_plan(run_file, capsys, "--devices", "2", "--device-memory", "24G")
    section = yaml.safe_load(said[said.index("distributed:") :])["distributed"]
    assert section == {"strategy": "ddp", "num_processes": 2}


@pytest.mark.parametrize(
    ("text", "size"),
    [("24GiB", 24 * 2**30), ("24g", 24 * 2**30), ("80 GB", 80 * 10**9), ("1.5TiB", 3 * 2**39), ("512", 512)],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_size(text, "--device-memory") == size


@pytest.mark.parametrize("text", ["24 apples", "", "0GiB", "-3GiB", "GiB"])
def test_no_sizes(text: str, run_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        parse_size(text, "--device-memory")
    if text.startswith("24"):
        assert main(["plan", "--config", str(run_file), "--device-memory", text]) == 2
        assert capsys.readouterr().err == (
            "error: --device-memory: '24 apples' is no size; write 24GiB, 80GB or a number of bytes\n"
        )
