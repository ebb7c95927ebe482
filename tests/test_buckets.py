"""The shapes of decode steps on a CUDA device: every step fits, little is padding, and larger steps never shrink."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.engine.buckets import (
    MAX_GRAPH_ROWS,
    MAX_SAMPLED_PROMPT_ROWS,
    ROWS_AT_ONCE,
    BucketPlanner,
    longest_keys,
    padded_rows,
    padded_tiles,
    padded_width,
)
from srtrl.model.device_rows import make_tiles


def planner(*, deterministic: bool = False, max_positions: int = 4224) -> BucketPlanner:
    return BucketPlanner(
        num_heads=12,
        num_kv_heads=2,
        head_dim=128,
        page_size=16,
        max_positions=max_positions,
        max_draft_nodes=128,
        num_multiprocessors=132,
        deterministic=deterministic,
        rows_at_once=ROWS_AT_ONCE,
    )


def test_row_edges_begin_fine_and_grow_coarser() -> None:
    edges = planner().row_edges(2048)
    assert edges[:8] == [1, 2, 4, 8, 16, 24, 32, 40]
    assert edges[-2:] == [1920, 2048]
    assert len(edges) < 60
    assert planner(deterministic=True).row_edges(400) == [64, 128, 192, 256, 320, 384, 448]


@given(num_rows=st.integers(1, 100_000), multiple=st.sampled_from([1, 64]))
def test_padding_of_rows_is_bounded_and_monotone(num_rows: int, multiple: int) -> None:
    padded = padded_rows(num_rows, multiple)
    assert padded >= num_rows
    assert padded % multiple == 0
    assert padded - num_rows < max(8, multiple, num_rows / 8)
    assert padded_rows(padded, multiple) == padded
    assert padded <= padded_rows(num_rows + 1, multiple)


@given(max_rows=st.integers(1, 5000), deterministic=st.booleans())
def test_row_edges_are_all_buckets(max_rows: int, deterministic: bool) -> None:
    edges = planner(deterministic=deterministic).row_edges(max_rows)
    multiple = ROWS_AT_ONCE if deterministic else 1
    assert edges == sorted({padded_rows(n, multiple) for n in range(1, max_rows + 1)})
    assert all(low < high for low, high in pairwise(edges))


@given(num_rows=st.integers(1, 3000), share=st.floats(0, 1))
def test_padding_of_tiles_is_at_most_a_half(num_rows: int, share: float) -> None:
    num_tiles = max(1, int(share * num_rows))
    padded = padded_tiles(num_tiles, num_rows)
    assert num_tiles <= padded <= min(1.5 * num_tiles + 1, num_rows)
    assert padded <= padded_tiles(min(num_tiles + 1, num_rows), num_rows)


@given(width=st.integers(1, 3000), most=st.integers(1, 3000))
def test_page_tables_have_few_widths(width: int, most: int) -> None:
    padded = padded_width(width, most, 64)
    assert padded >= width
    assert padded <= max(4 * width, 256, most if width > most // 4 else 0)
    assert len({padded_width(n, most, 64) for n in range(1, most + 1)}) <= 4


def test_one_width_of_page_tables_serves_a_rollout() -> None:
    for max_positions in (100, 4224, 8192, 30_000):
        widths = {
            planner(max_positions=max_positions)
            .shape(np.ones(4, np.int64), num_logits=4, table_width=width, depth=0)
            .table_width
            for width in range(1, -(-min(max_positions, 7_500) // 16))
        }
        assert len(widths) == 1


@settings(deadline=None, max_examples=200)
@given(
    seed=st.integers(0, 10**6),
    num_sequences=st.integers(0, 80),
    most_nodes=st.sampled_from([0, 1, 7, 30, 128]),
    num_chunks=st.integers(0, 3),
    deterministic=st.booleans(),
)
def test_every_step_fits_its_shape(
    seed: int, num_sequences: int, most_nodes: int, num_chunks: int, deterministic: bool
) -> None:
    random = np.random.default_rng(seed)
    num_chunks = max(num_chunks, 1 - num_sequences)
    decodes = 1 + random.integers(0, most_nodes + 1, num_sequences)
    chunks = random.integers(1, 300, num_chunks)
    counts = np.concatenate([decodes, chunks])
    num_real, num_logits = int(counts.sum()), int(decodes.sum())
    plan = planner(deterministic=deterministic)
    shape = plan.shape(counts, num_logits=num_logits, table_width=int(random.integers(1, 264)), depth=most_nodes)
    assert shape == plan.shape(counts[::-1], num_logits=num_logits, table_width=shape.table_width, depth=most_nodes)
    starts = random.integers(1, 3000, len(counts))
    tables = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    contexts = np.repeat(starts, counts).astype(np.int32)  # as of draft nodes: all see up to the root
    tiles = make_tiles(tables, contexts, shape.launch.rows_per_tile(6))
    assert len(tiles.tile_rows) <= shape.num_tiles <= shape.num_rows
    assert longest_keys(counts, contexts) == tiles.tile_keys.max()
    assert num_real <= shape.num_rows
    assert num_logits <= shape.num_logits <= shape.num_rows
    assert (shape.num_logits == 0) == (num_logits == 0)
    assert (shape.depth >= most_nodes) if deterministic else (32 * shape.num_words >= most_nodes)
    assert shape.can_be_captured == (shape.num_rows <= MAX_GRAPH_ROWS)
    if num_logits and num_real - num_logits <= MAX_SAMPLED_PROMPT_ROWS:
        assert shape.num_logits == shape.num_rows
    if deterministic:
        assert shape.num_rows % ROWS_AT_ONCE == shape.num_logits % ROWS_AT_ONCE == 0
        assert shape.launch.rows_per_tile(6) == plan.shape(
            np.ones(1, np.int64), num_logits=1, table_width=1, depth=0
        ).launch.rows_per_tile(6)


def test_few_sequences_are_split_and_many_are_not() -> None:
    plan = planner()
    one = plan.shape(np.ones(1, np.int64), num_logits=1, table_width=264, depth=0)
    many = plan.shape(np.ones(640, np.int64), num_logits=640, table_width=264, depth=0)
    assert one.launch.num_splits > 8
    assert many.launch.num_splits == 1
    assert one.num_rows == one.num_tiles == 1
    assert many.num_rows == 640


def test_large_steps_are_not_captured_and_few_prompt_rows_are_sampled_with_the_others() -> None:
    plan = planner()
    few = plan.shape(np.array([1] * 64 + [100]), num_logits=64, table_width=30, depth=0)
    assert few.num_logits == few.num_rows == 176
    many = plan.shape(np.array([1] * 64 + [512]), num_logits=64, table_width=30, depth=0)
    assert (many.num_logits, many.num_rows) == (64, 576)
    prompts = plan.shape(np.array([50]), num_logits=0, table_width=30, depth=0)
    assert prompts.num_logits == 0
    drafts = plan.shape(np.full(64, 20), num_logits=1280, table_width=30, depth=4)
    assert all(shape.can_be_captured for shape in (few, many, prompts, drafts))
    assert not plan.shape(np.full(64, 40), num_logits=2560, table_width=30, depth=4).can_be_captured
