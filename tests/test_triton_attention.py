"""The attention kernels of the device, on whatever device there is (interpreted on a CPU), against the reference."""

from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import (
    Step,
    committed_rows,
    copy_cache,
    make_cache,
    make_launch,
    make_plan,
    make_step,
    random_heads,
    random_parents,
)
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernel_cases import KERNEL_DEVICE
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT
from srtrl.model.paged_attention import KVCache, PagedRows, ReferenceRows

HEADS = {1: (2, 2), 2: (2, 1), 6: (6, 1), 7: (7, 1)}
"""(H, K) by G."""


def random_step(seed: int, page_size: int) -> Step:
    """A sequence with a tree, one without and a prefill chunk."""
    random = np.random.default_rng(seed)
    return make_step(
        random,
        page_size,
        contexts=random.integers(1, 60, 2).tolist(),
        parents=[random_parents(random, int(random.integers(0, 6))), []],
        chunks=[(int(random.integers(0, 30)), int(random.integers(1, 4)))],
    )


def reference(cache: KVCache, rows: PagedRows, heads: list[Tensor]) -> Tensor:
    num_rows = len(rows.positions)
    return ReferenceRows(cache, rows).attend(1, *(tensor[:num_rows] for tensor in heads))


def check_against_the_reference(
    seed: int,
    group: int,
    head_dim: int,
    page_size: int,
    num_splits: int,
    block_m: int,
    deterministic: bool,
    padding: int,
) -> None:
    step = random_step(seed, page_size)
    num_heads, num_kv_heads = HEADS[group]
    cache = make_cache(step.num_pages, page_size, num_kv_heads, head_dim, torch.float32)
    other = copy_cache(cache)
    num_rows = len(step.rows.positions)
    heads = random_heads(num_rows + padding, num_heads, num_kv_heads, head_dim, torch.float32)
    launch = make_launch(group=group, num_splits=num_splits, deterministic=deterministic, block_m=block_m)
    split_keys = 32 if num_splits > 1 else 96
    plan = make_plan(cache, step.rows, launch, num_heads, split_keys=split_keys, padding=padding)
    found = plan.attend(1, *heads)
    torch.testing.assert_close(found[:num_rows], reference(other, step.rows, heads), rtol=1e-5, atol=1e-5)
    assert not found[num_rows:].any()
    assert torch.equal(cache.key_pages, other.key_pages)
    assert torch.equal(cache.value_pages, other.value_pages)


KERNEL_INPUTS = {
    "seed": st.integers(0, 1000),
    "group": st.sampled_from(sorted(HEADS)),
    "head_dim": st.sampled_from([16, 24, 64]),
    "page_size": st.sampled_from([4, 16]),
    "num_splits": st.sampled_from([1, 3]),
    "block_m": st.sampled_from([16, 32]),
    "deterministic": st.booleans(),
    "padding": st.sampled_from([0, 3]),
}


@settings(deadline=None, max_examples=3, phases=[Phase.generate])
@given(**KERNEL_INPUTS)
def test_kernels_agree_with_the_reference(**inputs: Any) -> None:
    check_against_the_reference(**inputs)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(**KERNEL_INPUTS)
def test_kernels_agree_with_the_reference_often(**inputs: Any) -> None:
    check_against_the_reference(**inputs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_kernels_agree_with_the_reference_in_bfloat16(deterministic: bool, num_splits: int) -> None:
    """Inputs are the same bfloat16 numbers; what differs is how the weights (on a device) and results are rounded."""
    step = random_step(1, 16)
    cache = make_cache(step.num_pages, 16, 1, 64, torch.bfloat16)
    heads = random_heads(len(step.rows.positions), 6, 1, 64, torch.bfloat16)
    launch = make_launch(group=6, num_splits=num_splits, deterministic=deterministic)
    expected = reference(copy_cache(cache), step.rows, heads)
    found = make_plan(cache, step.rows, launch, 6, split_keys=32 if num_splits > 1 else 96).attend(1, *heads)
    torch.testing.assert_close(found, expected, rtol=0.02 if KERNEL_DEVICE == "cuda" else 0.008, atol=0.005)


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 1000), deterministic=st.booleans())
def test_the_plan_without_kernels_agrees_with_the_reference(seed: int, deterministic: bool) -> None:
    step = random_step(seed, 4)
    cache = make_cache(step.num_pages, 4, 2, 8, torch.float32)
    other = copy_cache(cache)
    heads = random_heads(len(step.rows.positions) + 2, 4, 2, 8, torch.float32)
    launch = make_launch(group=2, num_splits=1, deterministic=deterministic)
    plan = make_plan(cache, step.rows, launch, 4, split_keys=96, padding=2, use_kernels=False)
    found = plan.attend(1, *heads)[:-2]
    torch.testing.assert_close(found, reference(other, step.rows, heads), rtol=1e-5, atol=1e-5)
    assert torch.equal(cache.key_pages, other.key_pages)


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_number_of_splits_changes_rounding_only(deterministic: bool) -> None:
    step = make_step(np.random.default_rng(0), 4, [60, 7], [[ROOT, ROOT, 0], []])
    cache = make_cache(step.num_pages, 4, 1, 16, torch.float32)
    heads = random_heads(len(step.rows.positions), 2, 1, 16, torch.float32)
    found = [
        make_plan(
            cache,
            step.rows,
            make_launch(group=2, num_splits=num_splits, deterministic=deterministic),
            2,
            split_keys=split_keys,
        ).attend(0, *heads)
        for num_splits, split_keys in ((1, 64), (2, 32), (4, 16))
    ]
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[0], rtol=1e-5, atol=1e-5)
    assert not torch.equal(found[2], found[0])  # the splits did take place


@pytest.mark.parametrize("deterministic", [False, True])
def test_more_splits_than_written_and_little_scratch_change_no_bit(deterministic: bool) -> None:
    """In deterministic mode a bucket of longer contexts, or of more tiles than fit at once, must be the same."""
    step = make_step(np.random.default_rng(0), 4, [50, 7, 33], [[ROOT, ROOT, 0], [], [ROOT]])
    cache = make_cache(step.num_pages, 4, 1, 16, torch.float32)
    heads = random_heads(len(step.rows.positions), 4, 1, 16, torch.float32)
    found = []
    for num_splits, num_lanes in ((2, None), (18, None), (2, 2 * (2 * 16) + 5)):
        launch = make_launch(group=4, num_splits=num_splits, deterministic=deterministic)
        plan = make_plan(cache, step.rows, launch, 4, split_keys=32, num_lanes=num_lanes)
        found.append(plan.attend(0, *heads).clone())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    launch = make_launch(group=4, num_splits=2, deterministic=deterministic)
    with pytest.raises(AssertionError, match="scratch"):
        make_plan(cache, step.rows, launch, 4, split_keys=32, num_lanes=31).attend(0, *heads)


@pytest.mark.parametrize("deterministic", [False, True])
def test_nothing_is_read_that_no_row_sees(deterministic: bool) -> None:
    """Page ids and path slots behind the last are wild, slots that no row sees hold NaN; the result is as before."""
    step = make_step(np.random.default_rng(0), 4, [37, 18], [[ROOT, ROOT, 0], [ROOT]], [(5, 3)])
    rows = step.rows
    heads = random_heads(len(rows.positions) + 2, 3, 1, 24, torch.float32)
    launch = make_launch(group=3, num_splits=2, deterministic=deterministic)
    found = []
    for wild in (False, True):
        cache = make_cache(step.num_pages, 4, 1, 24, torch.float32)
        plan = make_plan(cache, rows, launch, 3, split_keys=32, padding=2)
        if wild:
            lengths = [40, 19, 8]  # tokens with KV of each sequence, nodes included
            seen = np.zeros(step.num_pages * 4, np.bool_)
            for table, length in enumerate(lengths):
                pages = rows.page_tables[table]
                seen[(pages.repeat(4) * 4 + np.tile(np.arange(4), len(pages)))[:length]] = True
                plan.rows.page_tables[table, -(-length // 4) :] = 1 << 28
            plan.rows.page_tables[len(lengths) :] = 1 << 28
            unseen = torch.from_numpy(~seen).view(-1, 4).to(KERNEL_DEVICE)
            cache.kernel_keys(0)[unseen] = torch.nan
            cache.kernel_values(0)[unseen] = torch.nan
            if deterministic:
                wide = torch.arange(plan.rows.path_slots.shape[1], device=KERNEL_DEVICE)
                plan.rows.path_slots[wide >= plan.rows.path_lengths[:, None]] = 1 << 28
        found.append(plan.attend(0, *heads)[:-2].clone())
    assert torch.equal(found[0], found[1])
    assert found[1].isfinite().all()


def branch_to(parents: list[int], node: int) -> list[int]:
    path: list[int] = []
    while node != ROOT:
        path.append(node)
        node = parents[node]
    return path[::-1]


@pytest.mark.parametrize(
    ("context", "dtype"), [(1, torch.float32), (14, torch.float32), (16, torch.bfloat16), (47, torch.float32)]
)
def test_a_drafted_token_has_the_bits_of_a_committed_one(context: int, dtype: torch.dtype) -> None:
    """Deterministic mode: verified within a tree and a batch; then alone, behind its branch as committed tokens."""
    random = np.random.default_rng(context)
    parents = [ROOT, ROOT, 1, 1, 3, 4]  # a first branch of one node, and longer ones
    step = make_step(random, 4, [context, int(random.integers(1, 40))], [parents, [ROOT]])
    rows = step.rows
    table = rows.page_tables[:1]
    cache = make_cache(step.num_pages, 4, 1, 16, dtype)
    alone = copy_cache(cache)
    heads = random_heads(len(rows.positions), 3, 1, 16, dtype)
    launch = make_launch(group=3, num_splits=2, deterministic=True)
    together = make_plan(cache, rows, launch, 3, split_keys=48).attend(0, *heads)
    for node in (0, 2, 5, ROOT):
        branch = [ROOT, *branch_to(parents, node)]
        positions = context - 1 + np.arange(len(branch))  # where they stand once committed
        for position, ancestor in zip(positions.tolist(), branch, strict=True):
            page, offset = table[0, position // 4], position % 4
            alone.kernel_keys(0)[page, offset] = heads[1][ancestor + 1]
            alone.kernel_values(0)[page, offset] = heads[2][ancestor + 1]
        one = committed_rows(table, positions[-1:], 4)
        own = slice(node + 1, node + 2)
        found = make_plan(alone, one, launch, 3, split_keys=48).attend(0, *(tensor[own] for tensor in heads))
        assert torch.equal(found[0], together[node + 1])


def test_a_prompt_row_has_the_same_bits_in_every_chunk() -> None:
    """Deterministic mode: rows of a tile differ in their contexts, and chunks begin anywhere."""
    random = np.random.default_rng(5)
    step = make_step(random, 4, [], [], [(0, 21)])
    cache = make_cache(step.num_pages, 4, 1, 16, torch.float32)
    heads = random_heads(21, 3, 1, 16, torch.float32)
    launch = make_launch(group=3, num_splits=2, deterministic=True)
    whole = make_plan(cache, step.rows, launch, 3, split_keys=16).attend(0, *heads)
    for start, count in ((1, 5), (16, 4)):
        chunk = slice(start, start + count)
        rows = committed_rows(step.rows.page_tables, step.rows.positions[chunk], 4)
        found = make_plan(cache, rows, launch, 3, split_keys=16).attend(0, *(tensor[chunk] for tensor in heads))
        assert torch.equal(found, whole[chunk])
