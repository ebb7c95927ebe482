"""The rows of a decode step and the compaction of accepted drafts, against plain loops over nodes."""

import numpy as np
import pytest
import torch
from engine_cases import tiny_policy
from hypothesis import given, settings
from hypothesis import strategies as st

from srtrl.drafters.draft_tree import EMPTY_TREE, ROOT, DraftTree, DraftTrees
from srtrl.engine.rows import PageTables, build_rows, dummy_rows, pad_tables
from srtrl.engine.runner import ModelRunner
from srtrl.engine.sequence import PageHolder, PrefillChunk, PromptPages, Sequence
from srtrl.engine.tree_rows import node_depths, node_rows, root_rows
from srtrl.engine.verify import Walk
from srtrl.types import Request, SamplingParams


def random_trees(random: np.random.Generator, num_trees: int, most_nodes: int) -> DraftTrees:
    trees = [EMPTY_TREE]
    for _ in range(num_trees):
        size = int(random.integers(0, most_nodes + 1))
        trees.append(
            DraftTree(
                token_ids=random.integers(0, 50, size).astype(np.int32),
                parents=np.array([random.integers(ROOT, node) for node in range(size)], np.int32),
                scores=np.ones(size, np.float32),
            )
        )
    return DraftTrees.of(trees[1:])


def random_sequences(random: np.random.Generator, trees: DraftTrees, page_size: int, num_pages: int) -> list[Sequence]:
    """One sequence a tree, of various length, with pages for itself and the tree (and sometimes one more)."""
    free = random.permutation(num_pages).tolist()
    sequences = []
    for index, tree in enumerate(trees):
        tokens = random.integers(0, 50, int(random.integers(1, 20))).tolist()
        request = Request(
            prompt_id="",
            prompt_token_ids=(1,),
            draw_index=index,
            sample_index=0,
            rng_key=index,
            sampling=SamplingParams(max_new_tokens=100),
        )
        sequence = Sequence(token_ids=tokens, sequence_id=index, request=request, prompt=PromptPages([]))
        count = -(-(len(tokens) + tree.num_nodes) // page_size) + int(random.integers(2))
        sequence.set_pages([free.pop() for _ in range(count)])
        sequences.append(sequence)
    return sequences


def slot(sequence: Sequence, position: int, page_size: int) -> int:
    return sequence.page_ids[position // page_size] * page_size + position % page_size


@settings(deadline=None, max_examples=80)
@given(
    num_trees=st.integers(0, 7),
    most_nodes=st.sampled_from([0, 1, 9, 30]),
    num_prompts=st.integers(0, 3),
    page_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 10**6),
)
def test_rows_are_those_of_plain_loops(
    num_trees: int, most_nodes: int, num_prompts: int, page_size: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    num_prompts = max(num_prompts, 1 - num_trees)  # a step is never empty
    trees = random_trees(random, num_trees, most_nodes)
    sequences = random_sequences(random, trees, page_size, num_pages=600)
    chunks = []
    for _ in range(num_prompts):
        prompt = PromptPages(random.integers(0, 50, 20).tolist())
        prompt.set_pages(random.permutation(600)[:20].tolist())
        start = int(random.integers(0, 10))
        chunks.append(PrefillChunk(prompt, start, int(random.integers(1, 10))))
    expected: list[tuple[int, int, int, int, int, list[int]]] = []
    for index, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
        root = len(sequence.token_ids) - 1
        expected.append((sequence.token_ids[-1], root, slot(sequence, root, page_size), index, root + 1, []))
        paths: list[list[int]] = []
        for node, (token, parent) in enumerate(zip(tree.token_ids.tolist(), tree.parents.tolist(), strict=True)):
            own = slot(sequence, root + 1 + node, page_size)
            paths.append([own] if parent == ROOT else [*paths[parent], own])
            expected.append((token, root + len(paths[-1]), own, index, root + 1, paths[-1]))
    for index, chunk in enumerate(chunks):
        for position in range(chunk.start, chunk.start + chunk.count):
            own = chunk.holder.page_ids[position // page_size] * page_size + position % page_size
            token = chunk.holder.token_ids[position]
            expected.append((token, position, own, num_trees + index, position + 1, []))
    token_ids, rows = build_rows(sequences, trees, chunks, page_size)
    found = [
        (token, position, own, table, context, path[:length])
        for token, position, own, table, context, path, length in zip(
            token_ids.tolist(),
            rows.positions.tolist(),
            rows.write_slots.tolist(),
            rows.row_tables.tolist(),
            rows.context_lengths.tolist(),
            rows.path_slots.tolist(),
            rows.path_lengths.tolist(),
            strict=True,
        )
    ]
    assert found == expected
    assert token_ids.dtype == rows.write_slots.dtype == rows.path_slots.dtype == rows.context_lengths.dtype == np.int32
    for table, holder in zip(rows.page_tables, [*sequences, *(chunk.holder for chunk in chunks)], strict=True):
        assert table[: len(holder.page_ids)].tolist() == holder.page_ids
    depths = [len(path) for *_, path in expected[: num_trees + trees.num_nodes]]
    assert node_depths(trees).tolist() == [depth for depth in depths if depth]
    assert root_rows(trees).tolist() == [row for row, depth in enumerate(depths) if not depth]
    assert node_rows(trees).tolist() == [row for row, depth in enumerate(depths) if depth]


@given(seed=st.integers(0, 10_000), num_steps=st.integers(1, 8))
def test_kept_page_tables_are_those_that_are_padded_anew(seed: int, num_steps: int) -> None:
    random = np.random.default_rng(seed)
    kept = PageTables()
    holders = [PageHolder([]) for _ in range(6)]
    for _ in range(num_steps):
        for holder in holders:
            change = random.integers(4)
            pages = random.integers(0, 100, random.integers(1, 5)).tolist()
            if change == 0:
                holder.set_pages(pages)
            elif change == 1:
                holder.add_pages(pages)
            elif change == 2:
                holder.cut_pages(int(random.integers(1, 4)))
        some = [holders[i].page_table for i in random.permutation(6)[: random.integers(1, 7)] if holders[i].page_ids]
        if some:
            assert np.array_equal(kept.pad(some), pad_tables(some))


def runner_of(num_pages: int, page_size: int) -> ModelRunner:
    return ModelRunner(tiny_policy(), num_pages=num_pages, page_size=page_size, decode_dtype=None, deterministic=True)


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("seed", range(6))
def test_commit_moves_what_plain_loops_move(page_size: int, seed: int) -> None:
    random = np.random.default_rng(seed)
    trees = random_trees(random, 12, 12)
    sequences = random_sequences(random, trees, page_size, num_pages=300)
    runner = runner_of(300, page_size)
    runner.cache.key_pages.normal_()
    runner.cache.value_pages.normal_()
    keys, values = runner.cache.key_pages.clone(), runner.cache.value_pages.clone()
    expected_keys, expected_values = keys.clone(), values.clone()
    walks, num_moved = [], 0
    for sequence, tree in zip(sequences, trees, strict=True):
        node = int(random.integers(tree.num_nodes)) if tree.num_nodes and random.random() < 0.9 else ROOT
        path: list[int] = []
        while node != ROOT:
            path.insert(0, node)
            node = int(tree.parents[node])
        root = len(sequence.token_ids) - 1
        for depth, accepted in enumerate(path, start=1):
            source, target = slot(sequence, root + 1 + accepted, page_size), slot(sequence, root + depth, page_size)
            num_moved += source != target
            target_slot, source_slot = divmod(target, page_size), divmod(source, page_size)
            expected_keys[:, target_slot[0], ..., target_slot[1]] = keys[:, source_slot[0], ..., source_slot[1]]
            expected_values[:, target_slot[0], :, target_slot[1]] = values[:, source_slot[0], :, source_slot[1]]
        sequence.token_ids.extend([*tree.token_ids[path].tolist(), 3])
        walks.append(Walk(sequence, path))
    assert num_moved > 0
    runner.commit(walks)
    assert torch.equal(runner.cache.key_pages, expected_keys)
    assert torch.equal(runner.cache.value_pages, expected_values)
    assert [sequence.num_computed for sequence in sequences] == [len(s.token_ids) - 1 for s in sequences]


@settings(deadline=None, max_examples=60)
@given(
    num_rows=st.integers(1, 60),
    num_sequences=st.integers(1, 60),
    context_tokens=st.integers(1, 90),
    page_size=st.sampled_from([1, 5, 16]),
)
def test_dummy_rows_lie_as_a_steps_rows_do(
    num_rows: int, num_sequences: int, context_tokens: int, page_size: int
) -> None:
    num_sequences = min(num_sequences, num_rows)
    rows = dummy_rows(num_rows, context_tokens, num_sequences, 10_000, page_size)
    assert sorted(set(rows.row_tables.tolist())) == list(range(num_sequences))
    sizes = np.bincount(rows.row_tables)
    assert sizes.max() - sizes.min() <= 1
    assert len(set(rows.write_slots.tolist())) == num_rows  # pages of their own
    assert set(rows.context_lengths.tolist()) == {context_tokens}
    assert int((rows.path_lengths == 0).sum()) == num_sequences
    few = dummy_rows(num_rows, context_tokens, num_sequences, 2, page_size)
    assert few.page_tables.max() < 2
    assert few.write_slots.max() < 2 * page_size


def test_timing_a_forward_pass_needs_no_sequence_and_spoils_none() -> None:
    runner = runner_of(20, 4)
    assert runner.time_forward(1, 1, 1) > 0
    assert runner.time_forward(37, 50, 30, num_sequences=4) > 0  # more than there are pages: they are shared
    assert bool(runner.cache.key_pages.isfinite().all())
    assert bool(runner.cache.key_pages.any())
