"""The decoder's forward pass on a CUDA device: `Transformer.forward` with fused kernels between the matrix products.

Nine launches per layer: four matrix products, two residual adds with their norms, rotation and store, attention, and
the gated activation; one more where keys are split, and one for each norm that a family has beside these. All that is
read lies at fixed addresses and nothing here asks the device anything, so a CUDA graph can hold it.

Each kernel rounds where `transformer.py` rounds: half types are computed in float32 and rounded after every operation
that the eager model does alone. So the elementwise parts have its bits; sums over a row differ in their order. Every
program takes one row, or a part of one, so the bits of a row do not depend on other rows. Letters: `srtrl/types.py`.
"""

from collections.abc import Sequence
from typing import cast

import torch
import triton
import triton.language as tl
from torch import Tensor

from srtrl.cuda.attention import attend_tree
from srtrl.cuda.jit import jit
from srtrl.cuda.tiles import AttentionScratch, TiledRows
from srtrl.model.paged_attention import KVCache
from srtrl.model.transformer import LLAMA, Layer, LayerStates, Style, Transformer, keep_state

HEADS_AT_ONCE = 16
"""Heads of a row that one program of `rope_and_store` takes, and of the update's rotation."""
_NUMBERS_AT_ONCE = 1024  # of a row that one program of `gated` takes
_PATHS_AT_ONCE = 32  # paths whose KV is moved at the same time in each layer
GELU_SCALE = tl.constexpr(1.5957691216057308)  # 2 sqrt(2 / pi)


@torch.inference_mode()
def fused_forward(
    model: Transformer,
    cache: KVCache,
    rows: TiledRows,
    *,
    rotary: Sequence[Tensor],
    block_m: int,
    num_splits: int,
    scratch: AttentionScratch,
    out: Tensor,
    states: LayerStates = (),
) -> None:
    """Write the hidden states after the final norm into `out` [N, D]; those of padding rows are anything finite.

    Args:
        model: Its weights are float32 or bfloat16, as is the cache.
        cache: Token-major; the rows' keys and values are written.
        rows: On the device; token ids of padding rows too must be tokens of the vocabulary.
        rotary: [more than every position, 2 E] each, `RotaryTable.build`: tables of the decoder's own, for the update
            may replace the model's at any step, and a captured graph would then read memory that is freed.
        block_m: See `attend_tree`; the tiles of `rows` were made for it.
        num_splits: See `attend_tree`.
        scratch: Partial results of the attention.
        out: [N, D].
        states: See `Transformer.forward`.
    """
    eps, style = model.config.rms_norm_eps, model.config.style
    hidden = model.embed(rows.token_ids)  # [N, D], from here on the residual stream
    # Zeros, for the kernel leaves padding rows out, and 0 * NaN is NaN.
    attended = hidden.new_zeros(len(hidden), model.config.num_attention_heads, model.config.head_dim)
    update = None
    for index, module in enumerate(model.layers):
        layer = cast(Layer, module)
        keys, values = cache.kernel_keys(index), cache.kernel_values(index)
        table = rotary[model.layer_rotary[index]]
        normed = add_rms_norm(hidden, update, layer.attention_norm, eps, style)
        keep_state(states, index, hidden)
        norms = None if layer.q_norm is None or layer.k_norm is None else (layer.q_norm, layer.k_norm)
        qkv = layer.qkv_proj(normed)  # [N, (H + 2 K) E]
        if norms is not None and style.qk_norm == "projection":
            q_width = len(norms[0])
            for heads, weight in zip((qkv[:, :q_width], qkv[:, q_width : q_width + len(norms[1])]), norms, strict=True):
                add_rms_norm(heads, None, weight, eps, style, out=heads)
            norms = None
        q = rope_and_store(
            qkv, table, rows.positions, rows.kv_indices, keys, values, norms, eps, layer.rotary_dim, style
        )
        attend_tree(
            *(q, keys, values, rows, attended),
            scratch=scratch,
            block_m=block_m,
            num_splits=num_splits,
            window=layer.window,
        )
        update = layer.o_proj(attended.flatten(1))
        if layer.attention_out_norm is not None:
            update = add_rms_norm(update, None, layer.attention_out_norm, eps, style)
        normed = add_rms_norm(hidden, update, layer.mlp_norm, eps, style)
        update = layer.down_proj(gated(layer.gate_up_proj(normed), style))
        if layer.mlp_out_norm is not None:
            update = add_rms_norm(update, None, layer.mlp_out_norm, eps, style)
    add_rms_norm(hidden, update, model.final_norm, eps, style, out=out)
    keep_state(states, len(model.layers), hidden)
    if style.logit_scale != 1:
        out.mul_(style.logit_scale)


def add_rms_norm(
    hidden: Tensor,
    update: Tensor | None,
    weight: Tensor | None,
    eps: float,
    style: Style = LLAMA,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Add `update` to the residual stream `hidden`, both [N, D], in place; returns its `transformer.rms_norm`, [N, D].

    Without `update` only the norm; without `weight` only the sum, which is returned. The norm is written to `out`
    [N, D] where that is given; it may be `hidden`, and then a part of wider rows.
    """
    if weight is None:
        return hidden if update is None else hidden.add_(update)
    num_rows, width = hidden.shape
    normed = torch.empty_like(hidden) if out is None else out
    added = hidden if update is None else update
    assert all(tensor.stride() == (hidden.stride(0), 1) for tensor in (hidden, added, normed) if num_rows > 1)
    assert added.shape == normed.shape == hidden.shape
    block = triton.next_power_of_2(width)
    add_rms_norm_rows[(num_rows,)](
        *(hidden, added, weight, normed, eps, hidden.stride(0)),
        WIDTH=width,
        BLOCK=block,
        HAS_UPDATE=update is not None,
        UPDATE_SCALE=style.residual_scale,
        WIDE=style.wide_norms,
        OFFSET=style.norm_offset,
        num_warps=min(8, max(1, block // 512)),
        enable_fp_fusion=False,
    )
    return normed


@jit
def add_rms_norm_rows(
    hidden: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    UPDATE_SCALE: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """One program per row."""
    dtype: tl.constexpr = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = tl.program_id(0).to(tl.int64) * stride
    stream = tl.load(hidden + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        added = tl.load(update + start + columns, mask=inside, other=0.0).to(tl.float32)
        if UPDATE_SCALE != 1:
            added = rounded(added * UPDATE_SCALE, dtype)
        stream = rounded(stream + added, dtype)
        tl.store(hidden + start + columns, stream, mask=inside)
    factor = tl.rsqrt(tl.sum(stream * stream, axis=0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    scaled = stream * factor if WIDE else rounded(stream * factor, dtype)
    tl.store(normed + start + columns, scaled * (weights + OFFSET), mask=inside)


def gated(gate_up: Tensor, style: Style = LLAMA) -> Tensor:
    """`transformer.activate(gate) * up`, [N, I], of the fused projection's rows `gate_up` [N, 2 I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, width)
    block = min(_NUMBERS_AT_ONCE, triton.next_power_of_2(width))
    gated_rows[(num_rows, triton.cdiv(width, block))](
        *(gate_up, out),
        WIDTH=width,
        BLOCK=block,
        IS_GELU=style.activation == "gelu_tanh",
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


@jit
def load_gates(
    gate_up: tl.tensor, columns: tl.tensor, WIDTH: tl.constexpr, IS_GELU: tl.constexpr
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Gates and what they open of a row, float32, and the argument a of the activation x sigmoid(a).

    SiLU: a = x. GELU by tanh: a = 2 sqrt(2 / pi) (x + 0.044715 x^3).
    """
    inside = columns < WIDTH
    gate = tl.load(gate_up + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    argument = GELU_SCALE * (gate + 0.044715 * gate * gate * gate) if IS_GELU else gate
    return gate, up, argument


@jit
def gated_rows(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, IS_GELU: tl.constexpr
) -> None:
    """One program per row and block."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate, up, argument = load_gates(gate_up + row * 2 * WIDTH, columns, WIDTH, IS_GELU)
    activated = rounded(tl.div_rn(gate, 1.0 + tl.exp(-argument)), out.dtype.element_ty)
    tl.store(out + row * WIDTH + columns, activated * up, mask=inside)


def move_kv(cache: KVCache, num_moves: Tensor, moves: Tensor) -> None:
    """Move single KV positions in all layers, path by path; the moves of a path one after the other.

    Args:
        cache: Token-major.
        num_moves: [1] int32; at most as many as `moves` has room for.
        moves: [room, 3] int32, see `srtrl.engine.verify.plan_moves`.
    """
    keys, values = cache.key_pages.permute(0, 1, 4, 2, 3), cache.value_pages.transpose(2, 3)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    num_layers, num_pages, page_size, num_kv_heads, head_dim = keys.shape
    width = num_kv_heads * head_dim
    move_kv_paths[(_PATHS_AT_ONCE, num_layers)](
        *(num_moves, moves, keys, values, num_pages * page_size * width),
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width),
        PATHS_AT_ONCE=_PATHS_AT_ONCE,
        num_warps=4,
        enable_fp_fusion=False,
    )


@jit
def move_kv_paths(
    num_moves: tl.tensor,
    moves: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    layer_stride: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    PATHS_AT_ONCE: tl.constexpr,
) -> None:
    """Grid (programs, layers). A thread reads and writes the same numbers of each position, so it needs no barrier."""
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    layer = tl.program_id(1).to(tl.int64) * layer_stride
    for first in range(tl.program_id(0), tl.load(num_moves), PATHS_AT_ONCE):
        for move in range(first, first + tl.load(moves + 3 * first + 2)):  # none where a path is under way
            source = layer + tl.load(moves + 3 * move).to(tl.int64) * WIDTH + columns
            target = layer + tl.load(moves + 3 * move + 1).to(tl.int64) * WIDTH + columns
            key, value = tl.load(keys + source, mask=inside), tl.load(values + source, mask=inside)
            tl.store(keys + target, key, mask=inside)
            tl.store(values + target, value, mask=inside)


@jit
def rounded(value: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Float32 `value` as it reads once it was stored in DTYPE."""
    return value.to(DTYPE).to(tl.float32)


def rope_and_store(
    qkv: Tensor,
    rotary: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    keys: Tensor,
    values: Tensor,
    qk_norm: tuple[Tensor, Tensor] | None,
    eps: float,
    rotary_dim: int,
    style: Style = LLAMA,
) -> Tensor:
    """Rotate queries and keys and store keys and values, of the fused projection's rows.

    Args:
        qkv: [N, (H + 2 K) E].
        rotary: [length, 2 E], `RotaryTable.table`, longer than every position, in the type of `qkv`.
        positions: [N] int32.
        kv_indices: [N] int32; a row of -1 stores nothing.
        keys: One layer of a token-major cache, [num_pages, page_size, K, E], written.
        values: Likewise.
        qk_norm: Weights [E] of the norms of query and key heads, before the rotation or after it (`Style.qk_norm`).
        eps: Of these norms.
        rotary_dim: Numbers of a head that are rotated, the first ones.
        style: Which of them are pairs, and how the norms round.

    Returns:
        The rotated queries, [N, H, E].
    """
    num_rows = len(qkv)
    num_kv_heads, head_dim = keys.shape[2:]
    num_all = qkv.shape[1] // head_dim
    num_heads = num_all - 2 * num_kv_heads
    assert all(tensor.is_contiguous() for tensor in (qkv, keys, values))
    assert rotary.shape[1] == 2 * head_dim
    assert rotary.dtype == qkv.dtype == keys.dtype
    q_weight, k_weight = (rotary, rotary) if qk_norm is None else qk_norm
    queries = qkv.new_empty(num_rows, num_heads, head_dim)
    at_once = min(HEADS_AT_ONCE, triton.next_power_of_2(num_all))
    rope_and_store_heads[(num_rows, triton.cdiv(num_all, at_once))](
        *(qkv, rotary, positions, kv_indices, queries, keys, values, q_weight, k_weight, eps),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK=triton.next_power_of_2(head_dim),
        HEADS_AT_ONCE=at_once,
        QK_NORM="none" if qk_norm is None else "rotated" if style.qk_norm == "rotated" else "head",
        ROTARY=rotary_dim,
        INTERLEAVED=style.interleaved,
        WIDE=style.wide_norms,
        OFFSET=style.norm_offset,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return queries


@jit
def rope_and_store_heads(
    qkv: tl.tensor,
    rotary: tl.tensor,
    positions: tl.tensor,
    kv_indices: tl.tensor,
    queries: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    QK_NORM: tl.constexpr,
    ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """One program per row and group of heads, of queries, keys, values in this order."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    lanes = tl.arange(0, BLOCK)[None, :]
    partners = partner_lanes(lanes, ROTARY, INTERLEAVED)
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (lanes < HEAD_DIM)
    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS
    source = qkv + (row * (NUM_HEADS + 2 * NUM_KV_HEADS) + heads) * HEAD_DIM
    loaded = tl.load(source + lanes, mask=inside, other=0.0)
    x, partner = loaded.to(tl.float32), tl.load(source + partners, mask=inside, other=0.0).to(tl.float32)
    if QK_NORM == "head":
        factor = tl.rsqrt(tl.sum(x * x, axis=1) / HEAD_DIM + eps)[:, None]
        x = normed_heads(x * factor, q_weight + lanes, k_weight + lanes, inside, is_query, dtype, WIDE, OFFSET)
        weights = q_weight + partners, k_weight + partners
        partner = normed_heads(partner * factor, weights[0], weights[1], inside, is_query, dtype, WIDE, OFFSET)
    angles = rotary + tl.load(positions + row).to(tl.int64) * (2 * HEAD_DIM) + lanes
    cosine = tl.load(angles, mask=lanes < HEAD_DIM, other=0.0).to(tl.float32)
    sine = tl.load(angles + HEAD_DIM, mask=lanes < HEAD_DIM, other=0.0).to(tl.float32)  # negated in the first half
    turned = rounded(x * cosine, dtype) + rounded(partner * sine, dtype)
    if QK_NORM == "rotated":
        turned = rounded(turned, dtype)
        factor = tl.rsqrt(tl.sum(turned * turned, axis=1) / HEAD_DIM + eps)[:, None]
        turned = normed_heads(
            turned * factor, q_weight + lanes, k_weight + lanes, inside, is_query, dtype, WIDE, OFFSET
        )
    tl.store(queries + (row * NUM_HEADS + heads) * HEAD_DIM + lanes, turned, mask=inside & is_query)

    index = tl.load(kv_indices + row).to(tl.int64)
    stored = inside & (lanes < tl.where(index >= 0, HEAD_DIM, 0))
    key = keys + (index * NUM_KV_HEADS + heads - NUM_HEADS) * HEAD_DIM + lanes
    tl.store(key, turned, mask=stored & (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS))
    value = values + (index * NUM_KV_HEADS + heads - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM + lanes
    tl.store(value, loaded, mask=stored & is_value)


@jit
def partner_lanes(lanes: tl.tensor, ROTARY: tl.constexpr, INTERLEAVED: tl.constexpr) -> tl.tensor:
    """The other number of each rotated pair; of a number that is not rotated itself."""
    partners = lanes ^ 1 if INTERLEAVED else (lanes + ROTARY // 2) % ROTARY
    return tl.where(lanes < ROTARY, partners, lanes)


@jit
def normed_heads(
    scaled: tl.tensor,
    q_weights: tl.tensor,
    k_weights: tl.tensor,
    inside: tl.tensor,
    is_query: tl.tensor,
    DTYPE: tl.constexpr,
    WIDE: tl.constexpr,
    OFFSET: tl.constexpr,
) -> tl.tensor:
    """Heads that are `scaled` to length times their norm's weights: one vector for query heads, one for key heads."""
    of_queries = tl.load(q_weights, mask=inside & is_query, other=0.0)
    of_keys = tl.load(k_weights, mask=inside & ~is_query, other=0.0)
    scaled = scaled if WIDE else rounded(scaled, DTYPE)
    return rounded(scaled * ((of_queries + of_keys).to(tl.float32) + OFFSET), DTYPE)
