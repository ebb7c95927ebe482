"""The parts of `triton_attention.py`'s kernels: a tile's rows, one block of keys, and the sum over splits.

What a program carries along, for each of its M lanes (one query head of one row of its tile): the largest score so
far, the sum of the weights 2**(score - largest), and the values so weighted and summed, [M, WIDTH]. Scores are in units
of log 2. Heads of E numbers are padded to WIDTH, a power of two, under a mask.
"""

from typing import Any

import triton.language as tl

from srtrl.model.triton_jit import jit, jit_unspecialised


@jit
def open_tile(
    tiles: tl.tensor,
    page_tables: tl.tensor,
    table_width: tl.tensor,
    split_keys: tl.tensor,
    tile: tl.tensor,
    split: tl.tensor,
) -> Any:
    """Page table of the tile's sequence, its first row, how many rows, and the positions [begin, end) of the split."""
    first_row, count = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    table = page_tables + tl.load(tiles + 4 * tile + 2) * table_width
    keys_each = tl.load(split_keys)
    begin = split * keys_each
    end = tl.minimum(begin + keys_each, tl.load(tiles + 4 * tile + 3))
    return table, first_row, count, begin, end


@jit
def place_lanes(count: tl.tensor, head: tl.tensor, GROUP: tl.constexpr, BLOCK_M: tl.constexpr) -> Any:
    """Which row of the tile each lane is for, which query head, and whether it is real.

    The others do again what a lane of the first row does, so that only stores need a mask.
    """
    lanes = tl.arange(0, BLOCK_M)
    real = lanes // GROUP < count
    return tl.where(real, lanes // GROUP, 0), head * GROUP + lanes % GROUP, real


@jit
def load_queries(
    q_ptr: tl.tensor, row: tl.tensor, query_head: tl.tensor, row_stride: tl.tensor, E: tl.constexpr, WIDTH: tl.constexpr
) -> Any:
    """[M, WIDTH]."""
    dims = tl.arange(0, WIDTH)
    addresses = q_ptr + (row.to(tl.int64) * row_stride + query_head * E)[:, None] + dims[None, :]
    return tl.load(addresses, mask=(dims < E)[None, :], other=0.0)


@jit
def load_heads(
    pages: tl.tensor,
    slots: tl.tensor,
    there: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
) -> Any:
    """[KEY_BLOCK, WIDTH]: keys or values of one head at `slots`; zeros where not `there`."""
    dims = tl.arange(0, WIDTH)
    # 64 bits: a cache has more than 2**31 elements.
    addresses = pages + (slots.to(tl.int64) * (KV_HEADS * E))[:, None] + (head * E + dims)[None, :]
    if WIDTH == E:
        heads = tl.load(addresses, mask=there[:, None], other=0.0)
    else:
        heads = tl.load(addresses, mask=there[:, None] & (dims < E)[None, :], other=0.0)
    return heads


@jit
def no_keys_yet(BLOCK_M: tl.constexpr, WIDTH: tl.constexpr) -> Any:
    """The state before the first block."""
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    return highest, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, WIDTH], tl.float32)


@jit
def _dot(left: tl.tensor, right: tl.tensor, sums: tl.tensor, WIDE_DOT: tl.constexpr) -> Any:
    """Add left @ right to `sums`, in float32; operands too where WIDE_DOT, else as they are, on tensor cores."""
    if WIDE_DOT:
        sums = tl.dot(left.to(tl.float32), right.to(tl.float32), sums, input_precision="ieee")
    else:
        sums = tl.dot(left.to(right.dtype), right, sums)
    return sums


@jit
def add_block(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    seen: tl.tensor,
    scale: tl.tensor,
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    WIDE_DOT: tl.constexpr,
) -> Any:
    """The state after one more block; `seen` is [M, KEY_BLOCK], or [1, KEY_BLOCK] where all lanes see the same."""
    scores = _dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32), WIDE_DOT) * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a lane that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    sums = _dot(weights, values, sums * shrink[:, None], WIDE_DOT)
    return new_highest, total, sums


@jit
def close_tile(
    highest: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    head_rows: tl.tensor,
    lanes: tl.tensor,
    real: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Write the mean of the values: to the output at `head_rows` [M], or with SPLIT as a partial result at `lanes` [M].

    A partial result goes with the logarithm of its total weight; a lane that saw no key has the logarithm of zero.
    """
    dims = tl.arange(0, WIDTH)
    stored = real[:, None] & (dims < E)[None, :]
    if SPLIT:
        empty = total == 0
        means = sums / tl.where(empty, 1.0, total)[:, None]
        tl.store(partial_ptr + (lanes.to(tl.int64) * E)[:, None] + dims[None, :], means, mask=stored)
        weight = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(weight_ptr + lanes, weight, mask=real)
    else:
        means = sums / total[:, None]
        addresses = out_ptr + (head_rows.to(tl.int64) * E)[:, None] + dims[None, :]
        tl.store(addresses, means.to(out_ptr.dtype.element_ty), mask=stored)


@jit_unspecialised(["first_tile", "num_splits"])
def combine_splits(
    tiles: tl.tensor,
    split_keys: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    first_tile: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
) -> None:
    """Grid (tiles x KV_HEADS, lanes): the partial results of one query head of one row, always in the same order."""
    program, lane = tl.program_id(0), tl.program_id(1)
    tile, head = first_tile + program // KV_HEADS, program % KV_HEADS
    member = lane // GROUP
    if member >= tl.load(tiles + 4 * tile + 1):
        return
    keys_each = tl.load(split_keys)
    num_written = (tl.load(tiles + 4 * tile + 3) + keys_each - 1) // keys_each
    dims = tl.arange(0, WIDTH)
    highest = float("-inf")
    total = 0.0
    sums = tl.zeros([WIDTH], tl.float32)
    for first in range(0, num_written, SPLITS_AT_ONCE):
        split = first + tl.arange(0, SPLITS_AT_ONCE)
        written = split < num_written
        partial = (program * num_splits + split) * BLOCK_M + lane
        log_weights = tl.load(weight_ptr + partial, mask=written, other=float("-inf"))
        addresses = partial_ptr + (partial.to(tl.int64) * E)[:, None] + dims[None, :]
        means = tl.load(addresses, mask=written[:, None] & (dims < E)[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(log_weights, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weights = tl.exp2(log_weights - base)  # 0 for a split in which the row sees nothing
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 0)
        sums = sums * shrink + tl.sum(means * weights[:, None], 0)
        highest = new_highest
    row = (tl.load(tiles + 4 * tile) + member).to(tl.int64)
    address = out_ptr + (row * (KV_HEADS * GROUP) + head * GROUP + lane % GROUP) * E + dims
    tl.store(address, (sums / total).to(out_ptr.dtype.element_ty), mask=dims < E)
