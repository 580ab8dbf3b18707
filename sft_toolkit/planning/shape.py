"""What memory depends on in a model: how many parameters, how many are trained, how wide its layers are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sft_toolkit.model.source import in_plain_words, source_of

if TYPE_CHECKING:
    from torch import nn

    from sft_toolkit.args import LoraArguments, ModelArguments


@dataclass(frozen=True)
class ModelShape:
    """Counts of scalars. A mixture of experts has the widths of what one token passes through."""

    total: int
    trainable: int
    layers: int
    hidden: int
    intermediate: int
    kv_width: int
    vocabulary: int
    head_trained: int = 0  # scalars of the vocabulary projection, where it is trained
    tables: int = 0  # embedding and head, which quantisation leaves alone
    largest: int = 0  # parameters of the largest layer, which ZeRO-3 and FSDP hold whole at a time

    @property
    def frozen(self) -> int:
        """Parameters without gradient and optimizer state."""
        return self.total - self.trainable


def shape_from(model: ModelArguments, lora: LoraArguments | None) -> ModelShape:
    """The shape by the model's configuration alone: no weights are read, no tensor is allocated.

    Raises:
        ConfigError: there is no such model, or the adapter does not fit it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    source = source_of(model)
    with in_plain_words(model, "model"):
        config = AutoConfig.from_pretrained(source.pop("pretrained_model_name_or_path"), **source)
    with torch.device("meta"):
        create: Any = AutoModelForCausalLM.from_config
        built = create(config, trust_remote_code=model.trust_remote_code)
        if lora is not None:
            built = _with_adapter(built, lora)
    return shape_of(built)


def _with_adapter(model: Any, lora: LoraArguments) -> Any:
    from peft import PeftConfig, get_peft_model

    from sft_toolkit.lora.config import to_peft

    config: Any = PeftConfig.from_pretrained(lora.adapter) if lora.adapter else to_peft(lora, model)
    if hasattr(config, "init_lora_weights"):
        config.init_lora_weights = True  # the sizes are those of any other start, which would read weights
    return get_peft_model(model, config)


def shape_of(model: nn.Module) -> ModelShape:
    """The shape of a model, also of one that ZeRO-3 has taken apart."""
    text = _text_config(model)
    hidden = _first(text, "hidden_size", "n_embd", "d_model", default=0)
    heads = max(1, _first(text, "num_attention_heads", "n_head", default=1))
    head_width = _first(text, "head_dim", default=hidden // heads)
    sizes = [(p, int(getattr(p, "ds_numel", p.numel()))) for p in model.parameters()]
    head = getattr(model, "get_output_embeddings", lambda: None)()
    return ModelShape(
        total=sum(size for _, size in sizes),
        trainable=sum(size for p, size in sizes if p.requires_grad),
        layers=_first(text, "num_hidden_layers", "n_layer", default=1),
        hidden=hidden,
        intermediate=_intermediate(text, hidden),
        kv_width=_first(text, "num_key_value_heads", default=heads) * head_width,
        vocabulary=_first(text, "vocab_size", default=0),
        head_trained=sum(int(getattr(p, "ds_numel", p.numel())) for p in _trained(head)),
        tables=_tables(model),
        largest=max((_size(child) for child in _layers(model)), default=0),
    )


def _tables(model: Any) -> int:
    """Scalars of embedding and head; a weight that both share counts once."""
    ends: list[Any] = [
        getattr(model, name, lambda: None)() for name in ("get_input_embeddings", "get_output_embeddings")
    ]
    weights = {id(end.weight): end.weight for end in ends if getattr(end, "weight", None) is not None}
    return sum(int(getattr(weight, "ds_numel", weight.numel())) for weight in weights.values())


def _intermediate(text: Any, hidden: int) -> int:
    dense = _first(text, "intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    experts = _first(text, "num_experts_per_tok", default=0)
    return experts * _first(text, "moe_intermediate_size", default=dense) if experts else dense


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first(config: Any, *names: str, default: int) -> int:
    return next((int(found) for name in names if (found := getattr(config, name, None)) is not None), default)


def _trained(module: Any) -> list[Any]:
    return [] if module is None else [p for p in module.parameters() if p.requires_grad]


def _layers(model: nn.Module) -> list[Any]:
    """The repeated blocks: children of every `ModuleList`, and the tables at both ends."""
    lists = [m for m in model.modules() if type(m).__name__ == "ModuleList"]
    tables = [m for m in model.modules() if type(m).__name__ == "Embedding"]
    return [*(child for several in lists for child in several.children()), *tables]


def _size(module: nn.Module) -> int:
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in module.parameters())
