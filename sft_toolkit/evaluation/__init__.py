"""Held-out answers: generated, compared with the reference, scored. Imported on first use."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sft_toolkit.evaluation.generate import generate_answers as generate_answers
    from sft_toolkit.evaluation.generate import prompt_and_reference as prompt_and_reference
    from sft_toolkit.evaluation.metrics import compute as compute
    from sft_toolkit.evaluation.score import ScoredAnswers as ScoredAnswers

_HOME = {
    "ScoredAnswers": "score",
    "compute": "metrics",
    "generate_answers": "generate",
    "prompt_and_reference": "generate",
}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
