"""One transformer for decode and update, of all families that `hf_config.py` reads.

What differs between them is in two records: `LayerKind`, one a layer, and `Style`, one a model.
Everything here works on each token alone; tokens meet only in `plan.attend`. The query, key and value projections are
one matrix, and so are the gate and up projections, because at decode sizes each operator costs more to launch than to
compute; `weights.py` splits and merges them. Numerics (float32 rotary table and norms, order of casts) are those of
`transformers`' `modeling_llama.py` and its kin, on which the checkpoints were trained.
Dimension letters: see `srtrl/types.py`; here T is the tokens of one forward pass, packed or of a decode step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from srtrl.model.attention import AttentionPlan
from srtrl.model.logprobs import PLAIN_SOFTMAX

_ONE_THREAD_NUMEL = {"silu": 32768, "gelu_tanh": 16384}
"""Smaller operations stay on one thread: torch's `at::internal::GRAIN_SIZE`, and the same of its GELU."""


class RopeConfig(NamedTuple):
    """Rotary embedding of a layer."""

    frequencies: tuple[float, ...] = ()
    """Radians per position of each rotated pair, numbers of float32; the rest of a head is not rotated."""
    factor: float = 1.0
    """Multiplies cosines and sines: the attention factor of YaRN and LongRoPE."""


class LayerKind(NamedTuple):
    """Differences between the layers of a model."""

    rope: RopeConfig
    window: int | None = None
    """Positions that a token sees, its own included; None: all before it."""


class Style(NamedTuple):
    """Differences between families in all layers; the default is Llama's."""

    norms: Literal["pre", "post", "sandwich"] = "pre"
    """RMS norms of a layer: before attention and MLP, after them and before the residual sum, or both."""
    qk_norm: Literal["none", "head", "projection", "rotated"] = "none"
    """RMS norms of queries and keys before the rotation, of each head or of all together; or of each head after it."""
    wide_norms: bool = False
    """The norms' weights multiply in float32, before the result is rounded."""
    norm_offset: float = 0.0
    """Added to the weights of wide norms: 1 where they are stored about 0."""
    activation: Literal["silu", "gelu_tanh"] = "silu"
    """Activation of the MLP's gate."""
    interleaved: bool = False
    """Rotated pairs are (2 i, 2 i + 1) instead of (i, i + half of the rotated width)."""
    attention_scale: float = 1.0
    """Multiplies the attention's scores, on top of E**-0.5."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """Factor of the parts that attention and MLP add to the residual stream."""
    logit_scale: float = 1.0


LLAMA = Style()


@dataclass(kw_only=True, frozen=True)
class ModelConfig:
    """Shape of a model; made by `hf_config.config_from_hf`, which refuses all other shapes."""

    model_type: str
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
    layers: tuple[LayerKind, ...] = field(repr=False)
    """Kinds of the layers in their order, repeated where there are more layers."""
    style: Style = LLAMA
    tie_word_embeddings: bool = False
    qkv_bias: bool
    """Biases of the query, key and value projections."""
    output_bias: bool
    """Bias of the attention's output projection."""
    mlp_bias: bool
    """Biases of gate, up and down projections."""
    hf_config: dict[str, Any] = field(repr=False, compare=False)
    """The Hugging Face config this was read from; written back by `save_model`."""
    hf_generation_config: dict[str, Any] | None = field(default=None, repr=False, compare=False)
    """The `generation_config.json` beside it, where there is one; written back likewise."""

    @property
    def layer_kinds(self) -> list[LayerKind]:
        """The kind of each layer."""
        return [self.layers[index % len(self.layers)] for index in range(self.num_hidden_layers)]

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that are rotated, the first ones."""
        return 2 * max(len(kind.rope.frequencies) for kind in self.layers)


def inverse_frequencies(base: float, rotary_dim: int) -> Tensor:
    """Radians per position of each rotated pair by the original rule, [rotary_dim / 2] float32.

    In float32 even for float64 models: checkpoints were trained so.
    """
    return 1.0 / (base ** (torch.arange(0, rotary_dim, 2, dtype=torch.int64).to(torch.float32) / rotary_dim))


class RotaryTable:
    """Cosines and signed sines of all positions so far, so that a position has the same bits in every batch."""

    def __init__(self, rope: RopeConfig, head_dim: int, style: Style) -> None:
        self.rope = rope
        self.head_dim = head_dim
        self.style = style
        self.table: Tensor | None = None

    def rows(self, positions: Tensor, num_positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines of `positions` [T], each [T, 1, E]; sines of the first of a pair are negated."""
        table = self.table
        if table is None or len(table) < num_positions or table.dtype != dtype or table.device != positions.device:
            length = max(256, 1 << (num_positions - 1).bit_length())  # powers of two: a growing context rebuilds rarely
            table = self.table = self.build(length, dtype, positions.device)
        cosines, sines = table.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
        return cosines, sines

    def build(self, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Cosines and signed sines of the positions below `length`, [length, 2 E]; a position's do not depend on it.

        Numbers that are not rotated have 1 and 0. The scale of the attention is here: its root, for queries and keys.
        """
        angles = torch.arange(length, dtype=torch.float32)[:, None] * torch.tensor(self.rope.frequencies)  # [length, P]
        cosines, sines = angles.cos() * self.rope.factor, angles.sin() * self.rope.factor
        dim = -1 if self.style.interleaved else -2  # pairs beside each other, or halves
        cosines = torch.stack((cosines, cosines), dim).flatten(1)
        sines = torch.stack((-sines, sines), dim).flatten(1)
        rest = torch.ones(length, self.head_dim - cosines.shape[1])
        table = torch.cat((cosines, rest, sines, torch.zeros_like(rest)), dim=-1)  # [length, 2 E]
        scale = float(self.style.attention_scale**0.5)
        return (table.to(torch.promote_types(dtype, torch.float32)) * scale).to(device=device, dtype=dtype)


def rotate(heads: Tensor, cosines: Tensor, sines: Tensor, rotary_dim: int, style: Style = LLAMA) -> Tensor:
    """Rotary embedding of `heads` [T, H, E], of whose numbers the first `rotary_dim` are rotated; see `Style`."""
    rotated = heads if rotary_dim == heads.shape[-1] else heads[..., :rotary_dim]
    if style.interleaved:
        swapped = rotated.reshape(*rotated.shape[:-1], -1, 2).flip(-1).flatten(-2)
    else:
        swapped = rotated.roll(rotary_dim // 2, dims=-1)  # the sign of the first half is in `sines`
    if rotated is not heads:
        swapped = torch.cat((swapped, heads[..., rotary_dim:]), dim=-1)
    return heads * cosines + swapped * sines


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, style: Style = LLAMA) -> Tensor:
    """Root-mean-square norm over the last dimension (float32 inside for half types), then `weight` in its own dtype.

    Two calls, because most checkpoints were trained with the normalised value rounded before the weight multiplies it.
    """
    if not style.wide_norms:
        return functional.rms_norm(hidden, hidden.shape[-1:], None, eps) * weight
    wide = torch.promote_types(hidden.dtype, torch.float32)
    normed = functional.rms_norm(hidden.to(wide), hidden.shape[-1:], None, eps)
    return (normed * (weight.to(wide) + style.norm_offset)).to(hidden.dtype)


def activate(gate: Tensor, activation: Literal["silu", "gelu_tanh"] = "silu") -> Tensor:
    """SiLU, or GELU by tanh, of `gate` [T, I], with bits of a row that do not depend on the rows around it.

    On CPU torch computes the last few elements of each vector loop by another exponential than the rest. The loops go
    along the rows as long as rows are not adjacent in memory (here they are half of a wider matrix), but shares of
    several threads end anywhere in a row. So the decoder hands over pieces that torch leaves to one thread.
    """
    function = functional.silu if activation == "silu" else partial(functional.gelu, approximate="tanh")
    numel = _ONE_THREAD_NUMEL[activation]
    if torch.is_grad_enabled() or gate.device.type != "cpu" or gate.numel() < numel:
        return function(gate)
    num_rows = max(1, (numel - 1) // gate.shape[-1])
    return torch.cat([function(rows) for rows in torch.split(gate, num_rows)])


def gated(gate_up: Tensor, style: Style = LLAMA) -> Tensor:
    """The activation of the first half of each row, times the second half: [T, I] of [T, 2 I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activate(gate, style.activation) * up


class Linear(nn.Linear):
    """A linear layer with uninitialised weights; no random state is moved.

    What `torch.nn.utils.skip_init` makes, without the import of SymPy, a second, that follows from it.
    """

    def reset_parameters(self) -> None:
        """Leave the weights uninitialised."""


class Layer(nn.Module):
    """One decoder layer: attention and gated MLP, each with norms before it, after it or both, and added."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: torch.dtype,
        device: torch.device,
        window: int | None = None,
        *,
        input_width: int | None = None,
    ) -> None:
        """A layer with uninitialised weights; attention reads `input_width` numbers of a token, by default D."""
        super().__init__()
        self.window = window
        self.gated: Callable[[Tensor, Style], Tensor] = gated
        """The MLP's activation; `srtrl/cuda/update.py` replaces it by a kernel."""
        self.rotate: Callable[[Tensor, Tensor, Tensor, int, Style], Tensor] = rotate
        """The rotary embedding, likewise."""
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.eps = config.rms_norm_eps
        self.style = style = config.style
        self.rotary_dim = config.rotary_dim

        def vector(length: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(length, dtype=dtype, device=device))

        def linear(in_features: int, out_features: int, bias: bool) -> nn.Linear:
            return Linear(in_features, out_features, bias=bias, dtype=dtype, device=device)

        width = config.hidden_size
        has_norms_before, has_norms_after = style.norms != "post", style.norms != "pre"
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        norm_widths = (q_width, kv_width) if style.qk_norm == "projection" else (self.head_dim, self.head_dim)
        self.attention_norm = vector(width) if has_norms_before else None
        self.qkv_proj = linear(input_width or width, q_width + 2 * kv_width, config.qkv_bias)
        self.q_norm = vector(norm_widths[0]) if style.qk_norm != "none" else None
        self.k_norm = vector(norm_widths[1]) if style.qk_norm != "none" else None
        self.o_proj = linear(q_width, width, config.output_bias)
        self.attention_out_norm = vector(width) if has_norms_after else None
        self.mlp_norm = vector(width) if has_norms_before else None
        self.gate_up_proj = linear(width, 2 * config.intermediate_size, config.mlp_bias)
        self.down_proj = linear(config.intermediate_size, width, config.mlp_bias)
        self.mlp_out_norm = vector(width) if has_norms_after else None

    def forward(self, hidden: Tensor, cosines: Tensor, sines: Tensor, plan: AttentionPlan, layer: int) -> Tensor:
        """One layer of the residual stream: [T, D] -> [T, D]."""
        return self.attend(self._normed(hidden, self.attention_norm), hidden, cosines, sines, plan, layer)

    def attend(
        self, inputs: Tensor, hidden: Tensor, cosines: Tensor, sines: Tensor, plan: AttentionPlan, layer: int
    ) -> Tensor:
        """Add the attention of `inputs`, which its projections read, and the MLP to the residual stream [T, D]."""
        q, k, v = self.project(inputs, cosines, sines)
        attended = self.o_proj(plan.attend(layer, q, k, v, self.window).flatten(1))
        hidden = hidden + self._update(attended, self.attention_out_norm)
        gate_up = self.gate_up_proj(self._normed(hidden, self.mlp_norm))
        return hidden + self._update(self.down_proj(self.gated(gate_up, self.style)), self.mlp_out_norm)

    def _normed(self, hidden: Tensor, weight: Tensor | None) -> Tensor:
        return hidden if weight is None else rms_norm(hidden, weight, self.eps, self.style)

    def _update(self, output: Tensor, weight: Tensor | None) -> Tensor:
        """The part that attention or MLP adds to the residual stream, [T, D]."""
        update, scale = self._normed(output, weight), self.style.residual_scale
        return update if scale == 1 else update * scale

    def project(self, hidden: Tensor, cosines: Tensor, sines: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [T, H, E], rotated keys [T, K, E] and values [T, K, E] of `hidden` [T, D]."""
        num_rotated = self.num_heads + self.num_kv_heads
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim))  # [T, H + 2 K, E]
        qk, v = heads.split_with_sizes((num_rotated, self.num_kv_heads), dim=1)
        is_rotated = self.style.qk_norm == "rotated"
        qk = qk if is_rotated else self._normed_heads(qk)
        qk = self.rotate(qk, cosines, sines, self.rotary_dim, self.style)
        qk = self._normed_heads(qk) if is_rotated else qk
        q, k = qk.split_with_sizes((self.num_heads, self.num_kv_heads), dim=1)
        return q, k, v

    def _normed_heads(self, qk: Tensor) -> Tensor:
        """Queries and keys [T, H + K, E] through their norms, where the style has some."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        if self.style.qk_norm != "projection":
            q_weight, k_weight = self.q_norm.expand(self.num_heads, -1), self.k_norm.expand(self.num_kv_heads, -1)
            return rms_norm(qk, torch.cat((q_weight, k_weight)), self.eps, self.style)
        q, k = qk.flatten(1).split_with_sizes((len(self.q_norm), len(self.k_norm)), dim=1)
        return torch.cat((self._normed(q, self.q_norm), self._normed(k, self.k_norm)), dim=1).view(qk.shape)


LayerStates = Sequence[tuple[int, Tensor]]
"""Numbers of layers (0: the embedding), each with a tensor [T, D] that gets the residual stream after it."""


def layer_states(numbers: Sequence[int], out: Tensor) -> LayerStates:
    """The streams after these layers side by side, in `out` [T, len(numbers) D]."""
    return list(zip(numbers, out.chunk(max(1, len(numbers)), dim=-1), strict=False))  # of none: one empty part


def keep_state(states: LayerStates, number: int, hidden: Tensor) -> None:
    """Copy the residual stream [T, D] after `number` layers to where it is wanted."""
    for wanted, place in states:
        if wanted == number:
            place.copy_(hidden)


class Transformer(nn.Module):
    """Decoder-only language model; its weights are uninitialised until `load_model` or `init_model` fills them."""

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()
        device = torch.device(device)
        self.config = config
        self.gradient_checkpointing: bool | Literal["half"] = False
        """Recompute each layer in the backward pass instead of keeping its activations; `half`: every second one."""
        self.softmax = PLAIN_SOFTMAX
        """Computes the log-probs of its update."""
        self.embedding = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size, dtype=dtype, device=device))
        kinds = config.layer_kinds
        self.layers = nn.ModuleList(Layer(config, dtype, device, kind.window) for kind in kinds)
        self.final_norm = nn.Parameter(torch.empty(config.hidden_size, dtype=dtype, device=device))
        self.head = None if config.tie_word_embeddings else nn.Parameter(torch.empty_like(self.embedding))
        ropes = list(dict.fromkeys(kind.rope for kind in config.layers))
        self.rotary = [RotaryTable(rope, config.head_dim, config.style) for rope in ropes]
        self.layer_rotary = [ropes.index(kind.rope) for kind in kinds]
        """Index into `rotary` of each layer."""
        self.carried: dict[str, Tensor] = {}
        """Tensors of the folder that the model does not use, by name, on the host: saved with it, unchanged."""
        self.embedding_scale = torch.tensor(config.style.embedding_scale, dtype=dtype, device="cpu").item()

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

    def forward(self, token_ids: Tensor, plan: AttentionPlan, states: LayerStates = ()) -> Tensor:
        """Hidden states after the final norm, [T, D], of `token_ids` [T] int64 that attend as `plan` says.

        `states` are filled; not for passes with gradients.
        """
        hidden = self.embed(token_ids)
        rotations = [table.rows(plan.positions, plan.num_positions, hidden.dtype) for table in self.rotary]
        mode = self.gradient_checkpointing if torch.is_grad_enabled() else False
        for index, layer in enumerate(self.layers):
            keep_state(states, index, hidden)
            cosines, sines = rotations[self.layer_rotary[index]]
            if mode is True or (mode == "half" and index % 2 == 0):  # no random state is kept: nothing draws from it
                hidden = checkpoint(
                    layer, hidden, cosines, sines, plan, index, use_reentrant=False, preserve_rng_state=False
                )
            else:
                hidden = layer(hidden, cosines, sines, plan, index)
        keep_state(states, len(self.layers), hidden)
        hidden = rms_norm(hidden, self.final_norm, self.config.rms_norm_eps, self.config.style)
        scale = self.config.style.logit_scale  # here, so that everything that makes logits of them has it
        return hidden if scale == 1 else hidden * scale

    def embed(self, token_ids: Tensor) -> Tensor:
        """The residual stream before the first layer, [T, D]."""
        hidden = functional.embedding(token_ids, self.embedding)  # [T, D]
        return hidden if self.embedding_scale == 1 else hidden * self.embedding_scale

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of `hidden` [..., D], in the dtype of the weights: [..., V]."""
        return functional.linear(hidden, self.head_weight)
