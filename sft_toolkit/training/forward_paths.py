"""How a trainer runs its model: what is optimised, which logits are computed, how packed rows attend."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import TrainerCallback

from sft_toolkit.attention.isolation import refuse_leaking
from sft_toolkit.attention.packed import PackedAttention
from sft_toolkit.data.token_dataset import PackedDataset
from sft_toolkit.errors import ConfigError
from sft_toolkit.loss.objectives import resolve_objective
from sft_toolkit.loss.reduction import Totals, router_loss
from sft_toolkit.loss.supervised import SupervisedForward, head_of

if TYPE_CHECKING:
    from sft_toolkit.trainer import SFTTrainer


class ForwardPaths(TrainerCallback):
    """Proves on the model itself, before the first step, which of the fast ways it may take.

    The first callback of a trainer: by the time others look, what was found stands in `facts`.

    Raises:
        ConfigError: an unknown `loss`, or one that would be ignored.
    """

    def __init__(self, trainer: SFTTrainer, args: Any, own_loss: bool) -> None:
        self.trainer = trainer
        named = getattr(args, "loss", "nll") or "nll"
        self.name: str = named if isinstance(named, str) else next(iter(named))
        self.objective = resolve_objective(named, getattr(args, "label_smoothing_factor", 0.0))
        if self.name != "nll" and not own_loss:
            raise ConfigError(
                f"loss: '{self.name}' would be ignored: it takes token rows with labels and no compute_loss_func"
            )
        self.attention = PackedAttention(getattr(args, "packed_attention", "auto") == "auto")
        self._supervised: SupervisedForward | None = None
        self._unwrapped: tuple[Any, Any] = (None, None)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All ranks: under ZeRO-3 the few short forwards of the proofs are collective."""
        wrapped, model = self.trainer.model_wrapped, self.trainer.base_model()
        if isinstance(self.trainer.train_dataset, PackedDataset):
            self.attention.switch_on(wrapped, model, _in_half(args, model))
            refuse_leaking(wrapped, model)
        if not self._why_no_chunks():
            self.supervised.try_chunks(wrapped)

    def part_of_update(self, totals: Totals, outputs: Any, items: Tensor | int | None) -> Tensor:
        """What a micro-batch adds to the loss of its update, and to the meter.

        Args:
            items: what the losses of the update are divided by, over all ranks; None: of this micro-batch.
        """
        trainer = self.trainer
        divisor = torch.as_tensor(totals.weight if items is None else items, device=totals.loss.device)
        divisor = torch.where(divisor > 0, divisor, 1)
        if trainer.args.average_tokens_across_devices and items is not None:
            # DDP and ZeRO average gradients over ranks; a sum divided by all ranks' items must be averaged back.
            divisor = divisor / (trainer.accelerator.num_processes // trainer.get_tp_size())
        router = router_loss(outputs, trainer.base_model().config, totals.weight)
        plain = self.objective is None and not torch.is_tensor(router)
        trainer.token_meter.add(trainer.state.global_step, totals, None if plain else totals.nll / divisor)
        return (totals.loss + router) / divisor

    def unwrapped(self) -> Any:
        """The model without the engine's wrappers; kept, since accelerate reads package metadata to tell (0.65 ms)."""
        if self._unwrapped[0] is not self.trainer.model:
            self._unwrapped = self.trainer.model, self.trainer.accelerator.unwrap_model(self.trainer.model)
        return self._unwrapped[1]

    @property
    def supervised(self) -> SupervisedForward:
        """The forward of the model that is trained now; `model_init` makes a new one for each training."""
        model = self.unwrapped()
        if self._supervised is None or self._supervised.model is not model:
            args = self.trainer.args
            chunk, entropy = getattr(args, "loss_chunk", None), getattr(args, "log_entropy", False)
            self._supervised = SupervisedForward(model, not args.use_liger_kernel, chunk, entropy)
        return self._supervised

    def evaluating(self, dataset: Any) -> AbstractContextManager[None]:
        """Attention per document on packed held-out rows; before a training, only where no engine wraps the model."""
        trainer = self.trainer
        wrapped: Any = trainer.model_wrapped if trainer.is_in_train else trainer.model
        engine = trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled
        if not isinstance(dataset, PackedDataset) or (engine and self.attention.proven is None):
            return nullcontext()
        model = trainer.base_model()
        return self.attention.switched_on(wrapped, model, _in_half(trainer.args, model))

    def facts(self) -> dict[str, str]:
        """For `run.json`, once training has begun."""
        facts = {"objective": self.name, "loss_path": self.supervised.path, "packed_attention": self.attention.path}
        reason = self._why_no_chunks()
        return facts | ({"loss_not_chunked": reason} if reason else {})

    def _why_no_chunks(self) -> str | None:
        """What speaks against the chunked path before the model is even asked."""
        args, accelerator = self.trainer.args, self.trainer.accelerator
        plugin = accelerator.state.deepspeed_plugin
        zero3 = plugin is not None and plugin.zero_stage == 3
        reasons = {
            "liger kernels have a loss of their own": args.use_liger_kernel,
            "torch.compile would compile anew for each hook": args.torch_compile,
            "fp16 scales its gradients only in the backward": args.fp16,
            "FSDP shards the head": self.trainer.is_fsdp_enabled,
            "tensor parallelism shards the head": self.trainer.get_tp_size() > 1,
            "ZeRO-3 would gather an adapter on the head inside a chunk": zero3 and _has_parts(self.supervised.model),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)


def _in_half(args: Any, model: nn.Module) -> bool:
    return bool(args.bf16 or args.fp16 or getattr(model, "dtype", None) in (torch.bfloat16, torch.float16))


def _has_parts(model: nn.Module) -> bool:
    """Whether the head is more than one layer: an adapter's, whose parts ZeRO-3 gathers one by one."""
    try:
        return any(True for _ in head_of(model).children())
    except (AttributeError, TypeError):
        return False
