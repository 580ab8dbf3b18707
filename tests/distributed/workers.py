"""What the ranks of the distributed tests do. Each function runs in every rank; what it returns goes to the test."""

from __future__ import annotations

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any


def environment() -> dict[str, str]:
    """The variables by which a rank knows who it is."""
    return {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")}


def sleep(seconds: float) -> None:
    """Outlive the watchdog."""
    time.sleep(seconds)


def command_lines(lines: list[list[str]]) -> list[tuple[int, str]]:
    """Exit code and standard error of each `train --config ...`, one after the other in the same process."""
    from sft_toolkit.cli import main

    ended = []
    for line in lines:
        said = io.StringIO()
        with contextlib.redirect_stderr(said):
            code = main(["train", "--config", *line])
        ended.append((code, said.getvalue()))
    return ended


def run_all(configs: list[str]) -> None:
    """Several runs from YAML in one process group; `main` would leave the group behind the first one."""
    from sft_toolkit import run

    for config in configs:
        run(config)


def train_all(cases: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Several trainings, one after the other in the same processes."""
    return [train(**case) for case in cases]


def train(
    model_dir: str,
    output_dir: str,
    labels: list[int],
    distributed: dict[str, Any] | None = None,
    *,
    adapter: bool = False,
    evaluate: list[int] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A training of `SFTTrainer` in file order on rows with so many labels each, saved to `output_dir/final`.

    The steps are those of `assemble`: check the start, arguments, process group, model, trainer.

    Args:
        labels: supervised tokens of each training row.
        distributed: section `distributed`.
        evaluate: the same for the held-out rows.
        changes: fields of SFTArguments over those of `tests.training.sgd_arguments`.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from sft_toolkit import SFTArguments, SFTTrainer
    from sft_toolkit.args import DistributedArguments
    from sft_toolkit.engines.deepspeed_config import check_settings_in_use, choose_deepspeed_config
    from sft_toolkit.engines.distributed import check_launch, start_process_group
    from sft_toolkit.engines.engagement import check_engaged, describe, engaged
    from tests.tiny import tiny_tokenizer
    from tests.training import lora, rows_with_labels, sgd_arguments

    asked = DistributedArguments(**(distributed or {}))
    check_launch(asked, os.environ)
    args: SFTArguments = sgd_arguments(
        Path(output_dir), deepspeed=choose_deepspeed_config(asked, os.environ), report_to="none", **changes
    )
    check_settings_in_use(args, os.environ)
    start_process_group(args)
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32),
        args=args,
        train_dataset=rows_with_labels(*labels),
        eval_dataset=rows_with_labels(*evaluate) if evaluate else None,
        processing_class=tiny_tokenizer(),
        peft_config=lora() if adapter else None,
    )
    trainer.train()
    what = engaged(trainer)
    check_engaged(asked, what)
    trainer.save_model(f"{output_dir}/final")
    logged = {
        name: [entry[name] for entry in trainer.state.log_history if name in entry]
        for name in ("loss", "grad_norm", "supervised_tokens", "eval_loss")
    }
    return {**logged, "steps": trainer.state.global_step, "engaged": vars(what), "block": describe(what)}
