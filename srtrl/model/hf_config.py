"""Hugging Face configs in: what is supported becomes a `ModelConfig`, everything else is refused by name.

Reads the layout of transformers 5 (`rope_parameters`) and the older one (`rope_theta` and `rope_scaling`). Defaults of
absent fields are those of `transformers`' `configuration_llama.py`, `configuration_qwen2.py`, `configuration_qwen3.py`.
"""

import math
from collections.abc import Mapping
from typing import Any, NoReturn, cast, get_args

from srtrl.model.transformer import ModelConfig, ModelType, RopeConfig, RopeType

SUPPORTED_MODEL_TYPES = get_args(ModelType)
SUPPORTED_ROPE_TYPES = get_args(RopeType)
_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def config_from_hf(hf_config: Mapping[str, Any], source: str = "the model's config") -> ModelConfig:
    """Shape of the model that `hf_config` (a parsed `config.json`) describes.

    Args:
        hf_config: Fields of the config; kept in the result for `save_model`.
        source: What error messages call the config; its file where it came from one.

    Raises:
        ValueError: A field is missing or no valid number, or asks for something that is not supported; the message
            names the field, its value, `source` and what is supported.
    """
    reader = _Reader(hf_config, source)
    model_type = reader.choice("model_type", hf_config.get("model_type"), SUPPORTED_MODEL_TYPES)
    _refuse_unsupported(reader)
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count(
        "num_key_value_heads", default=num_heads if model_type == "llama" else None, null=num_heads
    )
    if num_heads % num_kv_heads != 0:
        reader.refuse("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads ({num_heads})")
    hidden_size = reader.count("hidden_size")
    quotient = hidden_size // num_heads
    head_dim = reader.count("head_dim", default=128 if model_type == "qwen3" else quotient, null=quotient)
    if head_dim % 2 != 0:
        reader.refuse("head_dim", head_dim, "an even number (rotary embeddings work on pairs)")
    max_positions = reader.count("max_position_embeddings", default=2048 if model_type == "llama" else 32768)
    attention_bias = model_type != "qwen2" and reader.flag("attention_bias")
    return ModelConfig(
        model_type=cast(ModelType, model_type),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_hidden_layers=reader.count("num_hidden_layers"),
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rms_norm_eps=reader.number("rms_norm_eps", hf_config.get("rms_norm_eps", 1e-6)),
        rope=_rope_config(reader, max_positions),
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
        qkv_bias=model_type == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=model_type == "llama" and reader.flag("mlp_bias"),
        qk_norm=model_type == "qwen3",
        hf_config=dict(hf_config),
    )


def _refuse_unsupported(reader: "_Reader") -> None:
    fields = reader.fields
    reader.choice("hidden_act", fields.get("hidden_act", "silu"), ("silu",))
    if fields.get("attention_dropout"):
        reader.refuse("attention_dropout", fields["attention_dropout"], "0")
    if reader.flag("use_sliding_window"):
        reader.refuse("use_sliding_window", True, "false (full attention in each layer)")
    layer_types = fields.get("layer_types") or []
    if set(layer_types) - {"full_attention"}:
        reader.refuse("layer_types", layer_types, "full_attention in each layer")
    for quantization in ("quantization_config", "compression_config"):
        if fields.get(quantization):
            reader.refuse(quantization, fields[quantization], "a checkpoint with unquantised weights")
    if "AutoModelForCausalLM" in (fields.get("auto_map") or {}):
        reader.refuse(
            "auto_map", fields["auto_map"], "the architecture of transformers itself, without code of its own"
        )


def _rope_config(reader: "_Reader", max_position_embeddings: int) -> RopeConfig:
    """Rotary embedding, from `rope_parameters` or from `rope_theta` and `rope_scaling`; the latter wins, as in HF."""
    fields = reader.fields
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    parameters = fields.get(name) or {}
    if not isinstance(parameters, Mapping):
        reader.refuse(name, parameters, "a mapping")
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    rope_type = reader.choice(f"{name}.rope_type", rope_type, SUPPORTED_ROPE_TYPES)
    partial = parameters.get("partial_rotary_factor", fields.get("partial_rotary_factor"))
    if partial not in (None, 1):
        reader.refuse("partial_rotary_factor", partial, "1 (the whole head is rotated)")
    wanted = _ROPE_FIELDS[rope_type]
    unknown = set(parameters) - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *wanted}
    for key in sorted(unknown):
        reader.refuse(
            f"{name}.{key}", parameters[key], f"for rope_type {rope_type} only {', '.join(wanted) or 'rope_theta'}"
        )
    scaling = dict(parameters)
    if "original_max_position_embeddings" in wanted:
        scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
        if "original_max_position_embeddings" in fields:  # transformers lets the top level win
            scaling["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    numbers = {key: reader.number(f"{name}.{key}", scaling.get(key)) for key in wanted}
    if rope_type == "llama3" and numbers["high_freq_factor"] <= numbers["low_freq_factor"]:
        reader.refuse(f"{name}.high_freq_factor", numbers["high_freq_factor"], "more than low_freq_factor")
    theta = parameters.get("rope_theta", fields.get("rope_theta", 10000.0))
    return RopeConfig(rope_theta=reader.number("rope_theta", theta), rope_type=cast(RopeType, rope_type), **numbers)


class _Reader:
    """Typed access to the fields of a config, with errors that say where a value stands and what was expected."""

    def __init__(self, fields: Mapping[str, Any], source: str) -> None:
        self.fields = fields
        self.source = source

    def refuse(self, name: str, value: object, supported: str) -> NoReturn:
        raise ValueError(f"{self.source}: {name} is {value!r}, which srtrl does not support; supported: {supported}")

    def choice(self, name: str, value: object, supported: tuple[str, ...]) -> str:
        if value not in supported:
            self.refuse(name, value, ", ".join(supported))
        return str(value)

    def count(self, name: str, *, default: int | None = None, null: int | None = None) -> int:
        """A positive integer; `default` where the field is absent, `null` where it is null."""
        value = self.fields.get(name, default)
        if value is None and name in self.fields:
            value = null
        if value is None:
            raise ValueError(f"{self.source}: {name} is missing; expected a positive integer")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{self.source}: {name} is {value!r}; expected a positive integer")
        return value

    def number(self, name: str, value: object) -> float:
        """`value`, if it is a positive number."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ValueError(f"{self.source}: {name} is {value!r}; expected a positive number")
        return value

    def flag(self, name: str) -> bool:
        """A boolean; false where the field is absent or null."""
        value = self.fields.get(name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.source}: {name} is {value!r}; expected true or false")
        return bool(value)
