"""Small random models of each family, built by `transformers` and loaded by us: the cases of every parity test."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from srtrl.model.transformer import Transformer
from srtrl.model.weights import load_model

_FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}
_LLAMA3_ROPE = {  # over the lengths of the tests: some wavelengths kept, some blended, some stretched
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "default", "rope_theta": 10000.0},
    _LLAMA3_ROPE,
    {"rope_type": "linear", "rope_theta": 1000.0, "factor": 4.0},
)
_NUM_CASES_PER_FAMILY = 6


@dataclass(frozen=True)
class ModelCase:
    """A family and the fields of its config."""

    name: str
    family: str
    fields: dict[str, Any]


def _make_case(family: str, index: int) -> ModelCase:
    """The categories (RoPE, tied, biases) cycle so that each occurs in each family; the sizes are drawn."""
    draw = random.Random(f"{family} {index}")
    num_kv_heads, num_shared = draw.choice([1, 2, 3]), draw.choice([1, 2, 3, 4])
    num_heads = num_kv_heads * num_shared
    hidden_size = num_heads * draw.choice([5, 6, 8])  # Llama wants a multiple of the heads
    quotient = hidden_size // num_heads
    head_dim = quotient if index % 3 == 0 and quotient % 2 == 0 else draw.choice([4, 10, 14, 16])
    tied, bias = index % 2 == 0, index // 2 % 2 == 1
    fields: dict[str, Any] = {
        "vocab_size": draw.choice([97, 128, 131]),
        "hidden_size": hidden_size,
        "intermediate_size": draw.choice([37, 48, 61]),
        "num_hidden_layers": draw.choice([1, 2, 3]),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": 256,
        "rms_norm_eps": draw.choice([1e-6, 1e-5]),
        "tie_word_embeddings": tied,
        "rope_parameters": dict(_ROPES[index % len(_ROPES)]),
    }
    if family != "qwen2":
        fields["attention_bias"] = bias
    if family == "llama":
        fields["mlp_bias"] = index % 4 in (1, 2)
    rope = fields["rope_parameters"]["rope_type"]
    name = f"{family}-{index}-{num_heads}x{head_dim}-kv{num_kv_heads}-{rope}" + "-tied" * tied + "-bias" * bias
    return ModelCase(name, family, fields)


CASES = [_make_case(family, index) for family in _FAMILIES for index in range(_NUM_CASES_PER_FAMILY)]


def make_hf_model(case: ModelCase, dtype: torch.dtype, seed: int = 0) -> nn.Module:
    """A `transformers` model of `case` with random weights: norms about one, and biases that are not zero.

    The weights of one seed are the same numbers in every dtype, up to rounding.
    """
    make_config, make_model = _FAMILIES[case.family]
    model: nn.Module = make_model(make_config(**case.fields)).to(torch.float64).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if "norm" in name else 0.0
            parameter.copy_(torch.empty_like(parameter).normal_(mean, 0.25, generator=generator))
    if dtype == torch.float64:
        widen_norms(model)
    return model.to(dtype)


def widen_norms(model: nn.Module) -> None:
    """Let the norms of a float64 model compute in float64.

    `transformers` rounds to float32 inside each norm whatever the model's dtype, an error of 1e-7 that would hide all
    that a comparison in float64 is for.
    """

    def norm_in_float64(module: nn.Module, args: tuple[Tensor], _: Tensor) -> Tensor:
        is_gemma = type(module).__name__.startswith("Gemma")
        hidden, weight, eps = args[0], module.weight, module.eps if is_gemma else module.variance_epsilon
        assert isinstance(weight, Tensor)
        assert isinstance(eps, float)
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + eps) * (weight + is_gemma)

    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.register_forward_hook(norm_in_float64)


def load_ours(hf_model: nn.Module, folder: Path, dtype: torch.dtype, max_shard_size: int = 10**9) -> Transformer:
    """Save a `transformers` model to `folder` and load it as ours."""
    save_pretrained: Any = hf_model.save_pretrained
    save_pretrained(folder, max_shard_size=max_shard_size)
    return load_model(folder, dtype=dtype, device="cpu")


def hf_logits(hf_model: nn.Module, sequences: Sequence[Tensor]) -> Tensor:
    """Logits of `sequences`, each run alone, end to end: [T, V]."""
    return torch.cat([hf_model(token_ids[None]).logits[0] for token_ids in sequences])


def random_sequences(vocab_size: int, lengths: Sequence[int], seed: int = 0) -> list[Tensor]:
    """Random token ids, one tensor a length."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator) for length in lengths]
