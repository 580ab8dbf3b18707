"""Gradients may be changed between unscaling and clipping, and at no other place."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Trainer

from sft_toolkit import ConfigError, SFTTrainer, load_config
from sft_toolkit.registry import register
from sft_toolkit.training.gradient_transforms import ClipEach, Freeze, Noise
from sft_toolkit.training.gradients import gradient_transform_of
from tests.tiny import tiny_model, tiny_tokenizer
from tests.training import largest_difference, logged, rows_with_labels, sgd_arguments, trained

ROWS = rows_with_labels(1, 15, 3, 25)
SEEN: list[tuple[int, float, list[int]]] = []


@register("gradient_transform", "tests_scale")
def scale(parameters: Any, step: int, rng: torch.Generator, by: float = 1.0) -> None:
    """Of a user."""
    norm = float(torch.stack([parameter.grad.norm() for parameter in parameters.values()]).norm())
    SEEN.append((step, norm, torch.randint(1000, (2,), generator=rng).tolist()))
    for parameter in parameters.values():
        parameter.grad.mul_(by)


def test_trainers_private_methods_are_those_that_are_overridden() -> None:
    assert list(inspect.signature(Trainer._clip_grad_norm).parameters) == ["self", "model"]
    assert list(inspect.signature(Trainer._get_grad_norm).parameters) == ["self", "model", "grad_norm"]
    source = inspect.getsource(Trainer._run_epoch)
    clip, norm, event, step = (
        source.index(call)
        for call in ("self._clip_grad_norm(model)", "self._get_grad_norm(model", "on_pre_optimizer", "optimizer.step()")
    )
    assert clip < norm < event < step


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.25])
def test_it_sees_the_whole_gradient_once_per_update_and_before_clipping(tmp_path: Path, max_grad_norm: float) -> None:
    SEEN.clear()
    settings: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.1, "max_grad_norm": max_grad_norm}
    plain = trained(tmp_path, ROWS, **settings, per_device_train_batch_size=2)
    split: dict[str, Any] = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    seen = trained(tmp_path, ROWS, **settings, **split, gradient_transform="tests_scale")
    assert largest_difference(plain, seen) < 1e-6
    assert [step for step, _, _ in SEEN] == [0, 1]
    assert [norm for _, norm, _ in SEEN] == pytest.approx(logged(plain, "grad_norm"), rel=1e-5)
    doubled = trained(tmp_path, ROWS, **settings, **split, gradient_transform={"tests_scale": {"by": 2.0}})
    first = logged(plain, "grad_norm")[0]
    assert logged(doubled, "grad_norm")[0] == pytest.approx(2 * first, rel=1e-5)
    if max_grad_norm:  # clipped to the same length afterwards
        assert largest_difference(plain, doubled) < 1e-5
    assert SEEN[0][2] != SEEN[1][2]
    assert SEEN[0][2] == SEEN[2][2]  # the same draw for the same seed and step


def test_without_one_the_methods_are_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SFTTrainer, "_transform", lambda *_: pytest.fail("called"))
    trained(tmp_path, ROWS, per_device_train_batch_size=4, max_grad_norm=1.0)


def with_gradients(**gradients: list[float]) -> dict[str, nn.Parameter]:
    made = {name: nn.Parameter(torch.zeros(len(values))) for name, values in gradients.items()}
    for name, values in gradients.items():
        made[name].grad = torch.tensor(values)
    return made


def grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def test_each_is_clipped_by_its_own_norm() -> None:
    parameters = with_gradients(spike=[30.0, 40.0], calm=[0.3, 0.4])
    ClipEach(max_norm=1.0)(parameters, 0, torch.Generator())
    torch.testing.assert_close(grad(parameters["spike"]), torch.tensor([0.6, 0.8]))
    torch.testing.assert_close(grad(parameters["calm"]), torch.tensor([0.3, 0.4]))


def test_noise_has_the_variance_of_its_schedule() -> None:
    parameters = with_gradients(a=[0.0] * 20_000)
    Noise(eta=0.04, gamma=1.0)(parameters, 3, torch.Generator().manual_seed(0))
    assert float(grad(parameters["a"]).std()) == pytest.approx(0.1, rel=0.02)


def test_what_is_frozen_does_not_move_until_its_time(tmp_path: Path) -> None:
    frozen = {"freeze": {"patterns": ["model.embed_tokens.*"], "until": 1}}
    weights = []
    for steps in (1, 2):
        trainer = trained(
            tmp_path, ROWS, optim="adamw_torch", weight_decay=0.1, max_steps=steps, gradient_transform=frozen
        )
        weights.append(dict(trainer.model.named_parameters()))  # type: ignore[union-attr]
    start = dict(tiny_model().named_parameters())
    assert torch.equal(weights[0]["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    assert not torch.equal(weights[0]["lm_head.weight"], start["lm_head.weight"])
    assert not torch.equal(weights[1]["model.embed_tokens.weight"], start["model.embed_tokens.weight"])
    parameters = with_gradients(a=[1.0])
    Freeze(["a"], until=1)(parameters, 1, torch.Generator())
    assert grad(parameters["a"]).tolist() == [1.0]


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("clip_eech", "unknown gradient_transform 'clip_eech'; did you mean 'clip_each'"),
        ({"clip_each": {"norm": 1}}, "unknown option 'norm'"),
        ({"clip_each": {}}, "missing option 'max_norm'"),
        ({"clip_each": {"max_norm": 0}}, "max_norm: 0 must be above 0"),
        ({"tests_scale": {"buy": 2}}, r"unknown option 'buy'"),
    ],
)
def test_what_cannot_be_meant_is_refused(named: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gradient_transform_of(named)


def test_engines_that_keep_their_gradients_are_refused_by_name(tmp_path: Path) -> None:
    trainer = SFTTrainer(tiny_model(), sgd_arguments(tmp_path), None, ROWS, None, tiny_tokenizer())
    trainer.is_deepspeed_enabled = True
    with pytest.raises(ConfigError, match="gradient_transform: DeepSpeed shards gradients and clips them itself"):
        trainer.use_gradient_transform("noise")


def test_a_configuration_names_it(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"messages": []}\n', encoding="utf-8")
    file = tmp_path / "run.yaml"
    text = (
        f"model: {{name_or_path: {tmp_path}}}\ndata: {{train: {tmp_path / 'rows.jsonl'}}}\n"
        f"training: {{output_dir: {tmp_path / 'out'}, gradient_transform: NAMED}}\n"
    )
    file.write_text(text.replace("NAMED", "{clip_each: {max_norm: 0.5}}"), encoding="utf-8")
    assert load_config(file).training["gradient_transform"] == {"clip_each": {"max_norm": 0.5}}
    for strategy in ("zero2", "fsdp"):
        with pytest.raises(ConfigError, match=f"can't reach the gradients of {strategy}"):
            load_config(file, [f"distributed.strategy={strategy}"])
    file.write_text(text.replace("NAMED", "nois"), encoding="utf-8")
    with pytest.raises(ConfigError, match="unknown gradient_transform 'nois'; did you mean 'noise'"):
        load_config(file)
