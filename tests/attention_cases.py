"""Decode steps over random pages, for the tests of the attention on a device: rows, caches, plans."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from kernel_cases import KERNEL_DEVICE
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.rows import build_rows, slots_of
from srtrl.engine.sequence import PrefillChunk, PromptPages, Sequence
from srtrl.model.device_plan import AttentionLaunch, AttentionScratch, DevicePlan
from srtrl.model.device_rows import RowSizes, fill_rows, view_rows
from srtrl.model.paged_attention import Int32Array, KVCache, PagedRows
from srtrl.types import Request, SamplingParams


@dataclass(frozen=True)
class Step:
    """Rows of one step, and the cache they need."""

    rows: PagedRows
    num_pages: int
    parents: list[list[int]]
    """Of each decoding sequence's tree."""


def make_sequence(length: int, pages: list[int]) -> Sequence:
    request = Request(
        prompt_id="",
        prompt_token_ids=(0,),
        draw_index=0,
        sample_index=0,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=1),
    )
    sequence = Sequence(token_ids=[0] * length, sequence_id=0, request=request, prompt=PromptPages([]))
    sequence.set_pages(pages)
    return sequence


def random_parents(random: np.random.Generator, num_nodes: int) -> list[int]:
    return [int(random.integers(ROOT, node)) if node else ROOT for node in range(num_nodes)]


def make_tree(parents: SequenceOf[int]) -> DraftTree:
    return DraftTree(
        token_ids=np.zeros(len(parents), np.int32),
        parents=np.array(parents, np.int32),
        scores=np.ones(len(parents), np.float32),
    )


def make_step(
    random: np.random.Generator,
    page_size: int,
    contexts: SequenceOf[int],
    parents: SequenceOf[list[int]],
    chunks: SequenceOf[tuple[int, int]] = (),
) -> Step:
    """Sequences of `contexts` tokens with trees of `parents`, and prefill chunks (start, count); pages in any order."""
    lengths = [context + len(tree) for context, tree in zip(contexts, parents, strict=True)]
    lengths += [start + count for start, count in chunks]
    counts = [-(-length // page_size) for length in lengths]
    num_pages = sum(counts) + 3
    pages = random.permutation(num_pages).tolist()
    ends = np.cumsum(counts).tolist()
    tables = [pages[end - count : end] for end, count in zip(ends, counts, strict=True)]
    decodes = [make_sequence(context, table) for context, table in zip(contexts, tables, strict=False)]
    prefills = [
        PrefillChunk(make_sequence(start + count, table), start, count)
        for (start, count), table in zip(chunks, tables[len(decodes) :], strict=True)
    ]
    trees = DraftTrees.of([make_tree(tree) for tree in parents]) if parents else DraftTrees.empty(0)
    rows = build_rows(decodes, trees, prefills, page_size)[1]
    return Step(rows, num_pages, [list(tree) for tree in parents])


def committed_rows(table: Int32Array, positions: npt.NDArray[np.int64], page_size: int) -> PagedRows:
    """Rows of prompt tokens or roots of one sequence, `table` [1, P]: each sees all up to its own position."""
    count = len(positions)
    return PagedRows(
        positions=positions,
        write_slots=slots_of(table, np.zeros(count, np.int32), positions, page_size),
        page_tables=table,
        row_tables=np.zeros(count, np.int32),
        context_lengths=(positions + 1).astype(np.int32),
        path_slots=np.zeros((count, 0), np.int32),
        path_lengths=np.zeros(count, np.int32),
    )


def make_cache(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    device: torch.device | str = KERNEL_DEVICE,
) -> KVCache:
    """A token-major cache of two layers, full of random numbers."""
    cache = KVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        device=device,
        token_major=True,
    )
    generator = torch.Generator().manual_seed(seed)
    cache.key_pages.copy_(torch.randn(cache.key_pages.shape, generator=generator))
    cache.value_pages.copy_(torch.randn(cache.value_pages.shape, generator=generator))
    return cache


def copy_cache(cache: KVCache) -> KVCache:
    num_layers, num_pages, num_kv_heads, head_dim, page_size = cache.key_pages.shape
    assert num_layers == 2
    copy = make_cache(num_pages, page_size, num_kv_heads, head_dim, cache.key_pages.dtype)
    copy.key_pages.copy_(cache.key_pages)
    copy.value_pages.copy_(cache.value_pages)
    return copy


def random_heads(num_rows: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> list[Tensor]:
    """Queries, keys and values, views of one tensor as a fused projection makes them; scores are of some size."""
    generator = torch.Generator().manual_seed(1)
    qkv = torch.randn(num_rows, num_heads + 2 * num_kv_heads, head_dim, generator=generator)
    qkv[:, :num_heads] *= 3
    heads = qkv.to(KERNEL_DEVICE, dtype)
    return list(heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1))


def make_launch(*, group: int, num_splits: int, deterministic: bool, block_m: int = 16) -> AttentionLaunch:
    """A launch with small blocks, so that short contexts have many."""
    assert block_m >= group
    return AttentionLaunch(block_m=block_m, num_splits=num_splits, deterministic=deterministic, key_block=16)


def make_plan(
    cache: KVCache,
    rows: PagedRows,
    launch: AttentionLaunch,
    num_heads: int,
    *,
    split_keys: int,
    padding: int = 0,
    num_lanes: int | None = None,
    use_kernels: bool = True,
) -> DevicePlan:
    """Plan of `rows` with padding of every kind; `num_lanes` of scratch, by default as many as one launch takes."""
    _, _, num_kv_heads, head_dim, _ = cache.key_pages.shape
    num_rows = len(rows.positions)
    group = num_heads // num_kv_heads
    sizes = RowSizes(
        num_rows=num_rows + padding,
        num_tables=len(rows.page_tables) + padding,
        table_width=rows.page_tables.shape[1] + padding,
        depth=max(1, rows.path_slots.shape[1]) if launch.deterministic else 0,
        num_words=0 if launch.deterministic else 2,
        num_tiles=num_rows + padding,
    )
    host = torch.full((sizes.num_elements,), 123456789, dtype=torch.int32)
    fill_rows(view_rows(host, sizes), rows, rows_per_tile=launch.rows_per_tile(group), split_keys=split_keys)
    if num_lanes is None:
        num_lanes = AttentionScratch.lanes_for(num_tiles=sizes.num_tiles, num_kv_heads=num_kv_heads, launch=launch)
    scratch = AttentionScratch(
        num_rows=sizes.num_rows,
        num_heads=num_heads,
        head_dim=head_dim,
        num_lanes=num_lanes,
        dtype=cache.key_pages.dtype,
        device=KERNEL_DEVICE,
    )
    scratch.means.fill_(torch.nan)  # what no program wrote is not read
    scratch.log_weights.fill_(torch.nan)
    return DevicePlan(
        cache,
        view_rows(host.to(KERNEL_DEVICE), sizes),
        num_positions=4096,
        launch=launch,
        scratch=scratch,
        use_kernels=use_kernels,
    )
