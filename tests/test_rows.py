"""The rows of a decode step and the compaction of accepted drafts, against plain loops over nodes."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from runner_cases import branch, kv_index, make_batch, random_trees, size_of

from srtrl.cuda.tiles import fill_tiles
from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.batch import Batch
from srtrl.engine.step_inputs import (
    NO_KV_INDEX,
    PrefillChunk,
    StepInputs,
    StepShape,
    fill_inputs,
    num_elements,
    slices_of,
)

Row = tuple[int, int, int, int, int, list[int]]
"""Token, rotary position, KV index, context length, page table, and the draft nodes that it sees."""


def expected_rows(
    batch: Batch, slots: list[int], trees: DraftTrees, chunks: list[PrefillChunk], page_size: int
) -> tuple[list[Row], list[int]]:
    """Rows by the definition, and the position that each writes."""
    rows: list[Row] = []
    written: list[int] = []
    for table, (slot, tree) in enumerate(zip(slots, trees, strict=True)):
        text, pages = batch.token_ids[slot, : batch.num_tokens[slot]].tolist(), batch.pages(slot)
        root = len(text) - 1
        for node in range(ROOT, tree.num_nodes):
            seen = branch(tree, node)
            token = text[-1] if node == ROOT else int(tree.token_ids[node])
            position = root + 1 + node
            own = kv_index(pages, position, page_size)
            rows.append((token, root + len(seen), own, root + 1, table, seen))
            written.append(position)
    for table, chunk in enumerate(chunks, len(slots)):
        for position, token in enumerate(chunk.token_ids.tolist(), chunk.start):
            own = kv_index(chunk.page_ids, position, page_size)
            rows.append((token, position, own, position + 1, table, []))
            written.append(position)
    return rows, written


@settings(deadline=None)
@given(
    num_trees=st.integers(0, 7),
    max_nodes=st.sampled_from([0, 1, 9, 33, 70]),
    num_chunks=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
    rows_per_tile=st.sampled_from([1, 4, 16]),
    padding=st.integers(0, 5),
    seed=st.integers(0, 10**6),
)
def test_rows_are_those_of_plain_loops_and_padding_does_nothing(
    num_trees: int, max_nodes: int, num_chunks: int, page_size: int, rows_per_tile: int, padding: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    num_chunks = max(num_chunks, 1 - num_trees)  # a step is never empty
    trees = random_trees(random, random.integers(0, max_nodes + 1, num_trees))
    texts = [random.integers(0, 50, int(random.integers(1, 20))).tolist() for _ in range(num_trees)]
    batch, slots = make_batch(random, texts, page_size=page_size, num_pages=1000, max_nodes=max_nodes)
    chunks = []
    for _ in range(num_chunks):
        tokens = random.integers(0, 50, int(random.integers(1, 10))).astype(np.int32)
        pages = random.permutation(600)[:20].astype(np.int32)
        chunks.append(PrefillChunk(tokens, int(random.integers(0, 10)), pages, 0))
    size = size_of(batch, slots, trees, chunks, page_size)
    expected, written = expected_rows(batch, slots.tolist(), trees, chunks, page_size)
    num_rows, num_sampled = len(expected), num_trees + trees.num_nodes
    assert (size.num_rows, size.num_sampled) == (num_rows, num_sampled)
    shape = StepShape(
        num_rows=num_rows + padding,
        num_sampled=num_sampled + padding,
        num_words=max(1, -(-max_nodes // 32)),
        table_width=size.max_pages,
        num_tables=num_trees + num_chunks,
    )
    garbage = random.integers(-(2**31), 2**31, num_elements(shape.fields())).astype(
        np.int32
    )  # what an earlier step left there
    inputs = StepInputs.of(garbage, shape)
    fill_inputs(inputs, batch.arrays, slots, trees, chunks, page_size)
    bits = np.unpackbits(inputs.ancestors.view(np.uint8).reshape(shape.num_rows, -1), axis=1, bitorder="little")
    columns = (inputs.token_ids, inputs.positions, inputs.kv_indices, inputs.context_lengths, inputs.row_tables)
    found = list(zip(*(column.tolist() for column in columns), (np.flatnonzero(b).tolist() for b in bits), strict=True))
    assert found == expected + [(0, 0, NO_KV_INDEX, 0, 0, [])] * padding
    owners = np.repeat(slots, 1 + trees.sizes)
    positions = [row[1] + 1 - int(batch.num_prompt_tokens[slot]) for row, slot in zip(expected, owners, strict=False)]
    assert inputs.sample_positions.tolist() == positions + [0] * padding
    assert inputs.rng_keys.view(np.uint64).tolist() == batch.rng_keys[owners].tolist() + [0] * padding
    assert inputs.temperatures.tolist() == batch.temperatures[owners].tolist() + [0] * padding
    for table, pages in enumerate([*map(batch.pages, slots.tolist()), *(chunk.page_ids for chunk in chunks)]):
        last = max(position for position, row in zip(written, expected, strict=True) if row[4] == table)
        count = last // page_size + 1
        assert inputs.page_tables[table, :count].tolist() == pages[:count].tolist()
    tiles = []
    for table in range(num_trees + num_chunks):
        rows = [number for number, row in enumerate(expected) if row[4] == table]
        for first in range(0, len(rows), rows_per_tile):
            part = rows[first : first + rows_per_tile]
            tiles.append([part[0], len(part), table, max(written[row] for row in part) + 1])
    tiles.sort(key=lambda tile: -tile[3])
    found_tiles = np.ones((num_rows + padding, 4), np.int32)
    fill_tiles(found_tiles, inputs, num_rows, rows_per_tile)
    assert found_tiles.tolist() == tiles + [[0, 0, 0, 0]] * (num_rows + padding - len(tiles))


def test_addresses_are_aligned_apart_and_do_not_depend_on_the_number_of_sequences() -> None:
    shape = StepShape(num_rows=13, num_sampled=7, num_words=3, table_width=9, num_tables=2)
    few, many = slices_of(shape.fields()), slices_of(shape._replace(num_tables=8).fields())
    assert {name: part.start for name, part in few.items()} == {name: part.start for name, part in many.items()}
    assert all(few[name] == many[name] for name in few if name != "page_tables")
    assert all(part.start % 32 == 0 for part in many.values())
    spans = sorted((part.start, part.stop) for part in many.values())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] <= num_elements(shape._replace(num_tables=8).fields())
    inputs = StepInputs.of(np.zeros(num_elements(shape.fields()), np.int32), shape)
    for name, (dtype, size) in shape.fields().items():
        array = getattr(inputs, name)
        assert (array.dtype, array.shape, array.flags.c_contiguous) == (dtype, size, True)
        array[...] = 1  # a view: it writes into the buffer
