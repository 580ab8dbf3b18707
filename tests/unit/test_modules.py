"""What lies inside a model's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
from peft import LoraConfig, get_peft_model

from sft_toolkit.model.modules import vocabulary_rows
from tests.tiny import tiny_model


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj"]},
        {"target_modules": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
        {"target_modules": ["q_proj"], "trainable_token_indices": [5]},
    ],
)
def test_the_rows_of_the_embedding_in_every_wrapper(options: dict[str, Any]) -> None:
    assert vocabulary_rows(tiny_model()) == 261
    assert vocabulary_rows(get_peft_model(tiny_model(), LoraConfig(**options))) == 261
