"""One transformer for decode and update: Llama, Qwen2/Qwen2.5 and Qwen3.

Everything here works on each token alone; tokens meet only in `plan.attend`. The query, key and value projections are
one matrix, and so are the gate and up projections, because at decode sizes each operator costs more to launch than to
compute; `weights.py` splits and merges them. Numerics (float32 rotary table and norms, order of casts) are those of
`transformers`' `modeling_llama.py`, `modeling_qwen2.py` and `modeling_qwen3.py`, on which the checkpoints were trained.
Dimension letters: see `srtrl/types.py`; here T is the tokens of one forward pass, packed or of a decode step.
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from srtrl.model.attention import AttentionPlan

ModelType = Literal["llama", "qwen2", "qwen3"]

_ONE_THREAD_NUMEL = 32768  # torch's `at::internal::GRAIN_SIZE`: smaller elementwise operations stay on one thread


@dataclass(kw_only=True, frozen=True)
class RopeConfig:
    """Rotary embedding; the names are those of a Hugging Face config's `rope_parameters`."""

    rope_theta: float
    """Base of the frequencies."""
    rope_type: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    """`linear` and `llama3`: how much longer the context is than in pre-training."""
    low_freq_factor: float = 1.0
    """`llama3`: wavelengths above `original_max_position_embeddings / low_freq_factor` are stretched by `factor`."""
    high_freq_factor: float = 4.0
    """`llama3`: wavelengths below `original_max_position_embeddings / high_freq_factor` are left alone."""
    original_max_position_embeddings: float = 8192
    """`llama3`: context length of pre-training, in tokens."""


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """Shape of a model; made by `hf_config.config_from_hf`, which refuses what is not supported."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    """Even, for rotary embeddings work on pairs."""
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool
    """Biases of the query, key and value projections."""
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    """Biases of gate, up and down projections."""
    qk_norm: bool
    """RMS norm of each query and key head before the rotary embedding (Qwen3)."""
    hf_config: dict[str, Any] = field(repr=False, compare=False)
    """The Hugging Face config this was read from; written back by `save_model`."""
    hf_generation_config: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """The `generation_config.json` beside it, where there is one; written back likewise."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians a position of each rotary pair, [E / 2] float32.

    As in `transformers`' `modeling_rope_utils.py`, in float32 even for float64 models: checkpoints were trained so.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (rope.rope_theta**exponents)  # [E / 2]
    if rope.rope_type == "default":
        return frequencies
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    wavelengths = 2 * math.pi / frequencies
    long_wavelength = rope.original_max_position_embeddings / rope.low_freq_factor
    short_wavelength = rope.original_max_position_embeddings / rope.high_freq_factor
    smooth = (rope.original_max_position_embeddings / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    blended = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    stretched = torch.where(wavelengths > long_wavelength, frequencies / rope.factor, blended)
    return torch.where(wavelengths < short_wavelength, frequencies, stretched)


class RotaryTable:
    """Cosines and signed sines of all positions so far, so that a position has the same bits in every batch."""

    def __init__(self, rope: RopeConfig, head_dim: int) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.table: Tensor | None = None

    def rows(self, positions: Tensor, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` [T], each [T, 1, E]; sines of the first half of a head are negated."""
        table = self.table
        if table is None or len(table) < num_positions or table.dtype != dtype or table.device != positions.device:
            length = max(256, 1 << (num_positions - 1).bit_length())  # powers of two: a growing context rebuilds rarely
            table = self.table = self.build(length, dtype, positions.device)
        cosines, sines = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cosines, sines

    def build(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Cosines and signed sines of the positions below `length`, [length, 2 E]; a position's do not depend on it."""
        frequencies = inverse_frequencies(self.rope, self.head_dim)
        angles = torch.arange(length, dtype=torch.float32)[:, None] * frequencies  # [length, E / 2]
        cosines, sines = angles.cos(), angles.sin()
        return torch.cat((cosines, cosines, -sines, sines), dim=-1).to(device=device, dtype=dtype)  # [length, 2 E]


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotary embedding of `heads` [T, H, E]: pairs are (i, i + E / 2), as in Hugging Face checkpoints."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)  # the sign of the first half is in `sines`
    return heads * cosines + swapped * sines


def rms_norm(hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last dimension (float32 inside for half types), then `weight` in its own dtype.

    Two calls, because checkpoints were trained with the normalised value rounded before the weight multiplies it.
    """
    return functional.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight


def silu(gate: Tensor) -> Tensor:
    """`gate * sigmoid(gate)` of `gate` [T, I], with bits of a row that do not depend on the rows around it.

    On CPU torch computes the last few elements of each vector loop by another exponential than the rest. The loops go
    along the rows as long as rows are not adjacent in memory (here they are half of a wider matrix), but shares of
    several threads end anywhere in a row. So the decoder hands over pieces that torch leaves to one thread.
    """
    if torch.is_grad_enabled() or gate.device.type != "cpu":
        return functional.silu(gate)
    if gate.numel() < _ONE_THREAD_NUMEL:
        return functional.silu(gate)
    num_rows = max(1, (_ONE_THREAD_NUMEL - 1) // gate.shape[-1])
    return torch.cat([functional.silu(rows) for rows in torch.split(gate, num_rows)])


class Linear(nn.Linear):
    """A linear layer with uninitialised weights; no random state is moved.

    What `torch.nn.utils.skip_init` makes, without the import of SymPy, a second, that follows from it.
    """

    def reset_parameters(self) -> None:
        """Leave them as they are."""


class Layer(nn.Module):
    """One decoder layer: attention and gated MLP, each after a norm and with a residual connection."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps

        def vector(length: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(length, dtype=dtype, device=device))

        def linear(in_features: int, out_features: int, bias: bool) -> nn.Linear:
            return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)

        num_all_heads = self.num_heads + 2 * self.num_kv_heads
        self.attention_norm = vector(config.hidden_size)
        self.qkv_proj = linear(config.hidden_size, num_all_heads * self.head_dim, config.qkv_bias)
        self.q_norm = vector(self.head_dim) if config.qk_norm else None
        self.k_norm = vector(self.head_dim) if config.qk_norm else None
        self.o_proj = linear(self.num_heads * self.head_dim, config.hidden_size, config.output_bias)
        self.mlp_norm = vector(config.hidden_size)
        self.gate_up_proj = linear(config.hidden_size, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, config.hidden_size, config.mlp_bias)

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
        """One layer of the residual stream: [T, D] -> [T, D]."""
        q, k, v = self._attention_inputs(rms_norm(hidden, self.attention_norm, self.eps), cosines, sines)
        hidden = hidden + cast(Tensor, self.o_proj(plan.attend(layer, q, k, v).flatten(1)))
        gate, up = self.gate_up_proj(rms_norm(hidden, self.mlp_norm, self.eps)).chunk(2, dim=-1)
        return hidden + cast(Tensor, self.down_proj(silu(gate) * up))

    def _attention_inputs(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, E], rotated keys [T, K, E] and values [T, K, E] of `hidden` [T, D]."""
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 K, E]
        qk, v = heads.split_with_sizes((num_rotated, self.num_kv_heads), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q_weight, k_weight = self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)
            qk = rms_norm(qk, torch.cat((q_weight, k_weight)), self.eps)
        q, k = rotate(qk, cosines, sines).split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v


class Transformer(nn.Module):
    """Decoder-only language model; its weights are uninitialised until `load_model` or `init_model` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.gradient_checkpointing = False
        """Recompute each layer in the backward pass instead of keeping its activations."""
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))
        self.layers = nn.ModuleList(Layer(config, dtype, device) for _ in range(config.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.head = None if config.tie_word_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        self.rotary = RotaryTable(config.rope, config.head_dim)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self.embedding.dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.embedding.device

    @property
    def head_weight(self) -> Tensor:
        """Matrix from hidden states to logits, [V, D]; the embedding where the heads are tied."""
        return self.embedding if self.head is None else self.head

    def forward(self, token_ids: Tensor, plan: AttentionPlan) -> Tensor:
        """Hidden states after the final norm, [T, D], of `token_ids` [T] int64 that attend as `plan` says."""
        hidden = functional.embedding(token_ids, self.embedding)  # [T, D]
        cosines, sines = self.rotary.rows(plan.positions, plan.num_positions, hidden.dtype)
        recompute = self.gradient_checkpointing and torch.is_grad_enabled()
        for index, layer in enumerate(self.layers):
            if recompute:  # no random state is kept, for nothing draws from it
                hidden = checkpoint(
                    layer, hidden, cosines, sines, plan, index, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, cosines, sines, plan, index)
        return rms_norm(hidden, self.final_norm, self.config.rms_norm_eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of `hidden` [..., D], in the dtype of the weights: [..., V]."""
        return functional.linear(hidden, self.head_weight)
