"""Tokenizer and base model, loaded as training needs them: dtype, attention, pad and end tokens, GGUF.

Three steps, in this order: `load_tokenizer`, `load_model`, `align` (make the two agree on ids).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from sft_toolkit.args import ModelArguments
from sft_toolkit.errors import ConfigError
from sft_toolkit.hints import missing
from sft_toolkit.model.gguf import forget_gguf, unpacked
from sft_toolkit.model.source import in_plain_words, source_of

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
FLOAT16_IN_FULL = (
    "model.dtype: float16 weights can't be trained in full; use model.dtype: auto (weights in fp32) with "
    "training.precision: fp16"
)
OF_PRECISION = {"fp32": torch.float32, "no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


# ---------------------------------------------------------------- tokenizer


def load_tokenizer(model: ModelArguments) -> PreTrainedTokenizerBase:
    """The model's tokenizer, with the chat template of `model.chat_template` and a pad token.

    A missing pad token becomes the end token: padding is masked by its length, never by its id, so a real end token
    stays supervised.

    Raises:
        ConfigError: no such model, no tokenizer in it, or a template file that is missing or no Jinja.
    """
    source = source_of(model)
    with in_plain_words(model, "tokenizer"):
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**source)
    if model.chat_template:
        tokenizer.chat_template = _read_template(model.chat_template)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = _stand_in_for_pad(tokenizer)
        logger.info(
            "the tokenizer has no pad token: '%s' is used, and padding is masked by its length", tokenizer.pad_token
        )
    return tokenizer


def _read_template(name: str) -> str:
    path = Path(name).expanduser()
    if not path.is_file():
        raise ConfigError(
            f"model.chat_template: '{name}' is a folder"
            if path.is_dir()
            else f"model.chat_template: '{name}': {missing(name)}"
        )
    text = path.read_text(encoding="utf-8")
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols", _GenerationTag]).parse(text)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"model.chat_template: {name}:{error.lineno}: {error.message}") from error
    return text


class _GenerationTag(jinja2.ext.Extension):
    """Lets `{% generation %} ... {% endgeneration %}`, which transformers defines, pass the syntax check."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _stand_in_for_pad(tokenizer: PreTrainedTokenizerBase) -> str:
    for token in (tokenizer.eos_token, tokenizer.unk_token, tokenizer.bos_token):
        if token is not None:
            return str(token)
    return str(tokenizer.convert_ids_to_tokens(0))


# ---------------------------------------------------------------- weights


def load_model(model: ModelArguments, *, trains_all_weights: bool, precision: str, packing: bool) -> PreTrainedModel:
    """The base model, in eval mode, its weights in the dtype of `weights_dtype`.

    Args:
        trains_all_weights: full fine-tuning; False where only an adapter is trained.
        precision: fp32 (also spelled "no"), bf16 or fp16: what the training computes in.
        packing: rows will hold several documents; refused for layers that carry a state across them.

    Raises:
        ConfigError: no such model, damaged weights, an attention that is not installed, quantised weights that are
            to be trained in full, or a dtype that can't be trained.
    """
    source = source_of(model)
    dtype = weights_dtype(model, trains_all_weights=trains_all_weights, precision=precision)
    if model.attn_implementation != "auto":
        source["attn_implementation"] = model.attn_implementation
    if model.quantize:
        source["quantization_config"] = _quantisation(model, dtype, trains_all_weights)
    with in_plain_words(model, "model"):
        if model.gguf_file:
            source |= unpacked()
        result: Any = AutoModelForCausalLM.from_pretrained(**source, dtype=dtype, output_loading_info=True)
    loaded, found = result
    if model.gguf_file:
        forget_gguf(loaded, source["pretrained_model_name_or_path"])
    _say_what_is_random(found)
    if trains_all_weights and getattr(loaded, "hf_quantizer", None) is not None:
        raise ConfigError(
            f"model.name_or_path: the weights of '{model.name_or_path}' are quantised and can't be trained in full: "
            "add a lora section, or give the model in its original precision"
        )
    if packing and getattr(loaded, "_is_stateful", False):
        raise ConfigError(
            f"data.packing: {type(loaded).__name__} carries a state from token to token, so the documents of a packed "
            "row would see one another: set data.packing: false"
        )
    return loaded  # type: ignore[no-any-return]


def _quantisation(model: ModelArguments, dtype: torch.dtype, trains_all_weights: bool) -> Any:
    """What `from_pretrained` takes; computing is in `dtype`, and nf4 quantises its scales too (QLoRA)."""
    problems = quantisation_problems(model, trains_all_weights)
    if problems:
        raise ConfigError(problems)
    from transformers import BitsAndBytesConfig

    make: Any = BitsAndBytesConfig  # untyped
    if model.quantize == "int8":
        return make(load_in_8bit=True)
    return make(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def quantisation_problems(model: ModelArguments, trains_all_weights: bool) -> list[str]:
    """Why `model.quantize` can't be met, known before any weight is read."""
    key, reasons = f"model.quantize: {model.quantize}", {}
    reasons["needs bitsandbytes: pip install 'sft-toolkit[bitsandbytes]'"] = find_spec("bitsandbytes") is None
    reasons["quantised weights can't be trained in full: add a lora section"] = trains_all_weights
    reasons["a GGUF is quantised already, and unpacked to train: leave the key out"] = model.gguf_file is not None
    return [f"{key}: {reason}" for reason, holds in reasons.items() if model.quantize and holds]


def weights_dtype(model: ModelArguments, *, trains_all_weights: bool, precision: str) -> torch.dtype:
    """The dtype of the loaded weights.

    Trained weights stay in fp32 whatever the checkpoint was saved in: one step of lr 1e-5 is smaller than the gap
    between neighbouring bf16 numbers, and would be rounded away. A frozen base needs no more than what training
    computes in.

    Raises:
        ConfigError: fp16 weights that are to be trained (their gradients can't be unscaled).
    """
    if model.dtype == "auto":
        return torch.float32 if trains_all_weights else OF_PRECISION[precision]
    dtype = DTYPES[model.dtype]
    if trains_all_weights and dtype is torch.float16:
        raise ConfigError(FLOAT16_IN_FULL)
    if trains_all_weights and dtype is torch.bfloat16:
        logger.warning("model.dtype bfloat16: weights are kept and updated in bf16 as asked; small updates are lost")
    return dtype


def _say_what_is_random(found: dict[str, Any]) -> None:
    absent = sorted(found["missing_keys"])
    if absent:
        logger.warning(
            "%d weights are not in the checkpoint and start from random values: %s", len(absent), ", ".join(absent[:5])
        )


# ---------------------------------------------------------------- ids that both agree on


def table_rows(model: Any) -> int:
    """Rows of the input embedding, also where ZeRO-3 has taken it apart."""
    weight = model.get_input_embeddings().weight
    return int(getattr(weight, "ds_shape", weight.shape)[0])


def new_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Ids of the tokenizer that the embedding has no row for yet; ask before `align`, which adds the rows."""
    return list(range(table_rows(model), len(tokenizer)))


def align(model: Any, tokenizer: PreTrainedTokenizerBase, end_of_turn_id: int | None) -> list[str]:
    """Give model and generation config the tokenizer's ids, and the embedding a row for each of them.

    Args:
        end_of_turn_id: the id that closes assistant turns; generation stops at it, at the tokenizer's end token, and
            at every end id the model came with.

    Returns:
        What was changed, a sentence each.
    """
    notes = _resize(model, tokenizer)
    config = model.config.get_text_config()
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        wanted, held = getattr(tokenizer, name), _as_list(getattr(config, name, None))
        if wanted is not None and wanted not in held:
            setattr(config, name, [wanted, *held] if len(held) > 1 else wanted)
            notes.append(f"{name} is {wanted} ('{tokenizer.convert_ids_to_tokens(wanted)}'), as the tokenizer says")
    generation = getattr(model, "generation_config", None)
    if generation is None:
        return notes
    generation.pad_token_id = tokenizer.pad_token_id
    if tokenizer.bos_token_id is not None:
        generation.bos_token_id = tokenizer.bos_token_id
    before = _as_list(generation.eos_token_id)
    ends = list(dict.fromkeys(i for i in (tokenizer.eos_token_id, end_of_turn_id, *before) if i is not None))
    if set(ends) != set(before):
        names = ", ".join(f"'{tokenizer.convert_ids_to_tokens(i)}' ({i})" for i in ends)
        notes.append(f"generation stops at {names}")
    generation._from_model_config = False  # it says more than the model's config from here on
    if ends:
        generation.eos_token_id = ends if len(ends) > 1 else ends[0]
    return notes + _make_savable(generation)


def _resize(model: Any, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    rows, wanted = table_rows(model), len(tokenizer)
    if wanted <= rows:
        return []
    model.resize_token_embeddings(wanted)
    return [
        f"the embedding grew from {rows} to {wanted} rows for new tokens, which start random and have to be trained"
    ]


def _as_list(ids: int | Iterable[int] | None) -> list[int]:
    if ids is None:
        return []
    return [ids] if isinstance(ids, int) else list(ids)


def _make_savable(generation: Any) -> list[str]:
    """Many published configs set a temperature without sampling; once changed, transformers refuses to save them."""
    try:
        generation.validate(strict=True)
        return []
    except ValueError:
        generation.do_sample = True
    try:
        generation.validate(strict=True)
    except ValueError as error:
        raise ConfigError(f"the model's generation_config.json contradicts itself, mend it first: {error}") from error
    return ["generation config: do_sample is on, as its sampling values ask for"]
