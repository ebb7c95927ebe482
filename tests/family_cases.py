"""A tiny random checkpoint of each family, in the layout of its published config."""

import json
from pathlib import Path
from typing import Any

import torch
from model_cases import widen_norms
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

MAX_TOKENS = 64
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_TOKENS,
}
BOTH_NORMS = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "attention_dropout": 0.0, "initializer_range": 0.02}
CODE = {"auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"}}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
MINISTRAL_ROPE = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0}
MINISTRAL_ROPE |= {"original_max_position_embeddings": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
MINISTRAL_ROPE |= {"llama_4_scaling_beta": 0.1}
LLAMA3 = {"rope_type": "llama3", "factor": 16.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 32}
WINDOW = 9
LAYERS_OF_WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]
GRANITE = {"attention_multiplier": 0.0155, "embedding_multiplier": 12.0, "residual_multiplier": 0.22}
MAMBA = {"mamba_n_heads": 6, "mamba_d_head": 16, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 4}
GEMMA: dict[str, Any] = {
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 20,
    "rope_local_base_freq": 1e4,
    "rope_scaling": None,
    "rope_theta": 1e6,
    "sliding_window": WINDOW,
    "use_bidirectional_attention": False,
}
LONGROPE = {"type": "longrope", "long_factor": [4.0, 5.0, 6.0], "short_factor": [1.0, 1.5, 2.0]}

FAMILIES: dict[str, dict[str, Any]] = {
    "Mistral 7B v0.3": {"model_type": "mistral", "rope_theta": 1e6, "sliding_window": None},
    "Mistral 7B v0.1": {"model_type": "mistral", "rope_theta": 1e4, "sliding_window": WINDOW},
    "Mistral Nemo": {"model_type": "mistral", "head_dim": 16, "rope_theta": 1e6, "sliding_window": None},
    "Ministral 3": {
        "model_type": "mistral3",
        "text_config": {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL_ROPE},
        "vision_config": {"model_type": "pixtral"},
        "image_token_index": 10,
    },
    "SmolLM3": {
        "model_type": "smollm3",
        "no_rope_layers": [1, 1, 1, 0],
        "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "rope_theta": 5e6,
        "tie_word_embeddings": True,
        "max_window_layers": 28,
    },
    "OLMo 2": {"model_type": "olmo2", "rope_theta": 5e5, "rope_scaling": None, "attention_bias": False},
    "OLMo 3": {
        "model_type": "olmo3",
        "rope_theta": 5e5,
        "rope_scaling": YARN | {"rope_type": "yarn", "attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0},
        "layer_types": LAYERS_OF_WINDOWS,
        "sliding_window": WINDOW,
        "attention_bias": False,
    },
    "EXAONE 4": {
        "model_type": "exaone4",
        "head_dim": 16,
        "rope_theta": 1e6,
        "rope_scaling": LLAMA3,
        "layer_types": LAYERS_OF_WINDOWS,
        "sliding_window": WINDOW,
        "sliding_window_pattern": "LLLG",
    },
    "Granite 3": {
        "model_type": "granite",
        "logits_scaling": 8.0,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "mlp_bias": False,
        **GRANITE,
    },
    "Granite 4 micro": {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * 4,
        "logits_scaling": 10.0,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "rope",
        "shared_intermediate_size": 40,
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
        **(GRANITE | MAMBA),
    },
    "Phi-4": {
        "model_type": "phi3",
        "original_max_position_embeddings": MAX_TOKENS,
        "rope_scaling": None,
        "rope_theta": 25e4,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "sliding_window": None,
    },
    "Phi-4-mini": {
        "model_type": "phi3",
        "original_max_position_embeddings": 40,
        "partial_rotary_factor": 0.75,
        "rope_scaling": LONGROPE,
        "sliding_window": 262144,
        "tie_word_embeddings": True,
        **CODE,
    },
    "GLM-4-9B": {"model_type": "glm", "attention_bias": True, "head_dim": 16, "rope_theta": 1e4},
    "GLM-4-9B-0414": {
        "model_type": "glm4",
        "attention_bias": True,
        "head_dim": 16,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1e4,
    },
    "Gemma 3 270M": {
        "model_type": "gemma3_text",
        "head_dim": 16,
        "layer_types": LAYERS_OF_WINDOWS,
        "_sliding_window_pattern": 4,
        **GEMMA,
    },
    "Gemma 3 1B": {"model_type": "gemma3_text", "head_dim": 16, "sliding_window_pattern": 2, **GEMMA},
    "Gemma 3 4B": {
        "model_type": "gemma3",
        "text_config": {
            "model_type": "gemma3_text",
            "head_dim": 16,
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": WINDOW,
        },
        "vision_config": {"model_type": "siglip_vision_model"},
        "mm_tokens_per_image": 256,
    },
    "Seed-OSS": {
        "model_type": "seed_oss",
        "attention_bias": True,
        "attention_out_bias": False,
        "attention_dropout": 0.1,
        "residual_dropout": 0.1,
        "head_dim": 16,
        "mlp_bias": False,
        "rope_scaling": {"rope_type": "default"},
        "rope_theta": 1e7,
    },
    "InternLM3": {
        "model_type": "internlm3",
        "bias": False,
        "qkv_bias": False,
        "head_dim": 16,
        "rope_scaling": {"factor": 6.0, "rope_type": "dynamic"},
        "rope_theta": 5e7,
        **CODE,
    },
    "MiMo-7B": {
        "model_type": "mimo",
        "attention_bias": True,
        "max_window_layers": 36,
        "num_nextn_predict_layers": 1,
        "rope_theta": 64e4,
        "sliding_window": 32768,
        "use_sliding_window": False,
        **CODE,
    },
    "Qwen2 with windows": {
        "model_type": "qwen2",
        "rope_theta": 1e6,
        "max_window_layers": 2,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
    },
    "Qwen2.5 with YaRN": {"model_type": "qwen2", "rope_scaling": YARN | {"type": "yarn"}, "rope_theta": 1e6},
    "Qwen3 with YaRN": {
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": 16,
        "rope_scaling": YARN | {"rope_type": "yarn"},
        "rope_theta": 1e6,
    },
}
"""Fields of `config.json` as the hub has them, beside `SIZES` and `BOTH_NORMS`; lengths are shrunk."""


def published_config(name: str, vocab_size: int = SIZES["vocab_size"]) -> dict[str, Any]:
    """The whole config of a family."""
    fields = FAMILIES[name]
    shared = SIZES | {"vocab_size": vocab_size} | BOTH_NORMS | {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    if "text_config" in fields:
        return fields | {"eos_token_id": 2, "text_config": shared | fields["text_config"]}
    return shared | fields


def make_checkpoint(
    name: str, folder: Path, dtype: torch.dtype = torch.float64, vocab_size: int = SIZES["vocab_size"]
) -> nn.Module:
    """Write a random checkpoint of a family to `folder`; the model of `transformers` with these weights.

    Its norms compute in float64 where `dtype` is that.
    """
    config = published_config(name, vocab_size)
    text = {key: value for key, value in config.get("text_config", config).items() if key != "auto_map"}
    if text["model_type"] == "mimo":
        text["model_type"] = "qwen2"
    make_model: Any = AutoModelForCausalLM.from_config
    model: nn.Module = make_model(AutoConfig.for_model(**json.loads(json.dumps(text)))).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            mean = float("norm" in parameter_name and "Gemma" not in type(model).__name__)
            parameter.copy_(torch.empty_like(parameter).normal_(mean, 0.25, generator=generator))
    model = model.to(dtype)
    save_pretrained: Any = model.save_pretrained
    save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(file := folder / "model.safetensors")
    extra = {}
    if "text_config" in config:
        tensors = {f"language_model.{key}": tensor for key, tensor in tensors.items()}
        extra = {"vision_tower.patch_conv.weight": torch.ones(3)}
    if config["model_type"] == "mimo":
        extra = {"model.mtp_layers.0.token_layernorm.weight": torch.ones(3)}
    save_file(tensors | extra, file, metadata={"format": "pt"})
    if dtype == torch.float64:
        widen_norms(model)
    return model
