"""Random EAGLE-3 heads in the two layouts of folders, and their slow reference: whole texts, no cache, float64."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config  # read now: on a device that is imitated they cannot be
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer, layer_states

NUM_LISTED = 40
SPECFORGE, SPECULATORS = "SpecForge", "speculators"
DIALECTS = (SPECFORGE, SPECULATORS)


def make_folder(folder: Path, policy: Transformer, dialect: str, seed: int = 0, **fields: Any) -> Path:
    """A folder with a random head that reads the streams after 1, 2 and 4 layers; `fields` are those of its config."""
    shape, width = policy.config, policy.config.hidden_size
    heads, kv_heads, head_dim = 4, 2, 8  # another shape of heads than the policy's
    layer = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": 50,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "vocab_size": shape.vocab_size,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "rope_theta": 5000.0,
        "max_position_embeddings": 64,
        "hidden_act": LlamaConfig().hidden_act,
        "layer_types": ["full_attention"] * shape.num_hidden_layers,
    }
    if dialect == SPECFORGE:
        config = {**layer, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 3]}}
    else:
        config = {"transformer_layer_config": layer, "eagle_aux_hidden_state_layer_ids": [1, 2, 4]}
    config |= {"draft_vocab_size": NUM_LISTED} | fields
    random, name = torch.Generator().manual_seed(seed), "midlayer" if dialect == SPECFORGE else "layers.0"

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=random) * (1.5 / math.sqrt(columns))

    def norm(length: int = width) -> Tensor:
        return 1 + 0.3 * torch.randn(length, generator=random)

    listed = torch.randperm(shape.vocab_size, generator=random)[:NUM_LISTED].sort().values
    tensors = {
        "fc.weight": matrix(width, 3 * width),
        "norm.weight": norm(),
        "lm_head.weight": 4 * matrix(NUM_LISTED, width),
        "d2t": listed - torch.arange(NUM_LISTED),
        "t2d": torch.zeros(shape.vocab_size, dtype=torch.bool).index_fill(0, listed, True),
        f"{name}.hidden_norm.weight": norm(),
        f"{name}.input_layernorm.weight": norm(),
        f"{name}.post_attention_layernorm.weight": norm(),
        f"{name}.self_attn.q_proj.weight": 2 * matrix(heads * head_dim, 2 * width),
        f"{name}.self_attn.k_proj.weight": 2 * matrix(kv_heads * head_dim, 2 * width),
        f"{name}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, 2 * width),
        f"{name}.self_attn.o_proj.weight": matrix(width, heads * head_dim),
        f"{name}.mlp.gate_proj.weight": matrix(50, width),
        f"{name}.mlp.up_proj.weight": matrix(50, width),
        f"{name}.mlp.down_proj.weight": matrix(width, 50),
    }
    if config.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": norm() for index in range(3)}
    if config.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(3 * width)
    if dialect == SPECULATORS:
        tensors["embed_tokens.weight"] = matrix(shape.vocab_size, width)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


MTP_NAMES = {
    "token_layernorm": "enorm",
    "hidden_layernorm": "hnorm",
    "input_proj": "eh_proj",
    "final_layernorm": "post_norm",
    **{name: f"mtp_block.{name}" for name in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")},
}
"""Names in MiMo's folders -> those of `transformers`."""


def add_mtp_layer(policy: Transformer) -> MtpLayer:
    """Let a Qwen2 policy carry a random MTP layer, as a folder of MiMo-7B does; returns that of `transformers`."""
    shape = policy.config
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = Qwen2Config(**{name: getattr(shape, name) for name in sizes}, rms_norm_eps=shape.rms_norm_eps)
    config.mtp_hidden_states_first, config._attn_implementation = True, "eager"
    layer = MtpLayer(config, Qwen2DecoderLayer, Qwen2RMSNorm, 0).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            mean, std = (1.0, 0.3) if "norm" in name else (0.0, 1.5 / math.sqrt(weight.shape[-1]))
            weight.copy_(torch.empty_like(weight).normal_(mean, std, generator=random))
    for name, other in MTP_NAMES.items():
        module = layer.get_submodule(other)
        for part, tensor in module.state_dict().items():
            policy.carried[f"model.mtp_layers.0.{name}.{part}"] = tensor.float()
    return layer


class Reference:
    """What the head in a folder drafts, by the published definition, from whole texts."""

    def __init__(self, folder: Path, policy: Transformer) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.layer = self.config.get("transformer_layer_config", self.config)
        tensors = load_file(folder / "model.safetensors")
        self.listed = torch.arange(NUM_LISTED) + tensors.pop("d2t")
        self.weights = {
            name.replace("midlayer.", "").replace("layers.0.", ""): tensor.double() for name, tensor in tensors.items()
        }
        self.policy = policy

    def logits(self, tokens: list[int], k: int, choose: Callable[[int, Tensor], int]) -> list[Tensor]:
        """Logits [L] of each of `k` guesses after `tokens`; `choose` gets a depth and them, and returns a token."""
        with torch.no_grad():
            streams = torch.empty(len(tokens), 3 * self.policy.config.hidden_size)
            self.policy(torch.tensor(tokens), PackedPlan([len(tokens)], "cpu"), layer_states((1, 2, 4), streams))
            states = self._fused(streams[:-1].double())
            after, found = tokens[1:], []
            for depth in range(k):
                outputs = self._outputs(states, torch.tensor(after))
                normed = self._norm(outputs[-1:], "norm")
                found.append((normed @ self.weights["lm_head.weight"].T)[0])
                after = [*after, choose(depth, found[-1])]
                states = torch.cat((states, normed if self.config.get("norm_output") else outputs[-1:]))
        return found

    def _fused(self, streams: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            streams = self._norm(streams, "input_norm")
        if self.config.get("fc_norm"):
            parts = streams.chunk(3, dim=-1)
            streams = torch.cat([self._norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)], dim=-1)
        return streams @ self.weights["fc.weight"].T

    def _outputs(self, states: Tensor, after: Tensor) -> Tensor:
        """Outputs of the layer for all entries, [N, D]."""
        embedding = self.weights.get("embed_tokens.weight", self.policy.embedding.detach().double())
        normed = self._norm(states, "hidden_norm")
        inputs = torch.cat((self._norm(embedding[after], "input_layernorm"), normed), dim=-1)
        hidden = normed if self.config.get("norm_before_residual") else states
        hidden = hidden + self._attention(inputs)
        inputs = self._norm(hidden, "post_attention_layernorm")
        gate, up = (inputs @ self.weights[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return hidden + (gate * gate.sigmoid() * up) @ self.weights["mlp.down_proj.weight"].T

    def _attention(self, inputs: Tensor) -> Tensor:
        head_dim = self.layer["head_dim"]
        projected = [inputs @ self.weights[f"self_attn.{name}_proj.weight"].T for name in ("q", "k", "v")]
        q, k, v = (part.view(len(part), -1, head_dim).transpose(0, 1) for part in projected)
        q, k = self._rotated(q), self._rotated(k)
        k, v = (part.repeat_interleave(len(q) // len(k), dim=0) for part in (k, v))
        scores = q @ k.transpose(1, 2) / head_dim**0.5
        seen = torch.ones(scores.shape[-2:]).tril().bool()
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        attended: Tensor = (weights @ v).transpose(0, 1).flatten(1)
        return attended @ self.weights["self_attn.o_proj.weight"].T

    def _rotated(self, heads: Tensor) -> Tensor:
        """Rotary embedding of [H, N, E], whose rows are positions from 0 on."""
        half = heads.shape[-1] // 2
        rates = self.layer["rope_theta"] ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(heads.shape[1], dtype=torch.float64)[:, None] * rates
        first, second = heads.chunk(2, dim=-1)
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((first * cosines - second * sines, second * cosines + first * sines), dim=-1)

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        scale = (hidden.square().mean(dim=-1, keepdim=True) + self.layer["rms_norm_eps"]).rsqrt()
        normed: Tensor = hidden * scale * self.weights[f"{name}.weight"]
        return normed


def change_folder(
    folder: Path, fields: Mapping[str, Any] | None = None, tensors: Mapping[str, Tensor | None] | None = None
) -> None:
    """Change fields of a head's config, and tensors of its file; None removes."""
    config, weights = folder / "config.json", folder / "model.safetensors"
    changed = json.loads(config.read_text()) | dict(fields or {})
    config.write_text(json.dumps({name: value for name, value in changed.items() if value is not None}))
    kept = {**load_file(weights), **(tensors or {})}
    save_file({name: tensor for name, tensor in kept.items() if tensor is not None}, weights)
