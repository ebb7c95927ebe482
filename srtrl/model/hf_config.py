"""Hugging Face configs in: `transformers` reads them, in the layout of its version 5 and in older ones.

What srtrl's transformer computes becomes a `ModelConfig`, everything else is refused by name. The configs of
`transformers` take two seconds to import; a plain Llama's, such as that of the bundled policy, is read without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch

from srtrl.model.transformer import LLAMA, LayerKind, ModelConfig, RopeConfig, Style, inverse_frequencies
from srtrl.resolve import Caught

_PLAIN: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_dropout": (0, None),
    "quantization_config": (None,),
    "compression_config": (None,),
}
"""Fields, and the values of each that are supported."""
_NO_QUANTIZED = "none: save dequantized weights first (`model.dequantize()` of transformers), without this field"
_REMEDIES = dict.fromkeys(("quantization_config", "compression_config"), _NO_QUANTIZED)
"""A field that is not supported -> the supported one, and a remedy."""
_TEXT_MODELS = ("gemma3_text", "ministral3")
"""Text models that are published as the `text_config` of a model that reads images, too."""
_OUTER_FIELDS = ("bos_token_id", "eos_token_id", "pad_token_id", "quantization_config", "tie_word_embeddings")
"""Fields of the whole model's config that count for its text."""
_SIZES = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "shared_intermediate_size"), 2**20),
    **dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"), 2**10),
    **dict.fromkeys(("max_position_embeddings", "sliding_window"), 2**31 - 1),
}
"""Integers from 1, and the largest value of each: far above any model, far below what hangs."""
_PLAIN_LLAMA = {*_SIZES, "model_type", "rms_norm_eps", "tie_word_embeddings"} - {
    *("head_dim", "shared_intermediate_size", "sliding_window")
}
"""Fields that a plain Llama must have."""
_SAME_NAMES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "rms_norm_eps", "tie_word_embeddings"),
)
"""Fields that have the same name in `ModelConfig`."""
_WITHOUT_EFFECT = {"architectures", "bos_token_id", "dtype", "eos_token_id", "pad_token_id"}
_LENGTHS = {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
_YARN = {"beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim"}
_GRANITE = {"embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"}
_GEMMA = {"query_pre_attn_scalar", "rope_local_base_freq"}
_SCALES = {"rms_norm_eps", "rope_theta", "partial_rotary_factor"} | _GEMMA | _LENGTHS | _YARN | _GRANITE
"""Numbers from 1e-12 to 1e12; the norms' epsilon to 1."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ROPE_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")
"""Types of rotary embedding; `dynamic` and `longrope` up to a length at which frequencies do not depend on it."""
_ROPE_NAMES = {"rope_type", "type", "truncate", "short_factor", "long_factor", "llama_4_scaling_beta"}
_ROPE_FIELDS = _ROPE_NAMES | _SCALES | {"max_position_embeddings"}


class _Family(NamedTuple):
    """How a family's config is read, where it is not read as Llama's; functions of the config of `transformers`."""

    style: Callable[[Any], Style] = lambda config: LLAMA
    fields: Callable[[Any], dict[str, Any]] = lambda config: {}
    """Further fields of `ModelConfig`, from the family's config."""
    rotates: Callable[[Any], list[Any]] = lambda config: [True] * config.num_hidden_layers
    """Whether each layer has a rotary embedding."""
    can_rotate_partly: bool = False
    has_alpha: bool = False
    """Whether a rotary embedding with `alpha` has a larger base, of every type."""
    plain: Mapping[str, tuple[Any, ...]] = _PLAIN


def _granite_style(config: Any) -> Style:
    return Style(
        attention_scale=config.attention_multiplier * (config.hidden_size // config.num_attention_heads) ** 0.5,
        embedding_scale=config.embedding_multiplier,
        residual_scale=config.residual_multiplier,
        logit_scale=1 / config.logits_scaling,
    )


def _exaone_rotates(config: Any) -> list[bool]:
    return [config.sliding_window is None or layer_type == "sliding_attention" for layer_type in config.layer_types]


def _gemma_style(config: Any) -> Style:
    return Style(
        norms="sandwich",
        qk_norm="head",
        wide_norms=True,
        norm_offset=1.0,
        activation="gelu_tanh",
        attention_scale=(config.head_dim / config.query_pre_attn_scalar) ** 0.5,
        embedding_scale=torch.tensor(config.hidden_size**0.5).item(),  # a number of float32 there
    )


def _glm(style: Style) -> _Family:
    fields = {"output_bias": False, "mlp_bias": False}
    return _Family(lambda config: style, lambda config: fields, can_rotate_partly=True)


_WITHOUT_BIAS = {"qkv_bias": False, "output_bias": False, "mlp_bias": False}
_PLAIN_MISTRAL = _Family(fields=lambda config: _WITHOUT_BIAS)
_OLMO = _Family(lambda config: Style(norms="post", qk_norm="projection", wide_norms=True))
_FAMILIES: dict[str, _Family] = {
    "llama": _Family(),
    "qwen2": _Family(fields=lambda config: {"qkv_bias": True, "output_bias": False}),
    "qwen3": _Family(lambda config: Style(qk_norm="head")),
    "mistral": _PLAIN_MISTRAL,
    "ministral3": _PLAIN_MISTRAL,
    "smollm3": _Family(rotates=lambda config: config.no_rope_layers[: config.num_hidden_layers]),
    "olmo2": _OLMO,
    "olmo3": _OLMO,
    "exaone4": _Family(
        lambda config: Style(norms="post", qk_norm="head"), lambda config: _WITHOUT_BIAS, _exaone_rotates
    ),
    "granite": _Family(_granite_style),
    "granitemoehybrid": _Family(
        _granite_style,
        lambda config: {"intermediate_size": config.shared_intermediate_size, "mlp_bias": False},
        plain=_PLAIN | {"num_local_experts": (0,), "position_embedding_type": ("rope",)},
    ),
    "phi3": _Family(fields=lambda config: _WITHOUT_BIAS, can_rotate_partly=True),
    "glm": _glm(Style(interleaved=True)),
    "glm4": _glm(Style(norms="sandwich", interleaved=True)),
    "seed_oss": _Family(
        fields=lambda config: {"output_bias": config.attention_out_bias},
        plain=_PLAIN | {"attention_dropout": (0, 0.1)},  # as published; a policy is trained as it is sampled, without
    ),
    "internlm3": _Family(),
    "hunyuan_v1_dense": _Family(
        lambda config: Style(qk_norm="rotated"),
        lambda config: {"mlp_bias": False},
        has_alpha=True,
        plain=_PLAIN | {"use_qk_norm": (True, None), "use_cla": (False, None)},
    ),
    "gemma3_text": _Family(
        _gemma_style,
        plain=dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,))
        | {name: values for name, values in _PLAIN.items() if name != "hidden_act"}
        | {"hidden_activation": ("gelu_pytorch_tanh",), "use_bidirectional_attention": (False, None)},
    ),
}
"""By `model_type`."""


def config_from_hf(hf_config: Mapping[str, Any], source: str = "the model's config") -> ModelConfig:
    """Shape of the model that `hf_config` (a parsed `config.json`) describes.

    Args:
        hf_config: Fields of the config; kept in the result for `save_model`.
        source: The config's name in error messages; its file where it came from one.

    Raises:
        ValueError: A field is not valid for `transformers`, or asks for something that is not supported; the message
            names `source`, the field and its value.
    """
    hf_config = _text_config(hf_config)
    model_type: Any = hf_config.get("model_type")
    if model_type not in _FAMILIES:
        raise ValueError(f"{source}: model_type is {model_type!r}; supported: {', '.join(_FAMILIES)}")
    _check_numbers(hf_config, source)
    if (plain := _read_plain(hf_config)) is not None:
        return plain
    from transformers import AutoConfig

    family = _FAMILIES[model_type]
    with Caught() as caught:
        config: Any = AutoConfig.for_model(**deepcopy(dict(hf_config)))
    if caught.error is None:
        _refuse(config, family, source)
        with caught:
            head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            layers = _layers(config, family, head_dim)
    if caught.error is not None:
        reason = " ".join(str(caught.error).split())
        raise ValueError(f"{source}: transformers cannot read this config: {reason}") from caught.error
    attention_bias = getattr(config, "attention_bias", False)
    shape: dict[str, Any] = {
        **{name: getattr(config, name) for name in _SAME_NAMES},
        "model_type": model_type,
        "head_dim": head_dim,
        "max_position_embeddings": _longest(config),
        "layers": layers,
        "style": family.style(config),
        "qkv_bias": attention_bias,
        "output_bias": attention_bias,
        "mlp_bias": getattr(config, "mlp_bias", False),
        "hf_config": dict(hf_config),
    }
    return ModelConfig(**shape | family.fields(config))


def _text_config(hf_config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the text model alone; MiMo without its heads for several tokens is a Qwen2."""
    text = hf_config.get("text_config")
    if isinstance(text, dict) and text.get("model_type") in _TEXT_MODELS:
        return {name: hf_config[name] for name in _OUTER_FIELDS if name in hf_config} | text
    return {**hf_config, "model_type": "qwen2"} if hf_config.get("model_type") == "mimo" else hf_config


def _layer_types(config: Any) -> list[str]:
    """`full_attention` or `sliding_attention` for each layer."""
    default = "full_attention" if getattr(config, "sliding_window", None) is None else "sliding_attention"
    layer_types: list[str] = getattr(config, "layer_types", None) or [default] * config.num_hidden_layers
    return layer_types


def _layers(config: Any, family: _Family, head_dim: int) -> tuple[LayerKind, ...]:
    """The kind of each layer."""
    layer_types = _layer_types(config)
    ropes = {layer_type: _rope(config, layer_type, head_dim) for layer_type in set(layer_types)}
    windows = {"full_attention": None, "sliding_attention": getattr(config, "sliding_window", None)}
    if (windows["sliding_attention"] or 0) >= config.max_position_embeddings:
        windows["sliding_attention"] = None
    return tuple(
        LayerKind(ropes[layer_type] if rotates else RopeConfig(), windows[layer_type])
        for layer_type, rotates in zip(layer_types, family.rotates(config), strict=True)
    )


def _rope(config: Any, layer_type: str, head_dim: int) -> RopeConfig:
    """The rotary embedding of the layers of a type."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    is_by_type = layer_type in config.rope_parameters
    fields = config.rope_parameters[layer_type] if is_by_type else config.rope_parameters
    alpha = fields.get("alpha")
    if fields["rope_type"] == "default" or alpha:
        rotary_dim = int(head_dim * fields.get("partial_rotary_factor", 1.0))
        base = fields["rope_theta"] * (alpha ** (head_dim / (head_dim - 2)) if alpha else 1)
        return RopeConfig(tuple(inverse_frequencies(base, rotary_dim).tolist()))
    options = {"layer_type": layer_type} if is_by_type else {}
    frequencies, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, **options)
    return RopeConfig(tuple(frequencies.tolist()), float(factor))


def _longest(config: Any) -> int:
    """Tokens up to which a sequence means the same as in `transformers`."""
    rope = config.rope_parameters
    limits = [config.max_position_embeddings]
    if rope.get("rope_type") == "longrope" or rope.get("llama_4_scaling_beta"):  # later queries are scaled
        limits.append(rope["original_max_position_embeddings"])
    return int(min(limits))


def _check_numbers(given: Mapping[str, Any], source: str) -> None:
    """Raise a ValueError for the first number that is of another type or out of range; null is left to others."""
    for name, value in given.items():
        if name in ("rope_scaling", "rope_parameters", *_LAYER_TYPES) and isinstance(value, dict):
            _check_numbers(value, f"{source}: {name}")
        is_size = name in _SIZES
        low, high = (1, _SIZES[name]) if is_size else (1e-12, 1 if name == "rms_norm_eps" else 1e12)
        low = 0 if name == "mscale_all_dim" else low  # as if it were not there
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
    frequencies = inverse_frequencies(given.pop("rope_theta"), head_dim).tolist()
    return ModelConfig(
        layers=(LayerKind(RopeConfig(tuple(frequencies))),) * given["num_hidden_layers"],
        **given,
        head_dim=head_dim,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        hf_config=dict(hf_config),
    )


def _refuse(config: Any, family: _Family, source: str) -> None:
    """Raise a ValueError for the first field that asks for something else than the transformer computes."""
    found = {name: getattr(config, name, None) for name in family.plain}
    layer_types, rope = _layer_types(config), config.rope_parameters
    ropes = [rope[layer_type] for layer_type in set(layer_types) if layer_type in rope] or [rope]
    unknown = {name for rope in ropes for name, value in rope.items() if value is not None} - _ROPE_FIELDS
    unknown -= {"alpha"} if family.has_alpha else set()
    rope_is_supported = not unknown and all(
        rope["rope_type"] in _ROPE_TYPES and (family.can_rotate_partly or rope.get("partial_rotary_factor", 1.0) == 1)
        for rope in ropes
    )
    ropes_text = f"rope_type {', '.join(_ROPE_TYPES)}" + ", for the whole head" * (not family.can_rotate_partly)
    if unknown:
        ropes_text += f", without {', '.join(sorted(unknown))}"
    num_heads, num_kv_heads = config.num_attention_heads, config.num_key_value_heads
    for name, value, is_supported, supported in (
        *((name, found[name], found[name] in values, values[0]) for name, values in family.plain.items()),
        ("layer_types", layer_types, set(layer_types) <= set(_LAYER_TYPES), ", ".join(_LAYER_TYPES)),
        ("num_key_value_heads", num_kv_heads, num_heads % num_kv_heads == 0, f"divisors of {num_heads} heads"),
        ("rope_parameters", rope, rope_is_supported, ropes_text),
    ):
        if not is_supported:
            raise ValueError(f"{source}: {name} is {value!r}; supported: {_REMEDIES.get(name, supported)}")
