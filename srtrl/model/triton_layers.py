"""What lies between the matrix products of a decode step on a CUDA device: one kernel each, in place where it can be.

Each rounds where `transformer.py` rounds: half types are computed in float32 and rounded after every operation that the
eager model does alone. So the elementwise parts have its bits; sums over a row differ in their order. Every program
takes one row, or a part of one, so the bits of a row do not depend on other rows. Nothing here asks
the device anything, so a CUDA graph can hold it. Letters: see `srtrl/types.py`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from srtrl.model.triton_jit import jit

_PIECE = 1024  # elements of a row that one program of `silu_and_mul` takes
_HEADS_AT_ONCE = 16  # heads of a row that one program of `rope_and_store` takes


def add_rms_norm(
    hidden: Tensor, update: Tensor | None, weight: Tensor, eps: float, *, out: Tensor | None = None
) -> Tensor:
    """Add `update` to the residual stream `hidden`, both [N, D], in place; returns its `transformer.rms_norm`, [N, D].

    Without `update` only the norm. It is written to `out` [N, D] where that is given.
    """
    num_rows, width = hidden.shape
    assert hidden.is_contiguous()
    assert update is None or (update.is_contiguous() and update.shape == hidden.shape)
    normed = torch.empty_like(hidden) if out is None else out
    assert normed.is_contiguous()
    block = triton.next_power_of_2(width)
    add_rms_norm_rows[(num_rows,)](
        hidden,
        hidden if update is None else update,
        weight,
        normed,
        eps,
        WIDTH=width,
        BLOCK=block,
        HAS_UPDATE=update is not None,
        BY_BITS=_INTERPRETED,
        num_warps=min(8, max(1, block // 512)),
        enable_fp_fusion=False,
    )
    return normed


def rope_and_store(
    qkv: Tensor,
    rotary: Tensor,
    positions: Tensor,
    kv_indices: Tensor,
    keys: Tensor,
    values: Tensor,
    qk_norm: tuple[Tensor, Tensor] | None,
    eps: float,
) -> Tensor:
    """Rotate queries and keys and store keys and values, of the fused projection's rows.

    Args:
        qkv: [N, (H + 2 K) E]; the queries are rotated in place, keys and values stay.
        rotary: [length, 2 E], `RotaryTable.table`, longer than every position, in the type of `qkv`.
        positions: [N] int32.
        kv_indices: [N] int32; a row of -1 stores nothing.
        keys: One layer of a token-major cache, [num_pages, page_size, K, E], written.
        values: Likewise.
        qk_norm: Weights [E] of the norms of query and key heads before the rotation (Qwen3).
        eps: Of these norms.

    Returns:
        The rotated queries, [N, H, E], a view of `qkv`.
    """
    num_rows = len(qkv)
    num_kv_heads, head_dim = keys.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    assert all(tensor.is_contiguous() for tensor in (qkv, keys, values))
    assert rotary.shape[1] == 2 * head_dim
    assert rotary.dtype == qkv.dtype == keys.dtype
    q_weight, k_weight = (rotary, rotary) if qk_norm is None else qk_norm
    num_all = num_heads + 2 * num_kv_heads
    at_once = min(_HEADS_AT_ONCE, triton.next_power_of_2(num_all))
    rope_and_store_heads[(num_rows, triton.cdiv(num_all, at_once))](
        qkv,
        rotary,
        positions,
        kv_indices,
        keys,
        values,
        q_weight,
        k_weight,
        eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF_BLOCK=triton.next_power_of_2(head_dim // 2),
        HEADS_AT_ONCE=at_once,
        QK_NORM=qk_norm is not None,
        BY_BITS=_INTERPRETED,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return qkv.view(num_rows, num_all, head_dim)[:, :num_heads]


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """`silu(gate) * up` of the fused projection's rows [N, 2 I], each gate and then up: [N, I]."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, width)
    block = min(_PIECE, triton.next_power_of_2(width))
    silu_and_mul_rows[(num_rows, triton.cdiv(width, block))](
        gate_up, out, WIDTH=width, BLOCK=block, BY_BITS=_INTERPRETED, num_warps=4, enable_fp_fusion=False
    )
    return out


@jit
def rounded(value: tl.tensor, DTYPE: tl.constexpr, BY_BITS: tl.constexpr) -> tl.tensor:
    """Float32 `value` as it reads once it was stored in DTYPE: to the nearest, ties to even, as the hardware converts.

    Triton's interpreter truncates to bfloat16; there BY_BITS has it done on the bits. What a kernel stores must have
    gone through here last.
    """
    if BY_BITS and tl.bfloat16 == DTYPE:
        bits = value.to(tl.uint32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        near = tl.where(value == value, upper.to(tl.float32, bitcast=True), value)  # noqa: PLR0124
    else:
        near = value.to(DTYPE).to(tl.float32)
    return near


@jit
def add_rms_norm_rows(
    hidden: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_UPDATE: tl.constexpr,
    BY_BITS: tl.constexpr,
) -> None:
    """One program per row."""
    dtype: tl.constexpr = hidden.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    start = tl.program_id(0).to(tl.int64) * WIDTH
    stream = tl.load(hidden + start + columns, mask=inside, other=0.0).to(tl.float32)
    if HAS_UPDATE:
        added = tl.load(update + start + columns, mask=inside, other=0.0).to(tl.float32)
        stream = rounded(stream + added, dtype, BY_BITS)
        tl.store(hidden + start + columns, stream, mask=inside)
    factor = tl.rsqrt(tl.sum(stream * stream, axis=0) / WIDTH + eps)
    weights = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    product = rounded(stream * factor, dtype, BY_BITS) * weights
    tl.store(normed + start + columns, rounded(product, dtype, BY_BITS), mask=inside)


@jit
def _load_norm_weights(
    q_weight: tl.tensor, k_weight: tl.tensor, lanes: tl.tensor, LENGTH: tl.constexpr, is_query: tl.tensor
) -> tl.tensor:
    """Half of the norm's weights of each head, float32: one vector for all query heads, one for all key heads."""
    of_queries = tl.load(q_weight + lanes, mask=lanes < LENGTH, other=0.0)
    of_keys = tl.load(k_weight + lanes, mask=lanes < LENGTH, other=0.0)
    return tl.where(is_query, of_queries, of_keys).to(tl.float32)


@jit
def rope_and_store_heads(
    qkv: tl.tensor,
    rotary: tl.tensor,
    positions: tl.tensor,
    kv_indices: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    q_weight: tl.tensor,
    k_weight: tl.tensor,
    eps: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    HEADS_AT_ONCE: tl.constexpr,
    QK_NORM: tl.constexpr,
    BY_BITS: tl.constexpr,
) -> None:
    """One program per row and group of heads, of queries, keys, values in this order; x and y are a head's halves."""
    dtype: tl.constexpr = qkv.dtype.element_ty
    HALF: tl.constexpr = HEAD_DIM // 2
    row = tl.program_id(0)
    heads = tl.program_id(1) * HEADS_AT_ONCE + tl.arange(0, HEADS_AT_ONCE)[:, None]
    lanes = tl.arange(0, HALF_BLOCK)[None, :]
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS) & (lanes < HALF)
    is_query, is_value = heads < NUM_HEADS, heads >= NUM_HEADS + NUM_KV_HEADS
    source = qkv + row.to(tl.int64) * ((NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM) + heads * HEAD_DIM + lanes
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    x_normed, y_normed = x, y
    if QK_NORM:
        mean = (tl.sum(x * x, axis=1) + tl.sum(y * y, axis=1)) / HEAD_DIM
        factor = tl.rsqrt(mean + eps)[:, None]
        x_weight = _load_norm_weights(q_weight, k_weight, lanes, HALF, is_query)
        y_weight = _load_norm_weights(q_weight + HALF, k_weight + HALF, lanes, HALF, is_query)
        x_normed = rounded(rounded(x * factor, dtype, BY_BITS) * x_weight, dtype, BY_BITS)
        y_normed = rounded(rounded(y * factor, dtype, BY_BITS) * y_weight, dtype, BY_BITS)
    angles = rotary + tl.load(positions + row).to(tl.int64) * (2 * HEAD_DIM) + lanes
    x_cosine = tl.load(angles, mask=lanes < HALF, other=0.0).to(tl.float32)
    y_cosine = tl.load(angles + HALF, mask=lanes < HALF, other=0.0).to(tl.float32)
    x_sine = tl.load(angles + HEAD_DIM, mask=lanes < HALF, other=0.0).to(tl.float32)  # negated in the table
    y_sine = tl.load(angles + HEAD_DIM + HALF, mask=lanes < HALF, other=0.0).to(tl.float32)
    x_turned = rounded(x_normed * x_cosine, dtype, BY_BITS) + rounded(y_normed * x_sine, dtype, BY_BITS)
    y_turned = rounded(y_normed * y_cosine, dtype, BY_BITS) + rounded(x_normed * y_sine, dtype, BY_BITS)
    x_turned, y_turned = rounded(x_turned, dtype, BY_BITS), rounded(y_turned, dtype, BY_BITS)
    tl.store(source, x_turned, mask=inside & is_query)
    tl.store(source + HALF, y_turned, mask=inside & is_query)

    index = tl.load(kv_indices + row).to(tl.int64)
    stored = inside & (lanes < tl.where(index >= 0, HALF, 0))
    start = index * (NUM_KV_HEADS * HEAD_DIM) + lanes
    key = keys + start + (heads - NUM_HEADS) * HEAD_DIM
    is_key = stored & ((heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS))
    tl.store(key, x_turned, mask=is_key)
    tl.store(key + HALF, y_turned, mask=is_key)
    value = values + start + (heads - NUM_HEADS - NUM_KV_HEADS) * HEAD_DIM
    tl.store(value, x, mask=stored & is_value)
    tl.store(value + HALF, y, mask=stored & is_value)


@jit
def silu_and_mul_rows(
    gate_up: tl.tensor, out: tl.tensor, WIDTH: tl.constexpr, BLOCK: tl.constexpr, BY_BITS: tl.constexpr
) -> None:
    """One program per row and piece of it."""
    dtype: tl.constexpr = gate_up.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < WIDTH
    gate = tl.load(gate_up + row * (2 * WIDTH) + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * WIDTH) + WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
    activated = rounded(tl.div_rn(gate, 1.0 + tl.exp(-gate)), dtype, BY_BITS)
    tl.store(out + row * WIDTH + columns, rounded(activated * up, dtype, BY_BITS), mask=inside)


_INTERPRETED = not isinstance(add_rms_norm_rows, triton.JITFunction)
