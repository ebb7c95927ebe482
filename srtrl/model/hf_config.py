"""Hugging Face configs in: `transformers` reads them, in the layout of its version 5 and in older ones.

What srtrl's transformer computes becomes a `ModelConfig`, everything else is refused by name. The configs of
`transformers` take two seconds to import; a plain Llama's, such as that of the bundled policy, is read without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from srtrl.model.transformer import ModelConfig, ModelType, RopeConfig
from srtrl.resolve import Caught

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0,),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
"""Fields, and the values of each that are supported."""
_ROPE_FIELDS = {field.name for field in fields(RopeConfig)}


def config_from_hf(hf_config: Mapping[str, Any], source: str = "the model's config") -> ModelConfig:
    """Shape of the model that `hf_config` (a parsed `config.json`) describes.

    Args:
        hf_config: Fields of the config; kept in the result for `save_model`.
        source: The config's name in error messages; its file where it came from one.

    Raises:
        ValueError: A field is not valid for `transformers`, or asks for something that is not supported; the message
            names `source`, the field and its value.
    """
    model_type: Any = hf_config.get("model_type")
    if model_type not in get_args(ModelType):
        raise ValueError(f"{source}: model_type is {model_type!r}; supported: {', '.join(get_args(ModelType))}")
    if (plain := _read_plain(hf_config)) is not None:
        return plain
    from transformers import AutoConfig

    with Caught() as caught:
        config = AutoConfig.for_model(**deepcopy(dict(hf_config)))
    if caught.error is not None:
        reason = " ".join(str(caught.error).split())
        raise ValueError(f"{source}: transformers cannot read this config: {reason}") from caught.error
    rope = {name: value for name, value in config.rope_parameters.items() if name != "type" and value is not None}
    _refuse(config, rope, source)
    is_qwen2 = model_type == "qwen2"
    attention_bias = not is_qwen2 and config.attention_bias
    return ModelConfig(
        model_type=model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_hidden_layers,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        max_position_embeddings=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        rope=RopeConfig(**{name: value for name, value in rope.items() if name in _ROPE_FIELDS}),
        tie_word_embeddings=config.tie_word_embeddings,
        qkv_bias=is_qwen2 or attention_bias,
        output_bias=attention_bias,
        mlp_bias=getattr(config, "mlp_bias", False),
        qk_norm=model_type == "qwen3",
        hf_config=dict(hf_config),
    )


class _PlainLlama(BaseModel):
    """A config that leaves nothing to interpret: no other fields than these, of these types."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model_type: Literal["llama"]
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    max_position_embeddings: PositiveInt
    rms_norm_eps: PositiveFloat
    rope_theta: PositiveFloat = 10_000.0
    tie_word_embeddings: bool
    # Of no effect here.
    architectures: list[str] | None = None
    bos_token_id: int | None = None
    dtype: str | None = None
    eos_token_id: int | None = None
    hidden_act: Literal["silu"] = "silu"
    pad_token_id: int | None = None


def _read_plain(hf_config: Mapping[str, Any]) -> ModelConfig | None:
    """The shape of a plain Llama; None where `transformers` has to read the config."""
    try:
        config = _PlainLlama.model_validate(dict(hf_config))
    except ValidationError:
        return None
    head_dim, rest = divmod(config.hidden_size, config.num_attention_heads)
    if rest or head_dim % 2 or config.num_attention_heads % config.num_key_value_heads:
        return None
    return ModelConfig(
        **config.model_dump(include=set(_PlainLlama.model_fields) & {field.name for field in fields(ModelConfig)}),
        head_dim=head_dim,
        rope=RopeConfig(rope_theta=config.rope_theta),
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        hf_config=dict(hf_config),
    )


def _refuse(config: PreTrainedConfig, rope: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError for the first field that asks for something else than the transformer computes."""
    fields = {name: getattr(config, name, None) for name in ("auto_map", "layer_types", *_PLAIN)}
    layer_types = fields["layer_types"] or ()
    rope_is_supported = (
        rope["rope_type"] in ("default", "linear", "llama3")
        and rope.get("partial_rotary_factor", 1.0) == 1
        and set(rope) <= _ROPE_FIELDS | {"partial_rotary_factor"}
    )
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, value, is_supported, supported in (
        *((name, fields[name], fields[name] in values, values[0]) for name, values in _PLAIN.items()),
        ("layer_types", layer_types, set(layer_types) <= {"full_attention"}, "full_attention"),
        ("auto_map", fields["auto_map"], "AutoModelForCausalLM" not in (fields["auto_map"] or ()), "no own code"),
        ("num_key_value_heads", num_kv_heads, num_heads % num_kv_heads == 0, f"divisors of {num_heads} heads"),
        ("rope_parameters", rope, rope_is_supported, "rope_type default, linear or llama3, for the whole head"),
    ):
        if not is_supported:
            raise ValueError(f"{source}: {name} is {value!r}; supported: {supported}")
