"""Hugging Face configs in: what is supported becomes a `ModelConfig`, everything else is refused by name.

Reads the layout of transformers 5 (`rope_parameters`) and the older one (`rope_theta` and `rope_scaling`). Defaults of
absent fields are those of `transformers`' `configuration_llama.py`, `configuration_qwen2.py`, `configuration_qwen3.py`.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError

from srtrl.model.transformer import ModelConfig, ModelType, RopeConfig

Config = TypeVar("Config")

_ROPE_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


class _CheckedFields(BaseModel):
    """What is checked first: what defaults depend on, and fields of which srtrl supports one value."""

    model_config = ConfigDict(strict=True)
    model_type: ModelType
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    hidden_act: Literal["silu"] = "silu"
    attention_dropout: Annotated[float, Field(ge=0, le=0)] = 0.0
    use_sliding_window: Literal[False] = False
    layer_types: list[Literal["full_attention"]] = []
    quantization_config: None = None
    compression_config: None = None


def config_from_hf(hf_config: Mapping[str, Any], source: str = "the model's config") -> ModelConfig:
    """Shape of the model that `hf_config` (a parsed `config.json`) describes.

    Args:
        hf_config: Fields of the config; kept in the result for `save_model`.
        source: What error messages call the config; its file where it came from one.

    Raises:
        ValueError: A field is missing or no valid number, or asks for something that is not supported; the message
            names the field, its value, `source` and what is supported.
    """
    fields = {name: value for name, value in hf_config.items() if value is not None}
    checked = _validated(_CheckedFields, fields, source)
    if "AutoModelForCausalLM" in fields.get("auto_map", {}):
        raise ValueError(f"{source}: auto_map is {fields['auto_map']}: a model with code of its own is not supported")
    is_llama, is_qwen2, is_qwen3 = (checked.model_type == name for name in ("llama", "qwen2", "qwen3"))
    if is_llama or "num_key_value_heads" in hf_config:  # null means as many as query heads
        fields.setdefault("num_key_value_heads", checked.num_attention_heads)
    fields.setdefault("max_position_embeddings", 2048 if is_llama else 32768)
    quotient = checked.hidden_size // checked.num_attention_heads
    fields.setdefault("head_dim", 128 if is_qwen3 and "head_dim" not in hf_config else quotient)
    attention_bias = not is_qwen2 and fields.get("attention_bias", False)
    config = _validated(
        ModelConfig,
        fields
        | {
            "rope": _rope_config(fields, source),
            "qkv_bias": is_qwen2 or attention_bias,
            "output_bias": attention_bias,
            "mlp_bias": is_llama and fields.get("mlp_bias", False),
            "qk_norm": is_qwen3,
            "hf_config": dict(hf_config),
        },
        source,
    )
    if config.num_attention_heads % config.num_key_value_heads != 0:
        raise ValueError(
            f"{source}: num_key_value_heads is {config.num_key_value_heads}: it should divide num_attention_heads "
            f"({config.num_attention_heads})"
        )
    return config


def _rope_config(fields: Mapping[str, Any], source: str) -> RopeConfig:
    """Rotary embedding, from `rope_parameters` or from `rope_theta` and `rope_scaling`; the latter wins, as in HF."""
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    if not isinstance(fields.get(name, {}), Mapping):
        raise ValueError(f"{source}: {name} is {fields[name]!r}: expected a mapping")
    parameters = {
        "rope_theta": fields.get("rope_theta", 10000.0),
        "partial_rotary_factor": fields.get("partial_rotary_factor", 1.0),
        **{key: value for key, value in fields.get(name, {}).items() if value is not None},
    }
    old_name = parameters.pop("type", "default")
    rope_type = parameters.setdefault("rope_type", old_name)
    if rope_type == "llama3":
        parameters.setdefault("original_max_position_embeddings", fields["max_position_embeddings"])
        if "original_max_position_embeddings" in fields:  # transformers lets the top level win
            parameters["original_max_position_embeddings"] = fields["original_max_position_embeddings"]
    rope = _validated(RopeConfig, parameters, f"{source}: {name}")
    expected = {"rope_theta", "rope_type", "partial_rotary_factor", *_ROPE_FIELDS[rope_type]}
    if set(parameters) != expected:
        raise ValueError(
            f"{source}: {name} has {', '.join(sorted(parameters))}: for rope_type {rope_type} srtrl supports exactly "
            f"{', '.join(sorted(expected))}"
        )
    if rope_type == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
        raise ValueError(f"{source}: {name}: high_freq_factor should be more than low_freq_factor: {parameters}")
    return rope


def _validated(make: Callable[..., Config], values: Mapping[str, Any], source: str) -> Config:
    """The config of those `values` that it has fields for; what is refused first is named, with what it should be."""
    try:
        return make(**values)
    except ValidationError as error:
        first = error.errors()[0]
        found = "missing" if first["type"] == "missing" else repr(first["input"])
        raise ValueError(f"{source}: {'.'.join(map(str, first['loc']))} is {found}: {first['msg']}") from error
