"""Shapes of models whose weights are not at hand: to measure with random ones, and to compute what memory they need."""

from typing import Any


def _shape(family: str, vocab: int, width: int, mlp: int, layers: int, heads: int, kv_heads: int, **more: Any) -> Any:
    """Fields of a Hugging Face config; `more` replaces those that most have in common."""
    return {
        "model_type": family,
        "vocab_size": vocab,
        "hidden_size": width,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
        **more,
    }


_QWEN_3 = {"head_dim": 128, "max_position_embeddings": 40960}

SHAPES: dict[str, dict[str, Any]] = {
    # The policy of recipes/warm_start_tiny.yaml.
    "tiny": _shape("llama", 320, 128, 384, 4, 4, 2, max_position_embeddings=4096, rope_theta=1e4),
    # MiniMind2-Small: 26 million parameters.
    "small": _shape("llama", 6400, 512, 1408, 8, 8, 2, rms_norm_eps=1e-5),
    "qwen2.5-0.5b": _shape("qwen2", 151936, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _shape("qwen2", 151936, 1536, 8960, 28, 12, 2, max_position_embeddings=131072),
    "qwen2.5-3b": _shape("qwen2", 151936, 2048, 11008, 36, 16, 2),
    "qwen2.5-7b": _shape("qwen2", 152064, 3584, 18944, 28, 28, 4, tie_word_embeddings=False),
    "qwen2.5-14b": _shape("qwen2", 152064, 5120, 13824, 48, 40, 8, tie_word_embeddings=False),
    "qwen3-4b": _shape("qwen3", 151936, 2560, 9728, 36, 32, 8, **_QWEN_3),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, 32, 8, tie_word_embeddings=False, **_QWEN_3),
}
"""By name; the fields of published models are from their `config.json`."""


def published_shape(path: str) -> dict[str, Any] | None:
    """The config of a model by its name on the Hugging Face hub (`Qwen/Qwen2.5-7B-Instruct`), if it is known here."""
    owner, _, name = path.partition("/")
    return SHAPES.get(name.lower().removesuffix("-instruct").removesuffix("-base")) if owner == "Qwen" else None
