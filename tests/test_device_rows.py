"""The rows of a step in static arrays: tiles, ancestor bits, padding, launches; and the cache's two layouts."""

import numpy as np
import pytest
import torch
from attention_cases import Step, make_step, random_parents
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import ROOT
from srtrl.engine.rows import dummy_rows
from srtrl.model.device_plan import (
    FIXED_SPLIT_KEYS,
    KEY_BLOCK,
    AttentionLaunch,
    AttentionScratch,
    choose_block_m,
    choose_num_splits,
    choose_split_keys,
)
from srtrl.model.device_rows import (
    DeviceRows,
    RowSizes,
    ancestor_bits,
    count_tiles,
    count_words,
    fill_rows,
    make_tiles,
    view_rows,
)
from srtrl.model.paged_attention import KVCache, PagedRows

PAGE_SIZE = 4


def random_step(seed: int, num_decodes: int, most_nodes: int, num_chunks: int) -> Step:
    random = np.random.default_rng(seed)
    return make_step(
        random,
        PAGE_SIZE,
        contexts=random.integers(1, 40, num_decodes).tolist(),
        parents=[random_parents(random, int(random.integers(0, most_nodes + 1))) for _ in range(num_decodes)],
        chunks=[(int(random.integers(0, 9)), int(random.integers(1, 12))) for _ in range(num_chunks)],
    )


def fill(rows: PagedRows, sizes: RowSizes, rows_per_tile: int, old: int = 77) -> DeviceRows:
    buffer = torch.full((sizes.num_elements,), old, dtype=torch.int32)
    views = view_rows(buffer, sizes)
    fill_rows(views, rows, rows_per_tile=rows_per_tile, split_keys=512)
    return views


def roomy_sizes(rows: PagedRows, num_words: int = 1) -> RowSizes:
    num_rows = len(rows.positions) + 3
    return RowSizes(
        num_rows=num_rows,
        num_tables=len(rows.page_tables) + 2,
        table_width=rows.page_tables.shape[1] + 1,
        depth=rows.path_slots.shape[1] + 1,
        num_words=num_words,
        num_tiles=num_rows,
    )


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 1000),
    num_decodes=st.integers(0, 5),
    num_chunks=st.integers(0, 3),
    rows_per_tile=st.integers(1, 9),
)
def test_tiles_cut_the_rows_of_each_sequence(seed: int, num_decodes: int, num_chunks: int, rows_per_tile: int) -> None:
    rows = random_step(seed, num_decodes, 8, max(num_chunks, num_decodes == 0)).rows
    tiles = make_tiles(rows.row_tables, rows.context_lengths, rows_per_tile)
    covered = [range(first, first + count) for first, count in zip(tiles.tile_rows, tiles.tile_counts, strict=True)]
    assert [row for tile in covered for row in tile] == list(range(len(rows.positions)))
    counts = np.bincount(rows.row_tables)
    assert len(covered) == count_tiles(counts, rows_per_tile)
    for tile, table, num_keys in zip(covered, tiles.tile_tables, tiles.tile_keys, strict=True):
        assert 1 <= len(tile) <= rows_per_tile
        assert set(rows.row_tables[tile.start : tile.stop]) == {table}
        written = rows.write_slots[tile.start : tile.stop]
        places = rows.page_tables[table].repeat(PAGE_SIZE) * PAGE_SIZE + np.tile(
            np.arange(PAGE_SIZE), rows.page_tables.shape[1]
        )
        assert num_keys == 1 + max(list(places).index(slot) for slot in written)


@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 1000), num_decodes=st.integers(1, 4), most_nodes=st.sampled_from([3, 12, 70]))
def test_ancestor_bits_are_the_branch_of_each_node(seed: int, num_decodes: int, most_nodes: int) -> None:
    step = random_step(seed, num_decodes, most_nodes, 1)
    words = ancestor_bits(step.rows, count_words(most_nodes))
    expected: list[set[int]] = []
    for parents in step.parents:
        expected.append(set())  # the root
        branches: list[set[int]] = []
        for node, parent in enumerate(parents):
            branches.append({node} | (set() if parent == ROOT else branches[parent]))
        expected += branches
    found = [{32 * w + bit for w, word in enumerate(row) for bit in range(32) if int(word) >> bit & 1} for row in words]
    assert found[: len(expected)] == expected
    assert not any(found[len(expected) :])


def test_arrays_are_filled_anew_with_padding() -> None:
    rows = random_step(3, 3, 6, 1).rows
    sizes = roomy_sizes(rows)
    found = fill(rows, sizes, 2)
    num_rows, depth = len(rows.positions), rows.path_slots.shape[1]
    for name in ("positions", "write_slots", "context_lengths", "path_lengths"):
        array = getattr(found, name)
        assert array[:num_rows].tolist() == getattr(rows, name).tolist()
        assert array[num_rows:].tolist() == [-1 if name == "write_slots" else 0] * 3
    assert np.array_equal(found.path_slots[:num_rows, :depth].numpy(), rows.path_slots)
    num_tables, width = rows.page_tables.shape
    assert np.array_equal(found.page_tables[:num_tables, :width].numpy(), rows.page_tables)
    assert not found.page_tables[num_tables:].any()
    assert not found.page_tables[:, width:].any()
    assert np.array_equal(found.ancestors[:num_rows].numpy(), ancestor_bits(rows, 1))
    tiles = make_tiles(rows.row_tables, rows.context_lengths, 2)
    assert found.tiles[: len(tiles.tile_rows), 3].tolist() == tiles.tile_keys.tolist()
    assert not found.tiles[len(tiles.tile_rows) :].any()
    assert found.split_keys.tolist() == [512]
    for field, array in ((name, getattr(fill(rows, sizes, 2, old=-5), name)) for name in sizes.shapes()):
        assert torch.equal(array, getattr(found, field)), field


def test_views_cover_one_buffer_at_aligned_offsets() -> None:
    sizes = RowSizes(num_rows=5, num_tables=2, table_width=3, depth=0, num_words=1, num_tiles=7)
    buffer = torch.zeros(sizes.num_elements, dtype=torch.int32)
    views = view_rows(buffer, sizes)
    for number, name in enumerate(sizes.shapes(), 1):
        array = getattr(views, name)
        assert (array.storage_offset() * 4) % 128 == 0
        assert not array.any()  # no other array's elements
        array.fill_(number)
    assert views.num_tiles == 7


@pytest.mark.parametrize(
    "change", [{"num_tiles": 1}, {"num_tables": 1}, {"table_width": 1}, {"depth": 0, "num_words": 0}, {"num_rows": 4}]
)
def test_what_does_not_fit_is_refused(change: dict[str, int]) -> None:
    rows = make_step(np.random.default_rng(0), PAGE_SIZE, [9, 9], [[ROOT, 0, 1], [ROOT]]).rows
    sizes = {"num_rows": 6, "num_tables": 2, "table_width": 3, "depth": 3, "num_words": 0, "num_tiles": 4}
    fill(rows, RowSizes(**sizes), 2)
    with pytest.raises((AssertionError, ValueError)):
        fill(rows, RowSizes(**(sizes | change)), 2)


def test_rows_that_are_only_timed_fit_too() -> None:
    rows = dummy_rows(num_rows=7, context_tokens=10, num_sequences=2, num_pages=4, page_size=PAGE_SIZE)
    found = fill(rows, roomy_sizes(rows), 2)
    assert found.ancestors[:7, 0].tolist() == [0, 1, 2, 4, 0, 1, 2]
    assert found.tiles[:4, 3].tolist() == [11, 13, 11, 12]


@pytest.mark.parametrize(
    ("rows_per_sequence", "group", "head_dim", "free", "deterministic"),
    [
        (1, 6, 128, 16, 16),
        (2.5, 6, 128, 32, 16),
        (8, 6, 128, 64, 16),
        (100, 6, 128, 64, 16),
        (100, 6, 256, 32, 16),
        (1, 32, 64, 32, 32),
        (9, 1, 64, 16, 16),
        (1, 71, 64, 128, 128),
    ],
)
def test_a_block_holds_the_rows_of_a_usual_sequence(
    rows_per_sequence: float, group: int, head_dim: int, free: int, deterministic: int
) -> None:
    for expected, is_deterministic in ((free, False), (deterministic, True)):
        block_m = choose_block_m(
            rows_per_sequence=rows_per_sequence, group=group, head_dim=head_dim, deterministic=is_deterministic
        )
        assert block_m == expected
        assert AttentionLaunch(block_m=block_m, num_splits=1, deterministic=is_deterministic).rows_per_tile(group) >= 1


def splits(num_tiles: int, max_keys: int = 8192, deterministic: bool = False, block_m: int = 16) -> int:
    return choose_num_splits(
        num_tiles=num_tiles,
        num_kv_heads=2,
        block_m=block_m,
        max_keys=max_keys,
        num_multiprocessors=132,
        deterministic=deterministic,
    )


def test_splits_fill_the_chip_once() -> None:
    assert splits(640) == 1
    assert splits(64) == 3  # 384 programs on 132 multiprocessors
    assert splits(64, block_m=64) == 2  # of which two have room at a time
    assert splits(4) == 49
    assert splits(1) == 64
    assert splits(4, max_keys=300) == 3  # no split shorter than two blocks
    assert splits(0) == 64


def test_deterministic_splits_depend_on_the_longest_context_only() -> None:
    assert {splits(num_tiles, 8192, deterministic=True) for num_tiles in (1, 64, 640)} == {16}
    assert splits(1, 8193, deterministic=True) == 17
    assert splits(1, 100, deterministic=True) == 2  # no other kernel for short contexts


def test_wide_heads_take_fewer_keys_at_once() -> None:
    launch = AttentionLaunch(block_m=16, num_splits=1, deterministic=False)
    found = [launch.keys_at_once(head_dim, torch.bfloat16) for head_dim in (64, 80, 128, 256)]
    assert found == [64, 64, 64, 32]
    assert [launch.keys_at_once(head_dim, torch.float32) for head_dim in (64, 128, 192, 1024)] == [64, 32, 16, 16]


def test_split_keys_cover_the_longest_row_in_whole_blocks() -> None:
    free = AttentionLaunch(block_m=16, num_splits=7, deterministic=False)
    for longest in (0, 1, 64, 449, 450, 5000):
        split_keys = choose_split_keys(longest=longest, launch=free)
        assert split_keys % KEY_BLOCK == 0
        assert split_keys * 7 >= max(1, longest) > (split_keys - KEY_BLOCK) * 7 - (longest == 0)
    fixed = AttentionLaunch(block_m=16, num_splits=2, deterministic=True)
    assert choose_split_keys(longest=3, launch=fixed) == FIXED_SPLIT_KEYS
    with pytest.raises(AssertionError):
        choose_split_keys(longest=2 * FIXED_SPLIT_KEYS + 1, launch=fixed)


def test_scratch_memory_is_what_is_announced() -> None:
    launch = AttentionLaunch(block_m=16, num_splits=3, deterministic=False)
    num_lanes = AttentionScratch.lanes_for(num_tiles=5, num_kv_heads=2, launch=launch)
    assert num_lanes == 5 * 2 * 3 * 16
    scratch = AttentionScratch(
        num_rows=9, num_heads=4, head_dim=8, num_lanes=num_lanes, dtype=torch.bfloat16, device="cpu"
    )
    found = sum(tensor.nbytes for tensor in (scratch.out, scratch.means, scratch.log_weights))
    assert found == AttentionScratch.bytes_needed(
        num_rows=9, num_heads=4, head_dim=8, num_lanes=num_lanes, dtype=torch.bfloat16
    )


def make_caches() -> tuple[KVCache, KVCache]:
    """The two layouts with the same random content."""
    caches = []
    for token_major in (False, True):
        cache = KVCache(
            num_layers=2,
            num_pages=5,
            page_size=4,
            num_kv_heads=3,
            head_dim=6,
            dtype=torch.float32,
            device="cpu",
            token_major=token_major,
        )
        generator = torch.Generator().manual_seed(0)
        cache.key_pages.copy_(torch.randn(cache.key_pages.shape, generator=generator))
        cache.value_pages.copy_(torch.randn(cache.value_pages.shape, generator=generator))
        caches.append(cache)
    return caches[0], caches[1]


def test_both_layouts_of_the_cache_hold_the_same() -> None:
    plain, token_major = make_caches()
    for cache in (plain, token_major):
        cache.copy_pages([0, 3], [3, 1])
        cache.move_slots(np.array([5, 6, 17], np.int32), np.array([4, 5, 9], np.int32))
    assert torch.equal(plain.key_pages, token_major.key_pages)
    assert torch.equal(plain.value_pages, token_major.value_pages)


def test_a_token_major_cache_lends_its_memory_to_kernels() -> None:
    cache = make_caches()[1]
    keys, values = cache.kernel_keys(1), cache.kernel_values(1)
    assert keys.shape == values.shape == (5, 4, 3, 6)
    assert keys.is_contiguous()
    assert values.is_contiguous()
    keys[2, 3, 1] = 7.0
    values[2, 3, 1] = 8.0
    assert (cache.key_pages[1, 2, 1, :, 3] == 7).all()
    assert (cache.value_pages[1, 2, 1, 3] == 8).all()
