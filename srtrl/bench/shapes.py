"""Model shapes to measure at, with random weights: time does not depend on the values of the weights."""

from pathlib import Path
from typing import Any

import torch

from srtrl.model.hf_config import config_from_hf
from srtrl.model.weights import init_model, save_model
from srtrl.resolve import suggestion


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


_LLAMA_3 = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}
_QWEN_3 = {"head_dim": 128, "max_position_embeddings": 40960}

SHAPES: dict[str, dict[str, Any]] = {
    # The policy of recipes/warm_start_tiny.yaml.
    "tiny": _shape("llama", 320, 128, 384, 4, 4, 2, max_position_embeddings=4096, rope_theta=1e4),
    # MiniMind2-Small: 26 million parameters.
    "small": _shape("llama", 6400, 512, 1408, 8, 8, 2, rms_norm_eps=1e-5),
    "llama-3.2-1b": _shape("llama", 128256, 2048, 8192, 16, 32, 8, **_LLAMA_3),
    "qwen2.5-0.5b": _shape("qwen2", 151936, 896, 4864, 24, 14, 2),
    "qwen2.5-1.5b": _shape("qwen2", 151936, 1536, 8960, 28, 12, 2, max_position_embeddings=131072),
    "qwen3-4b": _shape("qwen3", 151936, 2560, 9728, 36, 32, 8, **_QWEN_3),
    "qwen3-8b": _shape("qwen3", 151936, 4096, 12288, 36, 32, 8, tie_word_embeddings=False, **_QWEN_3),
}
"""By name; the fields of published models are from their `config.json`."""


def write_random_model(shape: str, folder: Path, dtype: torch.dtype) -> Path:
    """Save a model of a shape of `SHAPES` with random weights (seed 0) to `folder`; returns the folder.

    Raises:
        ValueError: No such shape.
    """
    if shape not in SHAPES:
        raise ValueError(
            f"--model-shape: no shape {shape!r}{suggestion(shape, SHAPES) or ';'} known: {', '.join(SHAPES)}"
        )
    save_model(init_model(config_from_hf(SHAPES[shape], shape), 0, dtype, "cpu"), folder)
    return folder
