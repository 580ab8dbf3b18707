"""The loss: a sum over supervised tokens, divided once by those of the whole update.

What a training loop of one's own needs of it is named here; `examples/accelerate_loop` uses it.
"""

from sft_toolkit.loss.objectives import resolve_objective
from sft_toolkit.loss.reduction import IGNORE_INDEX, Totals, score
from sft_toolkit.loss.supervised import SupervisedForward

__all__ = ["IGNORE_INDEX", "SupervisedForward", "Totals", "resolve_objective", "score"]
