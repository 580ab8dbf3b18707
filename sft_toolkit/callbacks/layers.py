"""What goes on inside: activations, gradients and updates of chosen layers, looked at every n steps."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from sft_toolkit.callbacks.files import in_output_dir, json_line, replace_file
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import did_you_mean

logger = logging.getLogger(__name__)

FILE_NAME, PICTURE = "layers.jsonl", "layers.png"
WRAPPERS = ("module.", "base_model.model.")
PARTS = (".base_layer", ".lora_", ".modules_to_save", ".original_module", ".token_adapter")
"""Parts of an adapted layer: the layer as a whole is what the model sees."""


class LayersCallback(TrainerCallback):
    """Writes `layers.jsonl`, a line per sampled step, and draws `layers.png` when training ends.

    A line holds `activations` {layer: root mean square of its output}, `gradients` {parameter: norm, as the optimizer
    gets it; under DeepSpeed that of this rank's last micro-batch}, `updates` {parameter: norm of its change over its
    own norm; about 1e-3 is usual}, and `first_nonfinite`: the first layer of the forward whose output holds a NaN or
    an infinity. A step after a loss that is not finite is sampled too. Names are those of the base model; an adapted
    layer is looked at with its adapter. Under ZeRO-3 updates are those of the rank's own shard.

    Hooks are on the model only during a sampled step, so that the others cost nothing.

    Args:
        every: steps between two samples; the first step is one.
        layers: patterns on module names; default: attention and MLP of each layer, and what has no parts.
        parameters: patterns on the names of trainable parameters.

    Raises:
        ConfigError: a pattern that matches nothing.
    """

    def __init__(self, every: int = 50, layers: Sequence[str] = ("*",), parameters: Sequence[str] = ("*",)) -> None:
        if every < 1:
            raise ConfigError(f"layers: every must be at least 1, but is {every}")
        self.every, self.layers, self.parameters = every, list(layers), list(parameters)
        self.samples: list[dict[str, Any]] = []
        self._modules: dict[str, nn.Module] = {}
        self._trained: dict[str, nn.Parameter] = {}
        self._hooks: list[RemovableHandle] = []
        self._due = False
        self._seen: dict[str, Tensor] = {}
        self._broken: dict[str, Tensor] = {}
        self._gradients: dict[str, Tensor] = {}
        self._before: dict[str, Tensor] = {}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        self._close()
        self._due, self.samples = False, []
        modules = {plain_name(name): m for name, m in model.named_modules() if name and _is_layer(name, m)}
        trained = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
        self._modules = _chosen(modules, self.layers, "layers.layers")
        self._trained = _chosen(trained, self.parameters, "layers.parameters")
        if state.is_world_process_zero and state.global_step == 0:
            replace_file(in_output_dir(args, FILE_NAME), b"")

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if not self._due and state.global_step % self.every:
            return
        self._due = True
        for name, module in self._modules.items():
            self._hooks.append(module.register_forward_hook(self._looks_at(name)))
        for name, parameter in self._trained.items():
            self._before[name] = _held(parameter).detach().clone()
            kept: Any = parameter  # untyped in torch
            self._hooks.append(kept.register_hook(self._keeps_norm_of(name)))

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        for name, parameter in self._trained.items() if self._hooks else ():
            if parameter.grad is not None:  # accumulated, reduced and clipped; engines keep theirs elsewhere
                self._gradients[name] = parameter.grad.detach().float().norm()

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if not self._due:
            return
        updates = {
            name: (_held(p).detach() - self._before[name]).float().norm()
            / _held(p).detach().float().norm().clamp_min(1e-30)
            for name, p in self._trained.items()
            if name in self._before
        }
        gradients = {name: self._gradients[name] for name in self._trained if name in self._gradients}
        broken = [name for name, bad in zip(self._broken, _numbers(self._broken), strict=True) if bad]
        sample = {
            "step": state.global_step,
            "activations": dict(zip(self._seen, _numbers(self._seen), strict=True)),
            "gradients": dict(zip(gradients, _numbers(gradients), strict=True)),
            "updates": dict(zip(updates, _numbers(updates), strict=True)),
            "first_nonfinite": broken[0] if broken else None,
        }
        self._close()
        self.samples.append(sample)
        if broken:
            logger.warning("step %d: the first layer whose output is not finite is %s", state.global_step, broken[0])
        if state.is_world_process_zero:
            with in_output_dir(args, FILE_NAME).open("ab") as file:
                file.write(json_line(sample))

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        loss = (logs or {}).get("loss", 0.0)
        self._due = self._due or not math.isfinite(float(loss))

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._close()
        if state.is_world_process_zero and self.samples:
            from sft_toolkit.callbacks.layers_picture import draw

            replace_file(in_output_dir(args, PICTURE), draw(self.samples), durable=False)

    def _looks_at(self, name: str) -> Any:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            tensor = next(_tensors(output), None)
            # The first micro-batch of the step; activation checkpointing runs the same forward once more.
            if tensor is not None and name not in self._seen:
                values = tensor.detach().float()
                self._seen[name] = values.square().mean().sqrt()
                self._broken[name] = (~torch.isfinite(values)).any()

        return look

    def _keeps_norm_of(self, name: str) -> Any:
        def keep(gradient: Tensor) -> None:
            self._gradients[name] = gradient.detach().float().norm()

        return keep

    def _close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._due = [], False
        self._seen, self._broken, self._gradients, self._before = {}, {}, {}, {}


def plain_name(name: str) -> str:
    """The name in the base model: without wrappers, and without peft's name of the adapter."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper)
    return name.replace(".default.", ".").removesuffix(".weight") if ".lora_" in name else name


def _is_layer(name: str, module: nn.Module) -> bool:
    name = f".{plain_name(name)}"
    if any(part in name for part in PARTS) or isinstance(module, nn.ModuleList | nn.ModuleDict):
        return False
    adapted = any(f".{child}".startswith(PARTS) for child, _ in module.named_children())
    return adapted or not any(True for _ in module.children()) or name.endswith(("attn", "attention", "mlp"))


def _chosen(named: dict[str, Any], patterns: Sequence[str], key: str) -> dict[str, Any]:
    vain = [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in named)]
    if vain:
        parts = {part for name in named for part in name.split(".") if not part.isdigit()}
        words = {pattern: pattern.strip("*.").rsplit(".", 1)[-1] for pattern in vain}
        raise ConfigError([f"{key}: '{p}' matches nothing{did_you_mean(words[p], parts)}" for p in vain])
    return {name: thing for name, thing in named.items() if any(fnmatchcase(name, p) for p in patterns)}


def _held(parameter: nn.Parameter) -> Tensor:
    """The weight, or under ZeRO-3 this rank's shard of it."""
    shard: Tensor | None = getattr(parameter, "ds_tensor", None)
    return parameter if shard is None else shard


def _tensors(output: Any) -> Iterator[Tensor]:
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)


def _numbers(scalars: Mapping[str, Tensor]) -> list[float]:
    """All at once: one synchronisation for a sample, not one for each layer."""
    return [float(v) for v in torch.stack([s.float() for s in scalars.values()]).tolist()] if scalars else []
