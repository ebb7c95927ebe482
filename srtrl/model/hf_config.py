"""Hugging Face configs in: `transformers` reads them, in the layout of its version 5 and in older ones.

What srtrl's transformer computes becomes a `ModelConfig`, everything else is refused by name. The configs of
`transformers` take two seconds to import; a plain Llama's, such as that of the bundled policy, is read without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields
from typing import TYPE_CHECKING, Any, get_args

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
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), 2**20),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**10),
    "max_position_embeddings": 2**31 - 1,
}
"""Integers from 1, and the largest value of each: far above any model, far below what hangs."""
_PLAIN_LLAMA = {*_SIZES, "model_type", "rms_norm_eps", "tie_word_embeddings"} - {"head_dim"}
"""Fields that a plain Llama must have."""
_WITHOUT_EFFECT = {"architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id"}
_ROPE_FIELDS = {field.name for field in fields(RopeConfig)}
_SCALES = _ROPE_FIELDS - {"rope_type"} | {"rms_norm_eps", "partial_rotary_factor"}
"""Numbers from 1e-12 to 1e12; the norms' epsilon to 1."""


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
    _check_numbers(hf_config, source)
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


def _check_numbers(given: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError for the first number that is of another type or out of range; null is left to others."""
    for name, value in given.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            _check_numbers(value, f"{source}: {name}")
        is_size = name in _SIZES
        low, high = (1, _SIZES[name]) if is_size else (1e-12, 1 if name == "rms_norm_eps" else 1e12)
        is_number = type(value) is int or (type(value) is float and not is_size)
        is_read = (is_size or name in _SCALES) and (value is not None or name == "rope_theta")
        if is_read and not (is_number and low <= value <= high):
            kind = "an integer" if is_size else "a number"
            raise ValueError(f"{source}: {name} is {value!r:.80}; expected {kind} from {low:,} to {high:,}")


def _read_plain(hf_config: Mapping[str, Any]) -> ModelConfig | None:
    """The shape of a plain Llama; None where `transformers` has to read the config."""
    optional: dict[str, Any] = {"rope_theta": 10_000.0, "hidden_act": "silu"}
    given = optional | {name: value for name, value in hf_config.items() if name not in _WITHOUT_EFFECT}
    if (
        given.keys() - optional != _PLAIN_LLAMA
        or None in given.values()
        or (given["model_type"], given.pop("hidden_act"), type(given["tie_word_embeddings"])) != ("llama", "silu", bool)
    ):
        return None
    head_dim, rest = divmod(given["hidden_size"], given["num_attention_heads"])
    if rest or head_dim % 2 or given["num_attention_heads"] % given["num_key_value_heads"]:
        return None
    return ModelConfig(
        rope=RopeConfig(rope_theta=given.pop("rope_theta")),
        **given,
        head_dim=head_dim,
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
        ("auto_map", fields["auto_map"], "AutoModelForCausalLM" not in str(fields["auto_map"]), "no own code"),
        ("num_key_value_heads", num_kv_heads, num_heads % num_kv_heads == 0, f"divisors of {num_heads} heads"),
        ("rope_parameters", rope, rope_is_supported, "rope_type default, linear or llama3, for the whole head"),
    ):
        if not is_supported:
            raise ValueError(f"{source}: {name} is {value!r}; supported: {supported}")
