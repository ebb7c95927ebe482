"""Paged tree attention on a CUDA device: one Triton kernel a mode, and one that combines the splits of long contexts.

A program takes one tile (up to R rows of one sequence, see `device_rows.py`), one key-value head and one split of the
keys, and goes through the keys in blocks that begin at multiples of the block's size.

Speed. With one row a sequence this is bound by memory: each key and value is read once, and what counts is bytes on
their way. So keys are split until the programs fill the chip once (`device_plan.choose_num_splits`), blocks of 64 keys
and values are fetched ahead of their use, and the G query heads of a key-value head share what was read, as rows of a
product that a tensor core pads to 16 anyhow. Only blocks that reach behind the context of one of the tile's rows pay
for masks.

Bits. In deterministic mode a row's result is a function of its query and of its keys in order of position, whatever
else is in the tile and whether a key was drafted or committed: blocks and splits are fixed; those that a row does not
see as a whole are done for each row alone, its draft nodes taken by depth and so at the lanes where they will stand
once committed; one loop body serves both kinds, so that both are the same instructions; splits are summed sixteen at
a time, in order, and an absent one adds zero. Integers that differ from step to step are not specialised, so that it is
one compiled kernel, too.

Memory. Page ids and path slots are loaded only for positions that exist; no other address comes from data, and lanes
behind the last position point to page 0 and are not read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from srtrl.model.device_plan import AttentionLaunch, AttentionScratch
from srtrl.model.device_rows import DeviceRows
from srtrl.model.triton_jit import jit, jit_unspecialised
from srtrl.model.triton_key_blocks import (
    add_block,
    close_tile,
    combine_splits,
    load_heads,
    load_queries,
    no_keys_yet,
    open_tile,
    place_lanes,
)

LOG2_E = 1.4426950408889634

SPLITS_AT_ONCE = 16
"""Partial results that are summed as one block: its shape must not depend on how many there are."""

NUM_STAGES = 3
"""Page ids are fetched two blocks ahead, keys and values one: more would cost programs on a multiprocessor."""


@jit_unspecialised(["first_tile", "table_width", "num_words", "num_splits"])
def attend_positions(
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
    first_tile: tl.tensor,
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
    """Free mode: keys in the order of the pages, a tree's nodes behind the context under masks of ancestor bits."""
    program, split = tl.program_id(0), tl.program_id(1)
    tile, head = first_tile + program // KV_HEADS, program % KV_HEADS
    table, first_row, count, begin, end = open_tile(tiles, page_tables, table_width, split_keys, tile, split)
    if begin >= end:  # nothing in this split; also every padding tile
        return
    member, query_head, real = place_lanes(count, head, GROUP, BLOCK_M)
    row = first_row + member
    q = load_queries(q_ptr, row, query_head, q_stride, E, WIDTH)
    context = tl.load(context_lengths + row)
    shared = tl.min(context, 0) // KEY_BLOCK * KEY_BLOCK  # blocks before it are seen as a whole by all rows
    shared_end = tl.maximum(begin, tl.minimum(end, shared))
    block = tl.arange(0, KEY_BLOCK)
    highest, total, sums = no_keys_yet(BLOCK_M, WIDTH)
    for start in range(begin, shared_end, KEY_BLOCK):
        position = start + block
        there = block >= 0  # all, as the compiler knows
        slots = tl.load(table + position // PAGE_SIZE) * PAGE_SIZE + position % PAGE_SIZE
        keys = load_heads(keys_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        values = load_heads(values_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        highest, total, sums = add_block(q, keys, values, there[None, :], scale, highest, total, sums, WIDE_DOT)
    for start in range(shared_end, end, KEY_BLOCK):
        position = start + block
        there = position < end
        slots = tl.load(table + position // PAGE_SIZE, mask=there, other=0) * PAGE_SIZE + position % PAGE_SIZE
        keys = load_heads(keys_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        values = load_heads(values_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        node = position[None, :] - context[:, None]  # [M, KEY_BLOCK], index in the tree unless negative
        known = (node >= 0) & (node < 32 * num_words) & there[None, :]
        bits = tl.load(ancestors + (row * num_words)[:, None] + node // 32, mask=known, other=0)
        seen = there[None, :] & ((node < 0) | (((bits >> (node & 31)) & 1) != 0))
        highest, total, sums = add_block(q, keys, values, seen, scale, highest, total, sums, WIDE_DOT)
    lanes = (program * num_splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_rows = row * (KV_HEADS * GROUP) + query_head
    close_tile(highest, total, sums, head_rows, lanes, real, out_ptr, partial_ptr, weight_ptr, E, WIDTH, SPLIT)


@jit_unspecialised(["first_tile", "table_width", "depth", "num_splits"])
def attend_branches(
    q_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    tiles: tl.tensor,
    page_tables: tl.tensor,
    context_lengths: tl.tensor,
    path_lengths: tl.tensor,
    path_slots: tl.tensor,
    split_keys: tl.tensor,
    out_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scale: tl.tensor,
    q_stride: tl.tensor,
    first_tile: tl.tensor,
    table_width: tl.tensor,
    depth: tl.tensor,
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
    """Deterministic mode: blocks that all rows of the tile see as a whole; then those of each row alone, by depth."""
    program, split = tl.program_id(0), tl.program_id(1)
    tile, head = first_tile + program // KV_HEADS, program % KV_HEADS
    table, first_row, count, begin, end = open_tile(tiles, page_tables, table_width, split_keys, tile, split)
    if begin >= end:  # nothing in this split; also every padding tile
        return
    member, query_head, real = place_lanes(count, head, GROUP, BLOCK_M)
    row = first_row + member
    q = load_queries(q_ptr, row, query_head, q_stride, E, WIDTH)
    contexts = tl.load(context_lengths + row)
    longest = tl.minimum(end, tl.max(contexts + tl.load(path_lengths + row), 0))
    shared_end = tl.maximum(begin, tl.minimum(end, tl.min(contexts, 0) // KEY_BLOCK * KEY_BLOCK))
    num_shared = (shared_end - begin) // KEY_BLOCK
    num_own = (tl.maximum(longest - shared_end, 0) + KEY_BLOCK - 1) // KEY_BLOCK
    highest, total, sums = no_keys_yet(BLOCK_M, WIDTH)
    for item in range(num_shared + count * num_own):
        behind = item - num_shared  # negative in shared blocks, where the first row stands for all
        owner = tl.maximum(behind, 0) // tl.maximum(num_own, 1)
        start = begin + tl.where(behind < 0, item, item - owner * num_own) * KEY_BLOCK
        context = tl.load(context_lengths + first_row + owner)
        length = context + tl.load(path_lengths + first_row + owner)
        position = start + tl.arange(0, KEY_BLOCK)
        committed, there = position < context, position < length
        page = tl.load(table + position // PAGE_SIZE, mask=committed, other=0)
        path = path_slots + (first_row + owner) * depth + position - context
        drafted = tl.load(path, mask=there & (position >= context), other=0)
        slots = tl.where(committed, page * PAGE_SIZE + position % PAGE_SIZE, drafted)
        keys = load_heads(keys_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        values = load_heads(values_ptr, slots, there, head, KV_HEADS, E, WIDTH)
        new, new_total, new_sums = add_block(q, keys, values, there[None, :], scale, highest, total, sums, WIDE_DOT)
        mine = ((behind < 0) | (member == owner)) & (start < length)
        highest, total = tl.where(mine, new, highest), tl.where(mine, new_total, total)
        sums = tl.where(mine[:, None], new_sums, sums)
    lanes = (program * num_splits + split) * BLOCK_M + tl.arange(0, BLOCK_M)
    head_rows = row * (KV_HEADS * GROUP) + query_head
    close_tile(highest, total, sums, head_rows, lanes, real, out_ptr, partial_ptr, weight_ptr, E, WIDTH, SPLIT)


@jit
def store_rows(
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    write_slots: tl.tensor,
    k_stride: tl.tensor,
    v_stride: tl.tensor,
    KV_HEADS: tl.constexpr,
    E: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Grid (N,): the key and value of one row, all heads, into its slot."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(write_slots + row).to(tl.int64)
    if slot < 0:
        return
    index = tl.arange(0, BLOCK)
    real = index < KV_HEADS * E
    target = slot * (KV_HEADS * E) + index
    tl.store(keys_ptr + target, tl.load(k_ptr + row * k_stride + index, mask=real), mask=real)
    tl.store(values_ptr + target, tl.load(v_ptr + row * v_stride + index, mask=real), mask=real)


_INTERPRETED = not isinstance(attend_positions, triton.JITFunction)


def attend_tree(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    rows: DeviceRows,
    out: Tensor,
    *,
    scratch: AttentionScratch,
    launch: AttentionLaunch,
) -> None:
    """Attend from the rows of a step to the cache of one layer, with scale E**-0.5.

    Args:
        q: [N, H, E], rotated; the last two dimensions adjacent in memory, rows any number of elements apart.
        keys: [num_pages, page_size, K, E], contiguous; the rows' own keys are in it already.
        values: Likewise.
        rows: What the rows see. Tiles were made for `launch`.
        out: [N, H, E], contiguous, written for real rows.
        scratch: Room for partial results; with little of it the tiles are done in several launches.
        launch: Constants of the kernel.
    """
    head_dim, page_size, num_kv_heads = q.shape[2], *keys.shape[1:3]
    assert q.stride()[1:] == (head_dim, 1), q.stride()
    assert all(tensor.is_contiguous() for tensor in (keys, values, out))
    if _INTERPRETED and out.dtype == torch.bfloat16:  # the interpreter cuts float32 off instead of rounding it
        wide = out.float()
        attend_tree(q, keys, values, rows, wide, scratch=scratch, launch=launch)
        out.copy_(wide)
        return
    constants = {
        "GROUP": q.shape[1] // num_kv_heads,
        "KV_HEADS": num_kv_heads,
        "E": head_dim,
        "WIDTH": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_M": launch.block_m,
    }
    assert constants["GROUP"] <= launch.block_m
    tiles_at_once = rows.num_tiles
    if launch.num_splits > 1:
        lanes_each = AttentionScratch.lanes_for(num_tiles=1, num_kv_heads=num_kv_heads, launch=launch)
        tiles_at_once = min(tiles_at_once, len(scratch.log_weights) // lanes_each)
        assert tiles_at_once > 0, f"scratch for {len(scratch.log_weights)} partial results; a tile needs {lanes_each}"
    results = (out, scratch.means, scratch.log_weights)
    for first_tile in range(0, rows.num_tiles, tiles_at_once):
        num_programs = min(tiles_at_once, rows.num_tiles - first_tile) * num_kv_heads
        branches = (rows.path_lengths, rows.path_slots) if launch.deterministic else (rows.ancestors,)
        kernel = attend_branches if launch.deterministic else attend_positions
        kernel[(num_programs, launch.num_splits)](
            *(q, keys, values, rows.tiles, rows.page_tables, rows.context_lengths, *branches, rows.split_keys),
            *results,
            head_dim**-0.5 * LOG2_E,
            q.stride(0),
            first_tile,
            rows.page_tables.shape[1],
            branches[-1].shape[1],
            launch.num_splits,
            **constants,
            PAGE_SIZE=page_size,
            KEY_BLOCK=launch.keys_at_once(head_dim, keys.dtype),
            SPLIT=launch.num_splits > 1,
            WIDE_DOT=_INTERPRETED or keys.dtype == torch.float32,
            num_warps=4,
            num_stages=NUM_STAGES,
            enable_fp_fusion=True,
        )
        if launch.num_splits > 1:
            num_lanes = constants["GROUP"] * launch.rows_per_tile(constants["GROUP"])
            combine_splits[(num_programs, num_lanes)](
                *(rows.tiles, rows.split_keys, *results, first_tile, launch.num_splits),
                **constants,
                SPLITS_AT_ONCE=SPLITS_AT_ONCE,
                num_warps=2,
                enable_fp_fusion=True,
            )


def store_kv(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, write_slots: Tensor) -> None:
    """Keys and values of the rows, [N, K, E], into `keys` and `values` [num_pages, page_size, K, E]; -1: nowhere."""
    num_rows, num_kv_heads, head_dim = k.shape
    assert k.stride()[1:] == (head_dim, 1), k.stride()
    assert v.stride()[1:] == (head_dim, 1), v.stride()
    store_rows[(num_rows,)](
        *(k, v, keys, values, write_slots, k.stride(0), v.stride(0)),
        KV_HEADS=num_kv_heads,
        E=head_dim,
        BLOCK=triton.next_power_of_2(num_kv_heads * head_dim),
        enable_fp_fusion=True,
    )
