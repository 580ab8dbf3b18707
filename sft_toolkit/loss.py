"""The loss: the sum of cross-entropy over supervised tokens. Pure tensor functions, nothing of ours imported.

A sum, never a mean: only a sum can be divided once by the supervised tokens of the whole update, so that micro-batches,
accumulation and ranks do not change the number that is optimised.
"""

from __future__ import annotations

import sys
from typing import Any, cast

from torch import Tensor, nn

IGNORE_INDEX = -100


def next_token_targets(labels: Tensor) -> Tensor:
    """Targets aligned with logits: position t is answered by the label at t + 1.

    Args:
        labels: int64 `(batch, length)`; -100 is not supervised.

    Returns:
        int64 `(batch, length)`; the last column is -100, since nothing follows it.
    """
    return nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORE_INDEX)


def sum_of_nll(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum of negative log-likelihood over the targets that are not -100.

    Args:
        logits: any float dtype, `(tokens, vocabulary)`. Upcast to fp32 here: in bf16 the sum over a 49k vocabulary is
            off in the second digit.
        targets: int64 `(tokens,)`.
        label_smoothing: share of the target mass spread over the vocabulary, as in `nn.functional.cross_entropy`.

    Returns:
        fp32 scalar with a graph; 0.0 where no target is supervised (a rank may hold such a micro-batch, and it must
        still take part in the backward collectives).
    """
    return nn.functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORE_INDEX, reduction="sum", label_smoothing=label_smoothing
    )


def projects_only_kept(model: nn.Module) -> bool:
    """Whether `model.forward(logits_to_keep=<bool mask (batch, length)>)` projects just those hidden states.

    Read off the model's module: architectures of transformers that take a mask import `slice_logits_to_keep` for it
    (252 of 255 in 5.24). Others, and code loaded from a hub, get all logits: slower, never wrong.
    """
    adapter = getattr(model, "active_peft_config", None)
    if getattr(adapter, "is_prompt_learning", False):  # its virtual tokens shift every position
        return False
    base = model.get_base_model() if adapter is not None else model  # type: ignore[operator]
    return hasattr(sys.modules.get(type(base).__module__), "slice_logits_to_keep")


def supervised_logits(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Flat logits and targets of the supervised positions, whichever of the two layouts the model returned.

    Args:
        logits: `(supervised, vocabulary)` where only those were projected, else `(batch, length, vocabulary)`.
        targets: int64 `(batch, length)`, from `next_token_targets`.

    Returns:
        `(supervised, vocabulary)` and int64 `(supervised,)`.
    """
    kept = targets != IGNORE_INDEX
    if logits.dim() == 3:
        logits = logits[:, -targets.shape[1] :][kept]  # prompt learning puts virtual tokens in front
    return logits, targets[kept]


def router_loss(outputs: Any, config: Any, supervised: Tensor) -> Tensor | float:
    """Load-balancing loss of a mixture-of-experts model, to be divided by the update's items like the NLL.

    The model adds it only where it computes its own loss. It is a mean per micro-batch, so it is weighted here by the
    micro-batch's supervised tokens; 0.0 for other models, or where the config asks for no router logits.
    """
    auxiliary = getattr(outputs, "aux_loss", None)
    if auxiliary is None:
        return 0.0
    return cast(Tensor, auxiliary * getattr(config, "router_aux_loss_coef", 0.0) * supervised)
