"""Adapter + base -> one plain model folder, which is only kept when its logits are those of the pair.

The merge itself runs in fp32 on the CPU whatever the dtypes before and after, so the only difference left is the
rounding of the merged weights to the dtype that is saved. Memory: 4 bytes per parameter, once.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sft_toolkit.args import ModelArguments
from sft_toolkit.errors import CheckpointError, ConfigError
from sft_toolkit.lora.embedding import table_rows, tables
from sft_toolkit.lora.live import copy_in_fp32, refuse_partial_weights
from sft_toolkit.lora.origin import check_base
from sft_toolkit.lora.saved import adapter_folder, read_config
from sft_toolkit.lora.several import check_weights, put_on
from sft_toolkit.model.gguf import forget_gguf, only_gguf, unpacked
from sft_toolkit.model.source import in_plain_words, source_of

logger = logging.getLogger(__name__)

REPORT = "merge.json"
EXACT = 1e-4
"""Largest difference of two logits, as a share of the largest logit, between models of equal weights in fp32."""

TOLERANCE = {"float32": EXACT, "float16": 2e-2, "bfloat16": 2e-1}
"""The same after rounding the weights to a dtype, on random ids. Measured with SmolLM2-135M in bf16: 3e-2."""


@dataclass(frozen=True)
class MergeReport:
    """What was written and how well it agrees with base + adapter; stored as `merge.json` beside the weights."""

    output: str
    dtype: str
    max_logit_difference: float
    largest_logit: float
    tolerance: float

    def __str__(self) -> str:
        return (
            f"merged model in {self.output} ({self.dtype}); logits differ from base + adapter by at most "
            f"{self.max_logit_difference:.2g} (largest logit {self.largest_logit:.3g}, allowed {self.tolerance:.2g})"
        )


def merge(
    adapter_dir: str | Path | Sequence[str | Path],
    output_dir: str | Path,
    dtype: str | None = None,
    base: str | PreTrainedModel | None = None,
    *,
    weights: Sequence[float] = (),
    allow_other_base: bool = False,
    trust_remote_code: bool = False,
) -> MergeReport:
    """Merge a saved adapter into its base and write a plain model folder with tokenizer and generation config.

    Args:
        adapter_dir: a folder, or several of LoRA adapters of one base: base + sum of weight x update. Tokenizer and
            generation config are those of the first.
        output_dir: new, empty, or the result of an earlier merge, which is replaced.
        dtype: float32, bfloat16 or float16; default: the dtype the base is stored in.
        base: folder or hub id (also a folder with one GGUF), or a loaded model, which is used up; default: the base
            that the adapter names.
        weights: one for each adapter; default 1.
        allow_other_base: merge also where the base is not the one that the adapter was trained on.

    Raises:
        ConfigError: adapter, base or output folder can't be used.
        CheckpointError: the merged folder does not give the logits of base + adapter; nothing is left behind.
    """
    given = [adapter_dir] if isinstance(adapter_dir, str | Path) else list(adapter_dir)
    folders, output = [adapter_folder(str(name), "--adapter") for name in given], _usable_output(Path(output_dir))
    check_weights(folders, weights)
    folder, config = folders[0], read_config(folders[0])
    name = base if isinstance(base, str) else config.base_model_name_or_path
    model: Any = base if isinstance(base, PreTrainedModel) else _load(name, config.revision, folder, trust_remote_code)
    for each in folders:
        check_base(each, model, "--adapter", None if allow_other_base else "--allow-other-base")
    stored = dtype or _name_of(model.config.dtype or model.dtype)
    pair = put_on(model.float(), folders, weights)
    tokenizer = _tokenizer(folder, name, trust_remote_code)
    if (folder / "generation_config.json").is_file():
        pair.get_base_model().generation_config = GenerationConfig.from_pretrained(str(folder))
    return _merge(pair, tokenizer, output, stored)


def merge_live(
    model: PeftModel, tokenizer: PreTrainedTokenizerBase, output_dir: str | Path, dtype: str | None = None
) -> MergeReport:
    """Merge the adapter of a model that goes on being used: the work is done on an fp32 copy in host memory.

    Call it in one process only. Arguments and errors are those of `merge`.

    Raises:
        CheckpointError: also where the weights are spread over processes or quantised; save the adapter and `merge` it.
    """
    refuse_partial_weights(model)
    base = model.get_base_model()
    report = _merge(copy_in_fp32(model), tokenizer, _usable_output(Path(output_dir)), dtype or _name_of(base.dtype))
    logger.info("%s", report)
    return report


# ---------------------------------------------------------------- merge, write, verify


def _merge(pair: PeftModel, tokenizer: PreTrainedTokenizerBase | None, output: Path, dtype: str) -> MergeReport:
    """`pair` is in fp32 on the CPU, and used up."""
    pair.eval()
    probe = _probe(table_rows(pair.get_base_model()))
    expected = _logits(pair, probe)
    largest = float(expected.abs().max())
    if not math.isfinite(largest):
        raise CheckpointError("merge: base + adapter give NaN or infinite logits; the adapter is broken")
    _untie_if_adapted(pair.get_base_model())
    merged = _merged(pair)
    _compare(expected, _logits(merged, probe), EXACT * largest, "merging changed the model")
    with _partial(output) as partial:
        merged = merged.to(getattr(torch, dtype))
        merged.save_pretrained(partial)
        if tokenizer is not None:
            tokenizer.save_pretrained(partial)
        rounded, kind = _logits(merged.float(), probe), type(merged)
        del merged, pair
        reloaded = _logits(kind.from_pretrained(partial, dtype=torch.float32).eval(), probe)
        _compare(rounded, reloaded, EXACT * largest, "the folder reloads as another model")
        tolerance = TOLERANCE[dtype] * largest
        difference = _compare(expected, reloaded, tolerance, f"rounding to {dtype} changes the model too much")
        report = MergeReport(str(output), dtype, difference, largest, tolerance)
        (partial / REPORT).write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    return report


def _merged(pair: PeftModel) -> Any:
    kind = type(pair.active_peft_config).__name__
    if not hasattr(pair.base_model, "merge_and_unload"):
        raise ConfigError(f"merge: {kind} adds to what the layers compute, so it can't become part of their weights")
    try:
        return pair.merge_and_unload(safe_merge=True)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        raise ConfigError(f"merge: {kind} can't be merged into this base: {error}") from error


def _probe(rows: int) -> torch.Tensor:
    """Token ids (2, 32): random ones, and the newest rows of the table, which a resize may have added."""
    ids = torch.randint(rows, (2, 32), generator=torch.Generator().manual_seed(0))
    ids[:, -4:] = torch.arange(max(rows - 4, 0), rows)[-4:]
    return ids


@torch.no_grad()
def _logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits
    return logits.float()


def _compare(expected: torch.Tensor, found: torch.Tensor, tolerance: float, problem: str) -> float:
    difference = float((expected - found).abs().max())
    if not difference <= tolerance:  # written so that NaN fails too
        raise CheckpointError(f"merge: {problem}: logits differ by {difference:.3g}, more than {tolerance:.3g}")
    return difference


def _untie_if_adapted(base: nn.Module) -> None:
    """Give each adapted layer a weight of its own: the update of one would otherwise be merged into all that share it.

    Head and embedding share one where they are tied; the copies that `layer_replication` makes share all of theirs.
    """
    layers = list(tables(base).values())
    plain = [layer.get_base_layer() if isinstance(layer, BaseTunerLayer) else layer for layer in layers]
    adapted = [module for module in base.modules() if isinstance(module, BaseTunerLayer)]
    if len(plain) == 2 and plain[0].weight is plain[1].weight and any(layer in adapted for layer in layers):
        plain[1].weight = nn.Parameter(plain[1].weight.detach().clone(), requires_grad=False)
        base.config.get_text_config().tie_word_embeddings = False  # type: ignore[union-attr, operator]
        base.config.tie_word_embeddings = False  # type: ignore[union-attr]
    shared: set[int] = set()
    for module in base.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in shared and module not in plain:
                setattr(module, name, nn.Parameter(parameter.detach().clone(), requires_grad=False))
            shared.add(id(parameter))


# ---------------------------------------------------------------- parts


def _load(name: str | None, revision: str | None, folder: Path, trust_remote_code: bool) -> PreTrainedModel:
    if not name:
        raise ConfigError(f"--adapter: '{folder}' does not name its base model; pass base=")
    gguf = only_gguf(Path(name))
    wanted = ModelArguments(name, revision=revision, gguf_file=gguf, trust_remote_code=trust_remote_code)
    key = f"base of the adapter '{folder}'"
    source = source_of(wanted, key)
    with in_plain_words(wanted, "model", key):
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            **source, dtype=torch.float32 if gguf else "auto", **(unpacked() if gguf else {})
        )
    if gguf:
        forget_gguf(model, name)
    return model


def _tokenizer(folder: Path, base: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """The tokenizer saved with the adapter, else the one of its base; None where neither has one to be found."""
    if (folder / "tokenizer_config.json").is_file():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            str(folder), trust_remote_code=trust_remote_code
        )
        return tokenizer
    if not base:
        return None
    wanted = ModelArguments(base, gguf_file=only_gguf(Path(base)), trust_remote_code=trust_remote_code)
    try:
        with in_plain_words(wanted, "tokenizer"):
            tokenizer = AutoTokenizer.from_pretrained(**source_of(wanted))
    except ConfigError as error:
        logger.warning("the merged folder gets no tokenizer: %s", error)
        return None
    return tokenizer


def _usable_output(output: Path) -> Path:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output: '{output}' is a file")
    if output.is_dir() and any(output.iterdir()) and not (output / REPORT).is_file():
        raise ConfigError(f"--output: '{output}' is not empty and no result of an earlier merge; choose another folder")
    return output


@contextmanager
def _partial(output: Path) -> Iterator[Path]:
    """A folder beside `output` that takes its place when the block ends well, and is removed when it does not."""
    partial = output.with_name(f".{output.name}.partial-{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        yield partial
        if output.exists():
            shutil.rmtree(output)
        partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _name_of(dtype: torch.dtype | str) -> str:
    name = str(dtype).removeprefix("torch.")
    return name if name in TOLERANCE else "float32"
