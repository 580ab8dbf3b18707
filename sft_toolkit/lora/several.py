"""Adapters on one base, to be merged: one as it is, or several that count with weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from peft import LoraConfig, PeftModel
from peft.tuners.lora import LoraLayer

from sft_toolkit.args import ModelArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.lora.embedding import grow_table
from sft_toolkit.lora.portable import on_plain_base
from sft_toolkit.lora.saved import read_config, tensor_shapes
from sft_toolkit.model.source import in_plain_words


def check_weights(folders: Sequence[Path], weights: Sequence[float]) -> None:
    """Raise ConfigError where these adapters can't be added up.

    A sum of updates exists for plain LoRA only: DoRA's depends on the weight that it meets, and rows or modules that
    an adapter holds in full are values and no updates.
    """
    if weights and len(weights) != len(folders):
        raise ConfigError(f"--weights: {len(weights)} for {len(folders)} adapters; give one for each --adapter")
    if len(folders) == 1 and not weights:
        return
    for folder in folders:
        config = read_config(folder)
        reasons = {
            f"it is {type(config).__name__}": not isinstance(config, LoraConfig),
            "it is DoRA": getattr(config, "use_dora", False),
            "it trains biases": getattr(config, "bias", "none") != "none",
            "it holds modules in full (modules_to_save)": getattr(config, "modules_to_save", None),
            "it holds rows of the embedding": getattr(config, "trainable_token_indices", None),
        }
        reason = next((words for words, holds in reasons.items() if holds), None)
        if reason:
            raise ConfigError(f"--adapter: '{folder}' can't be weighted or added to others: {reason}")


def put_on(model: Any, folders: Sequence[Path], weights: Sequence[float]) -> PeftModel:
    """`model` with all adapters active, the update of each multiplied by its weight; changed in place."""
    pair: PeftModel | None = None
    names = ["default", *(f"adapter_{number}" for number in range(1, len(folders)))]
    with ExitStack() as temporary:
        for name, folder in zip(names, folders, strict=True):
            plain = temporary.enter_context(on_plain_base(folder))
            config = read_config(plain)
            with in_plain_words(ModelArguments(name_or_path=str(folder)), "adapter", "--adapter"):
                if pair is None:
                    grow_table(model, config, tensor_shapes(plain))
                    pair = PeftModel.from_pretrained(model, str(plain), config=config)
                else:
                    pair.load_adapter(str(plain), adapter_name=name)
    assert pair is not None
    if len(folders) > 1:
        pair.base_model.set_adapter(names)
    for layer in pair.modules() if weights else ():
        for name, weight in zip(names, weights, strict=True):
            if isinstance(layer, LoraLayer) and name in layer.scaling:
                layer.set_scale(name, weight)
    return pair
