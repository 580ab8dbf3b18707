"""Full fine-tunes of a part of the model: by pattern, and layer after layer; LoRA+ learning rates."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from sft_toolkit import ConfigError, LoraArguments, SFTTrainer
from sft_toolkit.callbacks import UnfreezeCallback
from sft_toolkit.model.freezing import train_only
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import rows_with_labels, sgd_arguments


def trainer(
    folder: Path, callbacks: list[TrainerCallback] | None = None, peft: Any = None, **changes: Any
) -> SFTTrainer:
    rows = rows_with_labels(3, 5, 9)
    args = sgd_arguments(folder, **changes)
    return SFTTrainer(tiny_model(), args, None, rows, None, tiny_tokenizer(), callbacks=callbacks, peft_config=peft)


def changed(model: Any) -> list[str]:
    before = tiny_model().state_dict()
    return [name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])]


def test_only_what_a_pattern_names_is_trained_and_its_share_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "sft_toolkit.model.freezing"):
        found = trainer(tmp_path, trainable=["*.layers.1.self_attn.[qv]_proj.weight", "lm_head*"])
    assert caplog.messages == ["trainable: 9,888 of 35,296 parameters (28.01 %)"]  # 32 x 32 + 16 x 32 + 261 x 32
    found.train()
    layer = "model.layers.1.self_attn"
    assert changed(found.model) == [f"{layer}.q_proj.weight", f"{layer}.v_proj.weight", "lm_head.weight"]


def test_patterns_in_vain_are_refused_together_with_near_names() -> None:
    with pytest.raises(ConfigError) as caught:
        train_only(tiny_model(), ["lm_head*", "*.layer.1.*", "*q_prj*", "q_proj"])
    assert caught.value.problems == [
        "training.trainable: '*.layer.1.*' matches no parameter; did you mean 'layers'?",
        "training.trainable: '*q_prj*' matches no parameter; did you mean 'q_proj'?",
        "training.trainable: 'q_proj' matches no parameter: a pattern matches the whole name, as '*q_proj*' would",
    ]


def test_with_an_adapter_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training\.trainable: with an adapter, the adapter is trained and nothing"):
        trainer(tmp_path, peft=LoraArguments(r=4), trainable=["lm_head*"])


def test_a_model_init_is_frozen_too(tmp_path: Path) -> None:
    args = sgd_arguments(tmp_path, trainable=["lm_head*"])
    rows = rows_with_labels(3)
    found = SFTTrainer(None, args, None, rows, None, tiny_tokenizer(), lambda: tiny_model())
    found.train()
    assert changed(found.model) == ["lm_head.weight"]


def test_layers_join_by_the_schedule_and_wait_untouched(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            seen.append(sorted({name.split(".weight")[0] for name in changed(model)}))

    schedule = {0: ["lm_head*"], "0.5": "*.layers.1.mlp.up_proj.*"}
    callback = UnfreezeCallback(schedule)
    options = {"max_steps": 4, "optim": "adamw_torch", "learning_rate": 0.01, "weight_decay": 0.1}
    found = trainer(tmp_path, [callback, Watch()], **options)
    found.train()
    late = "model.layers.1.mlp.up_proj"
    assert seen == [["lm_head"], ["lm_head"], ["lm_head", late], ["lm_head", late]]
    assert all(parameter.requires_grad for parameter in found.model.parameters())  # type: ignore[union-attr]


def test_a_schedule_in_vain_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unfreeze: '\*\.layer\.1\.\*' matches no parameter; did you mean 'layers'"):
        trainer(tmp_path, [UnfreezeCallback({0.5: ["*.layer.1.*"]})]).train()
    with pytest.raises(ConfigError, match=r"unfreeze: shares of the run are from 0 up to below 1, not \[2\.0\]"):
        UnfreezeCallback({2: ["lm_head*"]})
    found, callback = trainer(tmp_path), UnfreezeCallback({0: ["lm_head*"]})
    found.args.deepspeed = "ds.json"
    with pytest.raises(ConfigError, match="DeepSpeed, FSDP and DDP take stock of the trainable weights once"):
        callback.on_train_begin(found.args, found.state, found.control, model=found.model)


def test_lora_plus_moves_the_b_matrices_faster(tmp_path: Path) -> None:
    moved = {}
    for ratio in (None, 8.0):
        found = trainer(tmp_path / str(ratio), peft=LoraArguments(r=4), lora_plus_ratio=ratio, learning_rate=0.01)
        found.train()
        model: Any = found.model
        moved[ratio] = {name: p.detach() for name, p in model.named_parameters() if "lora_B" in name}
    for name, slow in moved[None].items():  # B starts at zero: its value is its first step
        torch.testing.assert_close(moved[8.0][name], 8 * slow, rtol=1e-5, atol=1e-8)
        assert slow.abs().max() > 0
    rates = [group["lr"] for group in found.optimizer.param_groups if group["params"]]
    assert sorted(rates) == [0.01, 0.08]


def test_lora_plus_resumes_with_its_groups(tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lora_plus_ratio": 4.0}
    options |= {"optim": "adamw_torch", "learning_rate": 0.01}
    whole = trainer(tmp_path, peft=LoraArguments(r=4), **options)
    whole.train()
    again = trainer(tmp_path, peft=LoraArguments(r=4), **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    left, right = whole.model.state_dict(), again.model.state_dict()  # type: ignore[union-attr]
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_lora_plus_without_b_matrices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^training\.lora_plus_ratio: there are no B matrices to train"):
        trainer(tmp_path, lora_plus_ratio=16.0).train()


def test_a_configuration_with_both_is_refused_before_any_model_loads(tmp_path: Path) -> None:
    from sft_toolkit import load_config

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n')
    path = tmp_path / "run.yaml"
    path.write_text(
        f"model: {{name_or_path: {tmp_path}}}\ndata: {{train: {tmp_path}/rows.jsonl}}\nlora: {{r: 4}}\n"
        f"training: {{output_dir: {tmp_path}/out, trainable: [lm_head*]}}\n"
    )
    with pytest.raises(ConfigError, match=r"training\.trainable: lora trains its adapter and nothing else"):
        load_config(path)
    with pytest.raises(ConfigError, match=r"training\.lora_plus_ratio: .* there is no section lora"):
        load_config(path, ["lora=null", "training.lora_plus_ratio=16"])
