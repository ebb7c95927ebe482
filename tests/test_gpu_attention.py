"""The attention kernels on a CUDA device at real widths: against the reference, and bit for bit where promised."""

import dataclasses

import numpy as np
import pytest
import torch
from attention_cases import committed_rows, copy_cache, make_cache, make_plan, make_step, random_heads, random_parents
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT
from srtrl.engine.attention_probe import CudaStopwatch, PlainStep, find_fault, random_cache, time_step
from srtrl.engine.buckets import ROWS_AT_ONCE, BucketPlanner
from srtrl.model.attention_backends import NAMES, OURS, find_backends
from srtrl.model.device_plan import (
    AttentionLaunch,
    choose_block_m,
    choose_num_splits,
    choose_split_keys,
)
from srtrl.model.device_rows import DeviceRows, make_tiles
from srtrl.model.paged_attention import KVCache, PagedRows, ReferenceRows

pytestmark = pytest.mark.gpu

PAGE_SIZE = 16
DEVICE = torch.device("cuda")


def launch_for(
    rows: PagedRows, group: int, *, deterministic: bool, num_splits: int | None = None, head_dim: int = 128
) -> AttentionLaunch:
    counts = np.bincount(rows.row_tables)
    block_m = choose_block_m(
        rows_per_sequence=float(counts.mean()), group=group, head_dim=head_dim, deterministic=deterministic
    )
    if num_splits is None:
        num_splits = choose_num_splits(
            num_tiles=len(make_tiles(rows.row_tables, rows.context_lengths, block_m // group).tile_rows),
            num_kv_heads=2,
            block_m=block_m,
            max_keys=8192,
            num_multiprocessors=torch.cuda.get_device_properties("cuda").multi_processor_count,
            deterministic=deterministic,
        )
    return AttentionLaunch(block_m=block_m, num_splits=num_splits, deterministic=deterministic)


def attend(cache: KVCache, rows: PagedRows, heads: list[Tensor], launch: AttentionLaunch) -> Tensor:
    num_heads = heads[0].shape[1]
    tiles = make_tiles(rows.row_tables, rows.context_lengths, launch.rows_per_tile(num_heads // heads[1].shape[1]))
    split_keys = choose_split_keys(longest=int(tiles.tile_keys.max()), launch=launch)
    return make_plan(cache, rows, launch, num_heads, split_keys=split_keys).attend(1, *heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(12, 2, 128), (14, 2, 64), (32, 8, 128), (8, 8, 80), (16, 1, 96), (8, 2, 256)])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_nodes", [0, 1, 7, 40])
def test_kernels_agree_with_the_reference(
    dtype: torch.dtype, heads: tuple[int, int, int], deterministic: bool, num_nodes: int
) -> None:
    """Float32 products are exact in the operands; bfloat16 rounds weights and results to 8 bits."""
    random = np.random.default_rng(num_nodes)
    step = make_step(
        random,
        PAGE_SIZE,
        contexts=random.integers(1, 3000, 9).tolist(),
        parents=[random_parents(random, int(random.integers(0, num_nodes + 1))) for _ in range(9)],
        chunks=[(0, 70), (500, 33)],
    )
    num_heads, num_kv_heads, head_dim = heads
    cache = make_cache(step.num_pages, PAGE_SIZE, num_kv_heads, head_dim, dtype)
    other = copy_cache(cache)
    inputs = random_heads(len(step.rows.positions), num_heads, num_kv_heads, head_dim, dtype)
    launch = launch_for(step.rows, num_heads // num_kv_heads, deterministic=deterministic, head_dim=head_dim)
    found = attend(cache, step.rows, inputs, launch)
    expected = ReferenceRows(other, step.rows).attend(1, *inputs)
    tolerance = 3e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(cache.key_pages, other.key_pages)
    assert torch.equal(cache.value_pages, other.value_pages)


@pytest.mark.parametrize("num_splits", [1, 2, 13, 64])
def test_the_number_of_splits_changes_rounding_only(num_splits: int) -> None:
    step = make_step(np.random.default_rng(0), PAGE_SIZE, [4000, 17, 900], [[ROOT, 0, 1], [], [ROOT]])
    cache = make_cache(step.num_pages, PAGE_SIZE, 2, 128, torch.bfloat16)
    heads = random_heads(len(step.rows.positions), 12, 2, 128, torch.bfloat16)
    found = attend(cache, step.rows, heads, launch_for(step.rows, 6, deterministic=False, num_splits=num_splits))
    expected = ReferenceRows(cache, step.rows).attend(1, *heads)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("heads", [(12, 2, 128), (14, 2, 64), (8, 8, 80)])
@pytest.mark.parametrize("context", [1, 60, 63, 64, 500, 511, 512, 1500])
def test_a_drafted_token_has_the_bits_of_a_committed_one(
    context: int, heads: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Deterministic mode: verified within a tree and a batch; then alone, behind its branch as committed tokens."""
    random = np.random.default_rng(context)
    num_heads, num_kv_heads, head_dim = heads
    parents = random_parents(random, 24)
    others = [random_parents(random, int(random.integers(0, 9))) for _ in range(30)]
    step = make_step(random, PAGE_SIZE, [context, *random.integers(1, 2000, 30).tolist()], [parents, *others])
    rows = step.rows
    table = rows.page_tables[:1]
    cache = make_cache(step.num_pages, PAGE_SIZE, num_kv_heads, head_dim, dtype)
    alone = copy_cache(cache)
    inputs = random_heads(len(rows.positions), num_heads, num_kv_heads, head_dim, dtype)
    group = num_heads // num_kv_heads
    together = attend(cache, rows, inputs, launch_for(rows, group, deterministic=True))
    for node in range(ROOT, len(parents)):
        branch = [node]
        while branch[0] != ROOT:
            branch.insert(0, parents[branch[0]])
        positions = context - 1 + np.arange(len(branch))
        for position, ancestor in zip(positions.tolist(), branch, strict=True):
            page, offset = int(table[0, position // PAGE_SIZE]), position % PAGE_SIZE
            alone.kernel_keys(1)[page, offset] = inputs[1][ancestor + 1]
            alone.kernel_values(1)[page, offset] = inputs[2][ancestor + 1]
        one = committed_rows(table, positions[-1:], PAGE_SIZE)
        own = [tensor[node + 1 : node + 2] for tensor in inputs]
        for num_splits in (4, 16):  # of a bucket of short contexts, and of long ones
            launch = launch_for(one, group, deterministic=True, num_splits=num_splits)
            assert torch.equal(attend(alone, one, own, launch)[0], together[node + 1]), (node, num_splits)


def test_a_prompt_row_has_the_same_bits_in_every_chunk() -> None:
    """Deterministic mode: chunks begin anywhere, so that a row takes any place in a tile."""
    step = make_step(np.random.default_rng(5), PAGE_SIZE, [], [], [(0, 900)])
    cache = make_cache(step.num_pages, PAGE_SIZE, 2, 128, torch.bfloat16)
    heads = random_heads(900, 4, 2, 128, torch.bfloat16)  # eight rows a tile
    whole = attend(cache, step.rows, heads, launch_for(step.rows, 2, deterministic=True))
    for start, count in ((0, 7), (13, 1), (30, 100), (509, 9), (895, 5)):
        chunk = slice(start, start + count)
        rows = committed_rows(step.rows.page_tables, step.rows.positions[chunk], PAGE_SIZE)
        found = attend(cache, rows, [tensor[chunk] for tensor in heads], launch_for(rows, 2, deterministic=True))
        assert torch.equal(found, whole[chunk]), start


def test_a_cache_of_more_than_two_billion_elements() -> None:
    """The last page of a cache whose offsets do not fit in 32 bits."""
    num_pages = 2**31 // (16 * 8 * 128) + 10
    free = torch.cuda.mem_get_info()[0]
    if free < 3 * 2 * num_pages * 16 * 8 * 128:
        pytest.skip("needs about 13 GiB of free memory")
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
    step = make_step(np.random.default_rng(0), 16, [40, 100], [[ROOT, 0], []])
    rows = step.rows
    shifted = PagedRows(
        positions=rows.positions,
        write_slots=rows.write_slots + np.int32(16 * (num_pages - step.num_pages)),
        page_tables=rows.page_tables + np.int32(num_pages - step.num_pages),
        row_tables=rows.row_tables,
        context_lengths=rows.context_lengths,
        path_slots=rows.path_slots + np.int32(16 * (num_pages - step.num_pages)),
        path_lengths=rows.path_lengths,
    )
    cache.key_pages[:, -step.num_pages :].normal_()
    cache.value_pages[:, -step.num_pages :].normal_()
    heads = random_heads(len(rows.positions), 16, 8, 128, torch.bfloat16)
    for deterministic in (False, True):
        launch = launch_for(shifted, 2, deterministic=deterministic, num_splits=2)
        split_keys = choose_split_keys(longest=100, launch=launch)
        found = make_plan(cache, shifted, launch, 16, split_keys=split_keys).attend(0, *heads)
        expected = ReferenceRows(cache, shifted).attend(0, *heads)
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_follows_its_inputs(deterministic: bool) -> None:
    """Captured over one step, replayed over another of the same shape: nothing of the first is baked in."""
    steps = [
        make_step(np.random.default_rng(seed), PAGE_SIZE, [1000, shorter], [[ROOT, 0, 0], [ROOT, ROOT]])
        for seed, shorter in ((0, 30), (1, 700))
    ]
    num_pages = max(step.num_pages for step in steps)
    cache = make_cache(num_pages, PAGE_SIZE, 2, 128, torch.bfloat16)
    heads = random_heads(len(steps[0].rows.positions), 12, 2, 128, torch.bfloat16)
    launch = launch_for(steps[0].rows, 6, deterministic=deterministic, num_splits=3)
    split_keys = 512
    plans = [make_plan(cache, step.rows, launch, 12, split_keys=split_keys) for step in steps]
    plans[0].attend(1, *heads)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plans[0].attend(1, *heads)
    expected = plans[1].attend(1, *heads).clone()
    for field in dataclasses.fields(plans[0].rows):
        getattr(plans[0].rows, field.name).copy_(getattr(plans[1].rows, field.name))
    graph.replay()
    assert torch.equal(out, expected)


def planner_of(heads: tuple[int, int, int], page_size: int) -> BucketPlanner:
    num_heads, num_kv_heads, head_dim = heads
    return BucketPlanner(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        page_size=page_size,
        max_positions=4096,
        max_draft_nodes=128,
        num_multiprocessors=torch.cuda.get_device_properties(DEVICE).multi_processor_count,
        deterministic=False,
        rows_at_once=ROWS_AT_ONCE,
    )


@pytest.mark.parametrize("page_size", [16, 256])
@pytest.mark.parametrize("heads", [(12, 2, 128), (14, 2, 64), (8, 8, 80)])
@pytest.mark.parametrize("name", NAMES)
def test_a_librarys_attention_agrees_with_ours_or_says_why_it_cannot(
    name: str, heads: tuple[int, int, int], page_size: int
) -> None:
    """Launched and captured, a few sequences and many, with padding; then timed, which must not fail either."""
    planner = planner_of(heads, page_size)
    backend = find_backends((name,), device=DEVICE, dtype=torch.bfloat16, head_dim=heads[2], most_rows=2048)[name]
    if isinstance(backend, str):
        pytest.skip(backend)
    watch = CudaStopwatch(DEVICE)
    for size in ((1, 1), (3, 300), (15, 2000), (250, 600)):
        with torch.inference_mode():
            cache = random_cache(planner, [size], dtype=torch.bfloat16, device=DEVICE, num_layers=2)
            step = PlainStep(planner, cache, *size)
            fault = find_fault(backend, step, watch)
            if fault is not None and fault.startswith("it failed"):
                pytest.skip(fault)
            assert fault is None
            assert set(time_step({name: backend}, step, watch).seconds) == {OURS, name}


def test_our_kernel_passes_the_probe_itself() -> None:
    """The probe's own steps and graphs are right: our kernel, disguised, has no fault."""

    class Disguised:
        name = "ours"

        def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: DeviceRows) -> Tensor:
            out = torch.zeros_like(q, memory_format=torch.contiguous_format)
            attend_tree(q, keys, values, rows, out, scratch=step._scratch, launch=step.shape.launch)
            return out

    from srtrl.model.triton_attention import attend_tree

    planner = planner_of((12, 2, 128), PAGE_SIZE)
    with torch.inference_mode():
        cache = random_cache(planner, [(15, 2000)], dtype=torch.bfloat16, device=DEVICE, num_layers=1)
        step = PlainStep(planner, cache, 15, 2000)
        assert find_fault(Disguised(), step, CudaStopwatch(DEVICE)) is None
