"""A tiny random checkpoint of each family, in the layout of its published config."""

import json
from pathlib import Path
from typing import Any

import torch
from model_cases import widen_norms
from ruamel.yaml import YAML
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
FAMILIES: dict[str, dict[str, Any]] = YAML(typ="safe").load(Path(__file__).with_suffix(".yaml"))
del FAMILIES["shared"]


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
