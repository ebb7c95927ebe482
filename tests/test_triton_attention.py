"""The attention kernel against plain PyTorch from the same inputs: interpreted on a CPU, at real widths on a GPU."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from attention_cases import TreeStep, attend_by_kernel, attend_by_reference, make_cache, make_step, random_queries
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from kernel_cases import KERNEL_DEVICE
from torch import Tensor

from srtrl.cuda.tiles import (
    H200,
    SCRATCH_LANES,
    choose_block_m,
    choose_num_splits,
    choose_split_keys,
    programs_per_device,
)
from srtrl.model.paged_attention import KVCache


def assert_agrees(
    step: TreeStep, cache: KVCache, q: Tensor, *, rtol: float, atol: float, window: int | None = None, **launch: int
) -> None:
    found = attend_by_kernel(step, cache, q, window=window, **launch)
    torch.testing.assert_close(found, attend_by_reference(step, cache, q, window), rtol=rtol, atol=atol)
    assert not found[step.num_real :].any()


@settings(deadline=None, max_examples=1 if KERNEL_DEVICE == "cpu" else 25, phases=[Phase.explicit, Phase.generate])
@example(seed=2, heads=(6, 1), cells=(24, 4), tiles=(3, 2, 3), window=None, dtype=torch.float32)
@example(seed=2, heads=(6, 1), cells=(24, 4), tiles=(3, 2, 3), window=41, dtype=torch.float32)
@example(seed=4, heads=(7, 1), cells=(64, 16), tiles=(1, 4, 0), window=None, dtype=torch.bfloat16)  # over 32 nodes
@given(
    seed=st.integers(0, 1000),
    heads=st.sampled_from([(2, 2), (2, 1), (6, 1), (7, 1)]),
    cells=st.tuples(st.sampled_from([16, 24, 64]), st.sampled_from([4, 16])),
    tiles=st.tuples(st.sampled_from([1, 3, 18]), st.sampled_from([1, 2, 4]), st.sampled_from([0, 3])),
    window=st.none() | st.integers(41, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_the_kernel_agrees_with_the_reference(
    seed: int,
    heads: tuple[int, int],
    cells: tuple[int, int],
    tiles: tuple[int, int, int],
    window: int | None,
    dtype: torch.dtype,
) -> None:
    """Inputs in bfloat16 are the same numbers; how weights (on a device) and results are rounded differs."""
    random = np.random.default_rng(seed)
    (num_heads, num_kv_heads), (head_dim, page_size), (num_splits, rows_per_tile, padding) = heads, cells, tiles
    step = make_step(
        seed,
        contexts=random.integers(1, 60, 2).tolist(),
        sizes=[int(random.integers(0, 40)), 0],
        chunks=[(int(random.integers(0, 30)), int(random.integers(1, 6)))],
        page_size=page_size,
        rows_per_tile=rows_per_tile,
        split_keys=1 << 20 if num_splits == 1 else 64,
        padding=padding,
    )
    cache = make_cache(step.num_pages, page_size, num_kv_heads, head_dim, dtype)
    q = random_queries(step.num_real + padding, num_heads, head_dim, dtype)
    rtol = 1e-5 if dtype == torch.float32 else 0.02 if KERNEL_DEVICE == "cuda" else 0.008
    atol = 1e-5 if dtype == torch.float32 else 0.005
    assert_agrees(
        step, cache, q, rtol=rtol, atol=atol, window=window, num_splits=num_splits, rows_per_tile=rows_per_tile
    )


def test_nothing_is_read_that_no_row_sees() -> None:
    """Page ids after the last are wild, places that no row sees hold NaN; the result is as before."""
    q = random_queries(12, 3, 24, torch.float32)
    found = []
    for is_wild in (False, True):
        step = make_step(0, contexts=[37, 18], sizes=[3, 1], chunks=[(5, 3)], split_keys=32, padding=2)
        cache = make_cache(step.num_pages, 4, 1, 24, torch.float32)
        if is_wild:
            unseen = torch.ones(step.num_pages, 4, dtype=torch.bool, device=KERNEL_DEVICE)
            for table, length in enumerate(step.lengths):
                positions = torch.arange(length, device=KERNEL_DEVICE)
                unseen[step.rows.page_tables[table, positions // 4].long(), positions % 4] = False
                step.rows.page_tables[table, -(-length // 4) :] = 1 << 28
            step.rows.page_tables[len(step.lengths) :] = 1 << 28
            cache.kernel_keys(0)[unseen] = torch.nan
            cache.kernel_values(0)[unseen] = torch.nan
        found.append(attend_by_kernel(step, cache, q, num_splits=2)[: step.num_real])
    assert torch.equal(found[0], found[1])
    assert found[1].isfinite().all()


@given(
    num_programs=st.integers(1, 48_000),
    block_m=st.sampled_from([16, 32, 64, 128]),
    device=st.sampled_from([1, 46, 132]),
    keys=st.lists(st.integers(1, 100_000), min_size=1, max_size=5),
)
def test_splits_fill_the_device_and_their_results_fit(
    num_programs: int, block_m: int, device: int, keys: list[int]
) -> None:
    limits = replace(H200, num_multiprocessors=device)
    at_once = programs_per_device(block_m=block_m, head_dim=128, dtype=torch.bfloat16, device=limits)
    max_keys, mean_keys = max(keys), sum(keys) / len(keys)
    even, num_splits = (
        choose_num_splits(
            num_programs=num_programs,
            programs_at_once=at_once,
            block_m=block_m,
            max_keys=max_keys,
            mean_keys=mean,
        )
        for mean in (max_keys, mean_keys)
    )
    assert even == 1 or even * num_programs <= at_once
    assert even <= num_splits, "keys are split more where lengths differ"
    assert num_splits == 1 or num_splits * num_programs * block_m <= SCRATCH_LANES
    split_keys = choose_split_keys(max_keys=max_keys, num_splits=num_splits)
    assert split_keys % 64 == 0
    assert num_splits * split_keys >= max_keys > num_splits * (split_keys - 64)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [(12, 2, 128), (14, 2, 64), (32, 8, 128), (8, 8, 80), (16, 1, 96), (8, 2, 256)])
@pytest.mark.parametrize("num_nodes", [0, 1, 7, 40])
@pytest.mark.parametrize("splits", [False, True])
def test_real_widths_on_a_device(dtype: torch.dtype, heads: tuple[int, int, int], num_nodes: int, splits: bool) -> None:
    """Float32 products are exact in the operands; bfloat16 rounds weights and results to 8 bits."""
    random = np.random.default_rng(num_nodes)
    num_heads, num_kv_heads, head_dim = heads
    block_m = choose_block_m(rows_per_sequence=num_nodes, group=num_heads // num_kv_heads, head_dim=head_dim)
    rows_per_tile = block_m // (num_heads // num_kv_heads)
    num_sequences, chunks = (3, [(500, 13)]) if splits else (9, [(0, 70), (500, 33)])  # parts need room
    contexts = random.integers(1, 3000, num_sequences).tolist()
    sizes = random.integers(0, num_nodes + 1, num_sequences).tolist()
    lanes = block_m * num_kv_heads * (num_sequences + sum(sizes) + sum(count for _, count in chunks))
    num_splits = min(5, SCRATCH_LANES // lanes) if splits else 1
    assert num_splits > splits
    split_keys = choose_split_keys(max_keys=max(*contexts, 513) + num_nodes, num_splits=num_splits)
    options = {"contexts": contexts, "sizes": sizes, "chunks": chunks, "split_keys": split_keys}
    step = make_step(num_nodes, page_size=16, rows_per_tile=rows_per_tile, **options)
    cache = make_cache(step.num_pages, 16, num_kv_heads, head_dim, dtype)
    q = random_queries(step.num_real, num_heads, head_dim, dtype)
    tolerance = 3e-5 if dtype == torch.float32 else 0.02
    assert_agrees(step, cache, q, rtol=tolerance, atol=tolerance, num_splits=num_splits, block_m=block_m)


@pytest.mark.gpu
def test_a_cache_of_more_than_two_billion_elements() -> None:
    """The last page of a cache whose offsets do not fit in 32 bits."""
    num_pages = 2**31 // (16 * 8 * 128) + 10
    if torch.cuda.mem_get_info()[0] < 3 * 2 * num_pages * 16 * 8 * 128:
        pytest.skip("needs about 13 GiB of free memory")
    step = make_step(0, contexts=[40, 100], sizes=[2, 0], page_size=16)
    cache = KVCache(
        num_layers=1,
        num_pages=num_pages,
        page_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=torch.bfloat16,
        device="cuda",
        token_major=True,
    )
    cache.key_pages[:, -step.num_pages :].normal_()
    cache.value_pages[:, -step.num_pages :].normal_()
    step.rows.page_tables.add_(num_pages - step.num_pages)
    q = random_queries(step.num_real, 16, 128, torch.bfloat16)
    assert_agrees(step, cache, q, rtol=0.02, atol=0.02)
