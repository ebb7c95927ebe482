"""Paged tree attention on a CUDA device: one Triton kernel, and one that combines the splits of long contexts.

A program takes one tile (up to R rows of one sequence, see `tree_attention.py`), one key-value head and one split of
the keys, and goes through the keys in blocks that begin at multiples of the block's size. What it carries along, for
each of its M lanes (one query head of one row): the largest score so far, the sum of the weights 2**(score - largest),
and the values so weighted and summed, [M, WIDTH]. Scores are in units of log 2. Heads of E numbers are padded to WIDTH,
a power of two, under a mask.

Speed. With one row per sequence this is bound by memory: each key and value is read once, and what counts is bytes on
their way. So keys are split until the programs fill the device once (`choose_num_splits`), blocks of 64 keys and values
are fetched ahead of their use, and the G query heads of a key-value head share what was read, as rows of a product that
a tensor core pads to 16 anyhow. Only blocks that reach past the context of one of the tile's rows pay for masks.

Memory. Page ids are loaded only for positions that exist; no other address comes from data, and lanes after the last
position point to page 0 and are not read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from srtrl.model.paged_attention import TreeRows
from srtrl.model.tree_attention import AttentionScratch, keys_at_once
from srtrl.model.triton_jit import jit, jit_unspecialised

LOG2_E = 1.4426950408889634

SPLITS_AT_ONCE = tl.constexpr(16)
"""Partial results that are summed as one block."""

NUM_STAGES = 3
"""Page ids are fetched two blocks ahead, keys and values one: more would cost programs on a multiprocessor."""


def attend_tree(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TreeRows,
    out: Tensor,
    *,
    scratch: AttentionScratch,
    block_m: int,
    num_splits: int,
) -> None:
    """Attend from the rows of a step to the cache of one layer, with scale E**-0.5.

    Args:
        q: [N, H, E], rotated; the last two dimensions adjacent in memory, rows any number of elements apart.
        keys: [num_pages, page_size, K, E], contiguous; the rows' own keys are in it already.
        values: Likewise.
        rows: What the rows see, in tiles of `block_m // (H / K)` rows.
        out: [N, H, E], contiguous, written for real rows.
        scratch: Room for partial results.
        block_m: Query heads of all rows of a tile, padded: the height of the kernel's matrix products.
        num_splits: Programs that share the keys of one tile and key-value head.
    """
    head_dim, page_size, num_kv_heads = q.shape[2], *keys.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1), q.stride()
    assert all(tensor.is_contiguous() for tensor in (keys, values, out))
    if _INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter truncates float32 instead of rounding it
        wide = out.float()
        attend_tree(q, keys, values, rows, wide, scratch=scratch, block_m=block_m, num_splits=num_splits)
        out.copy_(wide)
        return
    group = q.shape[1] // num_kv_heads
    num_programs = len(rows.tiles) * num_kv_heads
    assert group <= block_m
    assert num_splits == 1 or num_programs * num_splits * block_m <= len(scratch.log_weights)
    constants = {
        "GROUP": group,
        "KV_HEADS": num_kv_heads,
        "E": head_dim,
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": block_m,
    }
    results = (out, scratch.means, scratch.log_weights)
    attend_tiles[(num_programs, num_splits)](
        *(q, keys, values, rows.tiles, rows.page_tables, rows.context_lengths, rows.ancestors, rows.split_keys),
        *results,
        head_dim**-0.5 * LOG2_E,
        q.stride(0),
        rows.page_tables.shape[1],
        rows.ancestors.shape[1],
        num_splits,
        **constants,
        PAGE_SIZE=page_size,
        KEY_BLOCK=keys_at_once(head_dim, keys.dtype),
        SPLIT=num_splits > 1,
        WIDE_DOT=_INTERPRETED or keys.dtype == torch.float32,
        num_warps=4,
        num_stages=NUM_STAGES,
    )
    if num_splits > 1:
        combine_splits[(num_programs, block_m // group * group)](
            *(rows.tiles, rows.split_keys, *results, num_splits),
            **constants,
            num_warps=2,
        )


@jit_unspecialised(["table_width", "num_words", "num_splits"])
def attend_tiles(  # noqa: PLR0915
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    tiles: tl.tensor,
    page_tables: tl.tensor,
    context_lengths: tl.tensor,
    ancestors: tl.tensor,
    split_keys: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    table_width: tl.tensor,
    num_words: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WIDE_DOT: tl.constexpr,
) -> None:
    """Grid (tiles x KV_HEADS, splits): keys in the order of the pages, draft nodes under masks of ancestor bits."""
    program, split = tl.program_id(0), tl.program_id(1)
    tile, head = program // KV_HEADS, program % KV_HEADS
    first_row, count = tl.load(tiles + 4 * tile), tl.load(tiles + 4 * tile + 1)
    table = page_tables + tl.load(tiles + 4 * tile + 2) * table_width
    keys_each = tl.load(split_keys)
    begin = split * keys_each
    end = tl.minimum(begin + keys_each, tl.load(tiles + 4 * tile + 3))
    if begin >= end:  # nothing in this split; also every padding tile
        return

    # Lanes that are not real do again what a lane of the first row does, so that only stores need a mask.
    lanes = tl.arange(0, BLOCK_M)
    real = lanes // GROUP < count
    row = first_row + tl.where(real, lanes // GROUP, 0)
    query_head = head * GROUP + lanes % GROUP
    dims = tl.arange(0, WIDTH)
    q_rows = q_ptr + (row.to(tl.int64) * q_stride + query_head * E)[:, None]
    q = tl.load(q_rows + dims[None, :], mask=(dims < E)[None, :], other=0.0)  # [M, WIDTH]
    context = tl.load(context_lengths + row)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)

    block = tl.arange(0, KEY_BLOCK)
    shared = tl.min(context, 0) // KEY_BLOCK * KEY_BLOCK  # all rows see all of the blocks before it
    shared_end = tl.maximum(begin, tl.minimum(end, shared))
    for start in range(begin, shared_end, KEY_BLOCK):
        position = start + block
        exists = block >= 0  # all, as the compiler knows
        index = tl.load(table + position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE
        keys = load_heads(keys_ptr, index, exists, head, KV_HEADS, E, WIDTH)
        values = load_heads(values_ptr, index, exists, head, KV_HEADS, E, WIDTH)
        highest, total, sums = add_block(q, keys, values, exists[None, :], scale, highest, total, sums, WIDE_DOT)
    for start in range(shared_end, end, KEY_BLOCK):
        position = start + block
        exists = position < end
        index = tl.load(table + position // PAGE_SIZE, mask=exists, other=0) * PAGE_SIZE + position % PAGE_SIZE
        keys = load_heads(keys_ptr, index, exists, head, KV_HEADS, E, WIDTH)
        values = load_heads(values_ptr, index, exists, head, KV_HEADS, E, WIDTH)
        node = position[None, :] - context[:, None]  # [M, KEY_BLOCK], index in the tree unless negative
        has_bit = (node >= 0) & (node < 32 * num_words) & exists[None, :]
        bits = tl.load(ancestors + (row * num_words)[:, None] + node // 32, mask=has_bit, other=0)
        seen = exists[None, :] & ((node < 0) | (((bits >> (node & 31)) & 1) != 0))
        highest, total, sums = add_block(q, keys, values, seen, scale, highest, total, sums, WIDE_DOT)

    stored = real[:, None] & (dims < E)[None, :]
    if SPLIT:  # a partial result with the logarithm of its total weight; that of zero for a lane that saw no key
        empty = total == 0
        partial = (program * num_splits + split) * BLOCK_M + lanes
        means = sums / tl.where(empty, 1.0, total)[:, None]
        tl.store(partial_ptr + (partial.to(tl.int64) * E)[:, None] + dims[None, :], means, mask=stored)
        weight = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(weight_ptr + partial, weight, mask=real)
    else:
        means = sums / total[:, None]
        head_row = row.to(tl.int64) * (KV_HEADS * GROUP) + query_head
        addresses = out_ptr + (head_row * E)[:, None] + dims[None, :]
        tl.store(addresses, means.to(out_ptr.dtype.element_ty), mask=stored)


@jit
def load_heads(
    pages: tl.tensor,
    index: tl.tensor,
    exists: tl.tensor,
    head: tl.tensor,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
) -> Any:
    """[KEY_BLOCK, WIDTH]: keys or values of one head at KV indices `index`; zeros where they do not exist."""
    dims = tl.arange(0, WIDTH)
    # 64 bits: a cache has more than 2**31 elements.
    addresses = pages + (index.to(tl.int64) * (KV_HEADS * E))[:, None] + (head * E + dims)[None, :]
    if WIDTH == E:
        heads = tl.load(addresses, mask=exists[:, None], other=0.0)
    else:
        heads = tl.load(addresses, mask=exists[:, None] & (dims < E)[None, :], other=0.0)
    return heads


@jit
def add_dot(left: tl.tensor, right: tl.tensor, sums: tl.tensor, WIDE_DOT: tl.constexpr) -> Any:
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
    scores = add_dot(q, tl.trans(keys), tl.zeros([q.shape[0], keys.shape[0]], tl.float32), WIDE_DOT) * scale
    scores = tl.where(seen, scores, float("-inf"))
    new_highest = tl.maximum(highest, tl.max(scores, 1))
    base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a lane that has seen nothing yet
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(highest - base)
    total = total * shrink + tl.sum(weights, 1)
    sums = add_dot(weights, values, sums * shrink[:, None], WIDE_DOT)
    return new_highest, total, sums


@jit_unspecialised(["num_splits"])
def combine_splits(
    tiles: tl.tensor,
    split_keys: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_splits: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
) -> None:
    """Grid (tiles x KV_HEADS, lanes): the partial results of one query head of one row, always in the same order."""
    program, lane = tl.program_id(0), tl.program_id(1)
    tile, head = program // KV_HEADS, program % KV_HEADS
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


_INTERPRETED = not isinstance(attend_tiles, triton.JITFunction)
