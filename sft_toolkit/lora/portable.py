"""Adapters whose start took something out of the base -> plain LoRA that any loader puts on the plain base.

PiSSA, OLoRA and CorDA begin with B0 A0 != 0 and subtract s B0 A0 from the weight they adapt. What they learn, put on
the untouched weight, is therefore s (B A - B0 A0), which is one LoRA of twice the rank: [B, -B0] [A; A0]
(PiSSA, Meng et al. 2024, appendix C; peft: `subtract_mutated_init`). Done on the saved files: the live model trains on.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from torch import nn

from sft_toolkit.lora import origin
from sft_toolkit.lora.saved import WEIGHTS

START = "adapter_start.safetensors"
TAKE_FROM_BASE = ("pissa", "olora", "corda")


def takes_from_base(config: PeftConfig) -> bool:
    """Whether an adapter of this configuration changes the weights of its base when it starts."""
    return isinstance(config, LoraConfig) and str(config.init_lora_weights).lower().startswith(TAKE_FROM_BASE)


def start_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """The matrices of an adapter that was just put on, by the names of its file; copied to the host."""
    tensors = get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: t.detach().to("cpu", copy=True) for name, t in tensors.items() if _down(name) or _up(name)}


def finish(model: nn.Module, folder: Path, portable: bool) -> None:
    """Complete an adapter folder that was just written: the base's fingerprint, and where needed what it started from.

    Args:
        portable: turn it into a plain LoRA. A checkpoint stays as it is, since training goes on from it, and gets
            the start beside it.
    """
    known = origin.recall(model)
    if known is None or not (folder / WEIGHTS).is_file():
        return
    (folder / START).unlink(missing_ok=True)
    if known.start is not None and not portable:
        save_file({name: t.contiguous() for name, t in known.start.items()}, folder / START)
    origin.write(known, folder)
    if known.start is not None and portable:
        convert(folder, known.start)


@contextmanager
def on_plain_base(folder: Path) -> Iterator[Path]:
    """The folder itself, or a temporary one with the same adapter as plain LoRA where it kept its start beside it."""
    if not (folder / START).is_file():
        yield folder
        return
    with TemporaryDirectory() as name:
        copy = Path(name) / folder.name
        copy.mkdir()
        for file in ("adapter_config.json", WEIGHTS, origin.FILE_NAME):
            if (folder / file).is_file():
                shutil.copy(folder / file, copy / file)
        convert(copy, load_file(folder / START))
        yield copy


def convert(folder: Path, start: dict[str, torch.Tensor]) -> None:
    """Rewrite the adapter in `folder` as plain LoRA of twice the rank; its old settings go into `base_model.json`."""
    weights = load_file(folder / WEIGHTS)
    for name, first in start.items():
        if _down(name):
            weights[name] = torch.cat([weights[name], first.to(weights[name])], dim=0)
        else:
            weights[name] = torch.cat([weights[name], -first.to(weights[name])], dim=1)
    save_file({name: t.contiguous() for name, t in weights.items()}, folder / WEIGHTS, metadata={"format": "pt"})
    path = folder / "adapter_config.json"
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    known = origin.read(folder)
    if known is not None:
        known.started_from = {key: settings[key] for key in ("r", "lora_alpha", "init_lora_weights", "rank_pattern")}
        origin.write(known, folder)
    path.write_text(json.dumps(settings | _doubled(settings), indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _down(name: str) -> bool:
    """A: (r, in). An embedding's starts at zero, so it takes nothing out, but its rank has to be that of the others."""
    return name.endswith(("lora_A.weight", "lora_embedding_A"))


def _up(name: str) -> bool:
    """B: (out, r)."""
    return name.endswith(("lora_B.weight", "lora_embedding_B"))


def _doubled(settings: dict[str, Any]) -> dict[str, Any]:
    """Twice every rank at the same scale: alpha / r, or alpha / sqrt(r) for rslora."""
    factor = 2**0.5 if settings.get("use_rslora") else 2
    return {
        "r": 2 * settings["r"],
        "lora_alpha": factor * settings["lora_alpha"],
        "init_lora_weights": True,
        "rank_pattern": {name: 2 * rank for name, rank in (settings.get("rank_pattern") or {}).items()},
        "alpha_pattern": {name: factor * alpha for name, alpha in (settings.get("alpha_pattern") or {}).items()},
    }
