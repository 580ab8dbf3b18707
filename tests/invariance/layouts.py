"""The same 16 rows through many layouts, and a reference written by hand in plain PyTorch.

`LAYOUTS` covers every pair of options under every strategy (an orthogonal array of strength 2: 8 runs instead of 64).
`python -m tests.invariance.layouts` runs all of it and writes `docs/invariance.md`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import get_peft_model
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import lora, rows_with_labels, sgd_arguments

COUNTS = (1, 15, 3, 25, 2, 9, 4, 11, 20, 6, 1, 13, 8, 17, 5, 22)
"""Supervised tokens of each row."""
BIN = 92
"""Tokens of a bin: two rows fit, so that 8 bins hold all rows."""
WEIGHTS = (1.0, 0.25, 0.5, 1.5, 0.75)
STEPS = 3
TOLERANCE = 1e-5
# Adam, because ZeRO-Offload takes no other; its first steps are nearly the sign of the gradient, which would turn the
# rounding of a gradient near zero into a whole step. An epsilon as large as the gradients keeps them smooth.
ADAM: dict[str, Any] = {"lr": 0.05, "betas": (0.8, 0.9), "eps": 1e-2, "weight_decay": 0.1}
CLIP = 0.5
STRATEGIES: dict[str, dict[str, Any]] = {
    "one process": {},
    "DDP": {},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-2 offload": {"zero_stage": 2, "offload_optimizer": True},
    "ZeRO-3": {"zero_stage": 3},
    "ZeRO-3 offload": {"zero_stage": 3, "offload_optimizer": True, "offload_param": True},
}
SPLITS = ((8, 1), (4, 2), (2, 4), (1, 8))
"""Micro-batch per rank x accumulation."""


@dataclass(frozen=True)
class Layout:
    """One way to split the same updates."""

    strategy: str
    micro_batch: int
    accumulation: int
    packed: bool
    adapter: bool
    checkpointing: bool
    chunked: bool
    weighted: bool = False

    @property
    def ranks(self) -> int:
        """Processes."""
        return 1 if self.strategy == "one process" else 2

    def __str__(self) -> str:
        parts = [
            self.strategy,
            f"{self.micro_batch}x{self.accumulation}",
            "packed" if self.packed else "padded",
            "LoRA" if self.adapter else "full",
            "checkpointing" if self.checkpointing else "no checkpointing",
            "chunks" if self.chunked else "no chunks",
        ]
        return ", ".join([*parts, "weights"] if self.weighted else parts)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Conversations; with weights, each answer counts a quarter to one and a half."""
        rows = rows_with_labels(*COUNTS)
        for number, row in enumerate(rows if self.weighted else []):
            row["messages"][1]["weight"] = WEIGHTS[number % len(WEIGHTS)]
        return rows

    @property
    def updates(self) -> list[range]:
        """Rows of each update. One process sees 8 padded rows at a time; two ranks see all 16, and 8 bins hold all."""
        whole = self.packed or self.ranks == 2
        return [range(16)] * STEPS if whole else [range(8), range(8, 16), range(8)]


LAYOUTS = [
    Layout(strategy, micro, accumulation, bool(x), bool(x ^ i >> 1), bool(x ^ i & 1), bool(x ^ i >> 1 ^ i & 1))
    for strategy in STRATEGIES
    for i, (micro, accumulation) in enumerate(SPLITS)
    for x in (0, 1)
]
LAYOUTS += [
    Layout(strategy, micro, accumulation, packed, adapter, True, packed, weighted=True)
    for strategy in ("one process", "DDP", "ZeRO-3 offload")
    for micro, accumulation, packed, adapter in ((2, 4, False, True), (4, 2, True, False))
]


class Result(NamedTuple):
    """What three updates leave behind."""

    losses: list[float]
    grad_norms: list[float]
    weights: dict[str, Tensor]


# ---- By hand ---------------------------------------------------------------------------------------------------------


def reference(layout: Layout) -> tuple[Result, dict[str, Tensor]]:
    """Full batches in one process, in plain PyTorch; and the weights before the first update."""
    model, rows = _model(tiny_model(), layout.adapter), [_tokens(row) for row in layout.rows]
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    groups: list[dict[str, Any]] = [  # as in Trainer: norms don't decay
        {"params": [parameter for parameter in trained.values() if parameter.dim() > 1]},
        {"params": [parameter for parameter in trained.values() if parameter.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], **ADAM)
    losses, norms = [], []
    for update in layout.updates:
        ids = pad_sequence([rows[i][0] for i in update], batch_first=True)
        labels = pad_sequence([rows[i][1] for i in update], batch_first=True, padding_value=-100)
        lengths = torch.tensor([len(rows[i][0]) for i in update])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits, targets = model(input_ids=ids, attention_mask=mask).logits[:, :-1], labels[:, 1:]
        each = nn.functional.cross_entropy(
            logits.transpose(1, 2), targets, reduction="none"
        )  # 0 where there is no label
        weights = torch.tensor([rows[i][2] for i in update])[:, None] * (targets != -100)
        loss = (each * weights).sum() / weights.sum()  # over all labels of the update: no split
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(trained.values(), CLIP)))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return Result(losses, norms, {name: parameter.detach() for name, parameter in trained.items()}), before


def _tokens(row: Mapping[str, Any]) -> tuple[Tensor, Tensor, float]:
    """Ids, labels, weight of the answer."""
    tokenizer = tiny_tokenizer()
    rendered = str(tokenizer.apply_chat_template(row["messages"], tokenize=False)).removesuffix("\n")
    prompt, _, _ = rendered.partition("assistant\n")
    ids = tokenizer.encode(rendered)
    unlearned = len(tokenizer.encode(prompt + "assistant\n"))
    labels = torch.tensor([-100] * unlearned + ids[unlearned:])
    return torch.tensor(ids), labels, row["messages"][1].get("weight", 1.0)


def _model(model: Any, adapter: bool) -> Any:
    return get_peft_model(model, lora()) if adapter else model


# ---- By SFTTrainer ---------------------------------------------------------------------------------------------------


def run_layouts(folder: str, model_dir: str, names: list[str]) -> dict[str, Any]:
    """In every rank: train the layouts one after the other; the first rank writes the weights to `folder`."""
    return {str(layout): run_layout(layout, folder, model_dir) for layout in LAYOUTS if str(layout) in names}


def run_layout(layout: Layout, folder: str, model_dir: str) -> dict[str, Any]:
    """Three updates of SFTTrainer; `weights` names the file with what was trained."""
    from transformers import AutoModelForCausalLM

    from sft_toolkit import SFTTrainer
    from sft_toolkit.engines.distributed import start_process_group

    args = sgd_arguments(
        Path(folder) / "out",
        optim="adamw_torch",
        learning_rate=ADAM["lr"],
        adam_beta1=ADAM["betas"][0],
        adam_beta2=ADAM["betas"][1],
        adam_epsilon=ADAM["eps"],
        weight_decay=ADAM["weight_decay"],
        max_grad_norm=CLIP,
        max_steps=STEPS,
        per_device_train_batch_size=layout.micro_batch,
        gradient_accumulation_steps=layout.accumulation,
        packing=layout.packed,
        max_length=BIN if layout.packed else 256,
        activation_checkpointing=layout.checkpointing,
        loss_chunk=8 if layout.chunked else 10_000,
        **STRATEGIES[layout.strategy],
    )
    start_process_group(args)
    model = _model(AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32), layout.adapter)
    trainer = SFTTrainer(model, args, None, layout.rows, None, tiny_tokenizer())
    trainer.train()
    file = Path(folder) / f"{LAYOUTS.index(layout)}.pt"
    _save_weights(trainer, file)
    engine = type(trainer.model_wrapped).__name__ == "DeepSpeedEngine"
    logged = {
        key: [e[key] for e in trainer.state.log_history if key in e]
        for key in ("loss", "grad_norm", "supervised_tokens")
    }
    return {
        **logged,
        "weights": str(file),
        "world": trainer.args.world_size,
        "engine": engine,
    }


def _save_weights(trainer: Any, file: Path) -> None:
    parameters = trainer.accelerator.unwrap_model(trainer.model).named_parameters()
    trained = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    if all(hasattr(parameter, "ds_id") for parameter in trained.values()):  # ZeRO-3
        import deepspeed

        with deepspeed.zero.GatheredParameters(list(trained.values())):
            whole = {name: parameter.detach().clone() for name, parameter in trained.items()}
    else:
        whole = {name: parameter.detach() for name, parameter in trained.items()}
    if trainer.is_world_process_zero():
        torch.save(whole, file)


# ---- Side by side ----------------------------------------------------------------------------------------------------


class Difference(NamedTuple):
    """Relative to the reference; `weights` relative to how far a tensor has moved, the worst of all tensors."""

    loss: float
    grad_norm: float
    weights: float


def difference(layout: Layout, found: Mapping[str, Any], references: dict[Any, Any]) -> Difference:
    """How far a layout's training is from the one by hand."""
    expected, before = references[_kind(layout)]
    weights = torch.load(found["weights"])
    assert weights.keys() == expected.weights.keys()
    moved = ((weights[name] - after).norm() / (after - before[name]).norm() for name, after in expected.weights.items())
    return Difference(
        _relative(found["loss"], expected.losses), _relative(found["grad_norm"], expected.grad_norms), float(max(moved))
    )


def _relative(found: list[float], expected: list[float]) -> float:
    assert len(found) == len(expected)
    return max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))


def all_references() -> dict[Any, Any]:
    """One for all layouts that make the same updates."""
    return {key: reference(layout) for key, layout in {_kind(layout): layout for layout in LAYOUTS}.items()}


def _kind(layout: Layout) -> tuple[str, bool, bool]:
    return str(layout.updates), layout.adapter, layout.weighted


def run_everything(folder: Path) -> dict[str, dict[str, Any]]:
    """One launch of two ranks for all that needs two; the rest in this process."""
    from tests.distributed.launch import build_operators, run_ranks

    model_dir = folder / "model"
    tiny_model().save_pretrained(model_dir)
    build_operators()
    alone = [str(layout) for layout in LAYOUTS if layout.ranks == 1]
    both = [str(layout) for layout in LAYOUTS if layout.ranks == 2]
    shared = {"folder": str(folder), "model_dir": str(model_dir)}
    found = run_layouts(**shared, names=alone)
    first, second = run_ranks(
        "tests.invariance.layouts:run_layouts", {**shared, "names": both}, timeout=400, env={"OMP_NUM_THREADS": "1"}
    )
    assert {name: run["loss"] for name, run in first.items()} == {name: run["loss"] for name, run in second.items()}
    return {**found, **first}


def table(differences: Mapping[str, Difference]) -> str:
    """Markdown."""
    head = "| layout | loss | gradient norm | weights |\n|---|--:|--:|--:|\n"
    cells = {name: " | ".join(f"{d:.0e}" for d in found) for name, found in differences.items()}
    return head + "".join(f"| {name} | {row} |\n" for name, row in cells.items())


def compare(found: Mapping[str, Any], layouts: Iterable[Layout] = LAYOUTS) -> dict[str, Difference]:
    """The differences of all layouts."""
    references = all_references()
    return {str(layout): difference(layout, found[str(layout)], references) for layout in layouts}


def main() -> None:
    """Write the table into docs/invariance.md, between its two marks."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        rows = table(compare(run_everything(Path(folder))))
    document = Path(__file__).parents[2] / "docs" / "invariance.md"
    head, _, rest = document.read_text(encoding="utf-8").partition("<!-- table -->\n")
    _, _, tail = rest.partition("<!-- end -->\n")
    document.write_text(f"{head}<!-- table -->\n{rows}<!-- end -->\n{tail}", encoding="utf-8")


if __name__ == "__main__":
    main()
