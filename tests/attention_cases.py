"""Rows of random trees over random pages, for tests of the attention kernel and of the fused forward pass."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from kernel_cases import KERNEL_DEVICE
from plain_kernels import ReferencePlan
from runner_cases import batch_arrays, random_trees
from torch import Tensor

from srtrl.cuda.tiles import AttentionScratch, TiledRows, fill_tiles
from srtrl.engine.step_inputs import PrefillChunk, StepInputs, StepShape, fill_inputs
from srtrl.model.paged_attention import KVCache, TreeRows


@dataclass(kw_only=True, slots=True)
class TreeStep:
    """One step: its rows on the device, and how much it needs."""

    rows: TiledRows
    num_real: int
    """Rows without padding."""
    num_pages: int
    lengths: list[int]
    """Positions of each sequence and chunk, nodes included."""


def make_step(
    seed: int,
    *,
    contexts: Sequence[int],
    sizes: Sequence[int],
    chunks: Sequence[tuple[int, int]] = (),
    page_size: int = 4,
    rows_per_tile: int = 4,
    split_keys: int = 1 << 20,
    padding: int = 0,
    device: str = KERNEL_DEVICE,
) -> TreeStep:
    """Sequences of `contexts` tokens with trees of `sizes` nodes, and prefill `chunks` (start, length)."""
    random = np.random.default_rng(seed)
    trees = random_trees(random, sizes)
    lengths = [context + size for context, size in zip(contexts, sizes, strict=True)]
    lengths += [start + count for start, count in chunks]
    width, num_tables = -(-max(lengths) // page_size), len(lengths)
    page_table = random.permutation(num_tables * width).astype(np.int32).reshape(num_tables, width)
    num_real = len(contexts) + trees.num_nodes + sum(count for _, count in chunks)
    num_rows = num_real + padding
    shape = StepShape(
        num_rows=num_rows,
        num_sampled=num_rows,
        num_words=-(-max([1, *sizes]) // 32),
        table_width=width + 1,
        num_tables=num_tables + padding,
    )
    inputs = StepInputs(shape, *(np.full(size, 123456789, dtype) for dtype, size in shape.fields().values()))
    batch = batch_arrays(
        token_ids=random.integers(61, size=(num_tables, max(lengths))).astype(np.int32),
        num_tokens=np.array(contexts, np.int64),
        page_table=page_table,
        num_prompt_tokens=np.ones(num_tables, np.int64),
        rng_keys=np.zeros(num_tables, np.uint64),
        temperatures=np.zeros(num_tables, np.float32),
    )
    prefill = [
        PrefillChunk(random.integers(61, size=count).astype(np.int32), start, page_table[table], 0)
        for table, (start, count) in enumerate(chunks, len(contexts))
    ]
    fill_inputs(inputs, batch, np.arange(len(contexts)), trees, prefill, page_size)
    arrays = {field.name: getattr(inputs, field.name) for field in fields(TreeRows)}
    arrays |= {"tiles": np.empty((num_rows, 4), np.int32), "split_keys": np.array([split_keys], np.int32)}
    fill_tiles(arrays["tiles"], inputs, num_real, rows_per_tile)
    rows = TiledRows(**{name: torch.from_numpy(array).to(device) for name, array in arrays.items()})
    return TreeStep(rows=rows, num_real=num_real, num_pages=num_tables * width, lengths=lengths)


def make_cache(
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    num_layers: int = 1,
    token_major: bool = True,
    device: str = KERNEL_DEVICE,
) -> KVCache:
    """Pages of random numbers."""
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    cache = KVCache(num_layers=num_layers, **sizes, dtype=dtype, device=device, token_major=token_major)
    generator = torch.Generator().manual_seed(num_pages)
    for pages in (cache.key_pages, cache.value_pages):
        pages.copy_(torch.randn(pages.shape, generator=generator))
    return cache


def attend_by_kernel(
    step: TreeStep,
    cache: KVCache,
    q: Tensor,
    *,
    num_splits: int = 1,
    block_m: int | None = None,
    rows_per_tile: int = 4,
    window: int | None = None,
) -> Tensor:
    """[N, H, E] of the first layer; zeros for padding."""
    from srtrl.cuda.attention import attend_tree

    keys, values = cache.kernel_keys(0), cache.kernel_values(0)
    num_kv_heads = keys.shape[2]
    group = q.shape[1] // num_kv_heads
    block_m = block_m or max(16, 1 << (group * rows_per_tile - 1).bit_length())
    scratch = AttentionScratch(q.shape[2], KERNEL_DEVICE)
    scratch.means.fill_(torch.nan)  # what no program wrote is not read
    scratch.log_weights.fill_(torch.nan)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    launch = {"block_m": block_m, "num_splits": num_splits}
    attend_tree(q, keys, values, step.rows, out, scratch=scratch, window=window, **launch)
    return out


def attend_by_reference(step: TreeStep, cache: KVCache, q: Tensor, window: int | None = None) -> Tensor:
    """Expected result of `attend_by_kernel`."""
    indices = step.rows.kv_indices.long()
    k, v = (pages.flatten(0, 1)[indices] for pages in (cache.kernel_keys(0), cache.kernel_values(0)))
    return ReferencePlan(cache, step.rows).attend(0, q, k, v, window)


def random_queries(
    num_rows: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: str = KERNEL_DEVICE
) -> Tensor:
    """[N, H, E]."""
    heads = torch.randn(num_rows, num_heads, head_dim, generator=torch.Generator().manual_seed(7))
    return heads.to(device, dtype)
