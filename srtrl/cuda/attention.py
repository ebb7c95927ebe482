"""Paged tree attention on a CUDA device: one Triton kernel, and one that combines the splits of long contexts.

A program takes one tile (up to R rows of one sequence, see `tiles.py`), one key-value head and one split of
the keys, and goes through the keys in blocks that begin at multiples of the block's size. What it carries along, for
each of its M lanes (one query head of one row): the largest score so far, the sum of the weights 2**(score - largest),
and the values so weighted and summed, [M, WIDTH]. Scores are in units of log 2. Heads of E numbers are padded to WIDTH,
a power of two, under a mask.

Speed. With one row per sequence this is bound by memory: each key and value is read once, and what counts is bytes on
their way. So keys are split until the programs fill the device and the longest sequence is no longer than the others
(`choose_num_splits`), blocks of 64 keys and values are fetched ahead of their use, and the G query heads of a key-value
head share what was read, as rows of a product that a tensor core pads to 16 anyhow. Only blocks that reach past the
context of one of the tile's rows read ancestor bits.

Memory. Page ids are loaded only for positions that exist; no other address comes from data, and lanes after the last
position point to page 0 and are not read.
"""

import triton
import triton.language as tl
from torch import Tensor

from srtrl.cuda.jit import jit
from srtrl.cuda.tiles import MAX_NUM_SPLITS, NUM_THREADS, AttentionScratch, TiledRows, keys_at_once, max_registers

LOG2_E = tl.constexpr(1.4426950408889634)

NUM_WARPS = NUM_THREADS // 32
NUM_STAGES = 3
"""Page ids are fetched two blocks ahead, keys and values one: more would cost programs on a multiprocessor."""


def attend_tree(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: TiledRows,
    out: Tensor,
    *,
    scratch: AttentionScratch,
    block_m: int,
    num_splits: int,
    window: int | None = None,
) -> None:
    """Attend from the rows of a step to the cache of one layer, with scale E**-0.5.

    Args:
        q: [N, H, E], rotated; contiguous, as all that follow, and of one dtype.
        keys: [num_pages, page_size, K, E]; the rows' own keys are in it already.
        values: Likewise.
        rows: What the rows see, in tiles of `block_m // (H / K)` rows.
        out: [N, H, E], written for real rows.
        scratch: Room for partial results.
        block_m: Query heads of all rows of a tile, padded: the height of the kernel's matrix products.
        num_splits: Programs that share the keys of one tile and key-value head.
        window: See `AttentionPlan.attend`; more than a draft tree has nodes, so that a node sees its whole branch.
    """
    head_dim, page_size, num_kv_heads = q.shape[2], *keys.shape[1:3]
    assert all(tensor.is_contiguous() and tensor.dtype == q.dtype for tensor in (q, keys, values, out))
    group = q.shape[1] // num_kv_heads
    num_programs = len(rows.tiles) * num_kv_heads
    assert group <= block_m
    assert num_splits <= MAX_NUM_SPLITS
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
        rows.page_tables.shape[1],
        rows.positions,
        **constants,
        PAGE_SIZE=page_size,
        NUM_WORDS=rows.ancestors.shape[1],
        KEY_BLOCK=keys_at_once(head_dim, keys.dtype),
        SPLIT=num_splits > 1,
        WINDOW=window or 0,
        num_warps=NUM_WARPS,
        num_stages=NUM_STAGES,
        maxnreg=max_registers(block_m=block_m, head_dim=head_dim, dtype=q.dtype),
        enable_fp_fusion=True,
    )
    if num_splits > 1:
        grid = (num_programs, block_m // group * group)
        padded_splits = triton.next_power_of_2(num_splits)
        combine_splits[grid](
            *(rows.tiles, rows.split_keys, *results),
            **constants,
            SPLITS=padded_splits,
            num_warps=max(1, padded_splits // 8),  # thousands of small programs, each of which waits for its loads
            enable_fp_fusion=True,
        )


@jit
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
    table_width: tl.tensor,
    positions: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_WORDS: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
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
    dims = tl.arange(0, WIDTH)
    # 64 bits: a cache has more than 2**31 elements, and many rows of queries have too.
    head_row = row.to(tl.int64) * (KV_HEADS * GROUP) + head * GROUP + lanes % GROUP
    elements = (head_row * E)[:, None] + dims[None, :]  # [M, WIDTH], of queries and results
    q = tl.load(q_ptr + elements, mask=(dims < E)[None, :], other=0.0)
    context = tl.load(context_lengths + row)
    shared = tl.min(context, 0)  # all rows see all positions before it
    if WINDOW:
        oldest = tl.load(positions + row) - (WINDOW - 1)  # position that a row sees first
        begin = tl.maximum(begin, tl.min(oldest, 0) // KEY_BLOCK * KEY_BLOCK)
    highest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, WIDTH], tl.float32)

    for start in range(begin, end, KEY_BLOCK):
        position = start + tl.arange(0, KEY_BLOCK)
        exists = position < end
        index = tl.load(table + position // PAGE_SIZE, mask=exists, other=0) * PAGE_SIZE + position % PAGE_SIZE
        addresses = ((index.to(tl.int64) * KV_HEADS + head) * E)[:, None] + dims[None, :]  # [KEY_BLOCK, WIDTH]
        loaded = exists[:, None] & (dims < E)[None, :]
        keys = tl.load(keys_ptr + addresses, mask=loaded, other=0.0)
        values = tl.load(values_ptr + addresses, mask=loaded, other=0.0)
        node = position[None, :] - context[:, None]  # [M, KEY_BLOCK], index in the tree unless negative
        seen = exists[None, :] & (node < 0)
        if WINDOW:
            seen = seen & (position[None, :] >= oldest[:, None])
        if start + KEY_BLOCK > shared:
            has_bit = exists[None, :] & (node >= 0) & (node < 32 * NUM_WORDS)
            bits = tl.load(ancestors + (row * NUM_WORDS)[:, None] + node // 32, mask=has_bit, other=0)
            seen = seen | (((bits >> (node & 31)) & 1) != 0)

        scores = tl.dot(q, tl.trans(keys), input_precision="ieee") * (LOG2_E / E**0.5)
        scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)  # a lane that has seen nothing yet
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = tl.dot(weights.to(values.dtype), values, sums * shrink[:, None], input_precision="ieee")
        highest = new_highest

    stored = real[:, None] & (dims < E)[None, :]
    if SPLIT:  # a partial result with the logarithm of its total weight; that of zero for a lane that saw no key
        empty = total == 0
        partial = (split * tl.num_programs(0) + program) * BLOCK_M + lanes
        means = sums / tl.where(empty, 1.0, total)[:, None]
        tl.store(partial_ptr + (partial.to(tl.int64) * E)[:, None] + dims[None, :], means, mask=stored)
        weight = tl.where(empty, float("-inf"), highest + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(weight_ptr + partial, weight, mask=real)
    else:
        tl.store(out_ptr + elements, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=stored)


@jit
def combine_splits(
    tiles: tl.tensor,
    split_keys: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """Grid (tiles x KV_HEADS, lanes): the partial results of one query head of one row, always in the same order."""
    program, lane = tl.program_id(0), tl.program_id(1)
    tile, head = program // KV_HEADS, program % KV_HEADS
    member = lane // GROUP
    if member >= tl.load(tiles + 4 * tile + 1):
        return
    keys_each = tl.load(split_keys)
    split = tl.arange(0, SPLITS)
    written = split < (tl.load(tiles + 4 * tile + 3) + keys_each - 1) // keys_each
    dims = tl.arange(0, WIDTH)
    partial = (split * tl.num_programs(0) + program) * BLOCK_M + lane
    log_weights = tl.load(weight_ptr + partial, mask=written, other=float("-inf"))
    addresses = partial_ptr + (partial.to(tl.int64) * E)[:, None] + dims[None, :]
    means = tl.load(addresses, mask=written[:, None] & (dims < E)[None, :], other=0.0)
    weights = tl.exp2(log_weights - tl.max(log_weights, 0))  # 0 for a split in which the row sees nothing
    combined = tl.sum(means * weights[:, None], 0) / tl.sum(weights, 0)
    row = (tl.load(tiles + 4 * tile) + member).to(tl.int64)
    address = out_ptr + (row * (KV_HEADS * GROUP) + head * GROUP + lane % GROUP) * E + dims
    tl.store(address, combined.to(out_ptr.dtype.element_ty), mask=dims < E)
