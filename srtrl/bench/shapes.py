"""Model shapes to measure at, with random weights: time does not depend on the values of the weights."""

from pathlib import Path
from typing import Any

import torch

from srtrl.model.hf_config import config_from_hf
from srtrl.model.weights import init_model, save_model
from srtrl.resolve import suggestion

_QWEN = {"vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {  # the policy of recipes/warm_start_tiny.yaml
        "model_type": "llama",
        "vocab_size": 320,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
    },
    "small": {  # MiniMind2-Small: 26 million parameters
        "model_type": "llama",
        "vocab_size": 6400,
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": True,
    },
    "qwen2.5-0.5b": _QWEN
    | {
        "model_type": "qwen2",
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32768,
    },
    "qwen2.5-1.5b": _QWEN
    | {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "max_position_embeddings": 131072,
    },
    "qwen3-4b": _QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    },
    "qwen3-8b": _QWEN
    | {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
"""Fields of a Hugging Face config, by name; those of published models are from their `config.json`."""


def write_random_model(shape: str, folder: Path, dtype: torch.dtype) -> Path:
    """Save a model of a shape of `SHAPES` with random weights (seed 0) to `folder`; returns the folder.

    Raises:
        ValueError: No such shape.
    """
    if shape not in SHAPES:
        raise ValueError(
            f"--model-shape: no shape {shape!r}{suggestion(shape, SHAPES) or ';'} known: {', '.join(SHAPES)}"
        )
    config = config_from_hf(SHAPES[shape] | {"hidden_act": "silu"}, shape)
    save_model(init_model(config, 0, dtype, "cpu"), folder)
    return folder
