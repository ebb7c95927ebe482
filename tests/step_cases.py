"""Random decode steps without an engine: batches, draft trees, and what a runner makes of them."""

from collections.abc import Iterable, Sequence

import numpy as np
from engine_cases import make_request

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.batch import Batch, PromptPages, Sample
from srtrl.engine.page_pool import PagePool
from srtrl.engine.rows import Int32Array, Int64Array, PrefillChunk, StepSize, fill_inputs
from srtrl.engine.runner import RowFilters, Runner, SampledRows


def random_tree(random: np.random.Generator, num_nodes: int, vocab_size: int = 50) -> DraftTree:
    """A tree of any shape; siblings may carry equal tokens."""
    return DraftTree(
        token_ids=random.integers(0, vocab_size, num_nodes).astype(np.int32),
        parents=np.array([random.integers(ROOT, node) for node in range(num_nodes)], np.int32),
        scores=np.ones(num_nodes, np.float32),
    )


def random_trees(random: np.random.Generator, sizes: Iterable[int], vocab_size: int = 50) -> DraftTrees:
    """Trees of these sizes."""
    return DraftTrees.of(random_tree(random, int(size), vocab_size) for size in sizes)


def branch(tree: DraftTree, node: int) -> list[int]:
    """Nodes from the root's child down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, node)
        node = int(tree.parents[node])
    return path


def kv_index(page_ids: Int32Array, position: int, page_size: int) -> int:
    """Where the KV of a position lies."""
    return int(page_ids[position // page_size]) * page_size + position % page_size


def make_batch(
    random: np.random.Generator,
    texts: Sequence[Sequence[int]],
    *,
    page_size: int,
    num_pages: int,
    most_nodes: int,
    temperature: float = 1.0,
) -> tuple[Batch, Int64Array]:
    """Samples whose tokens so far are `texts`, with pages for themselves and a tree; and their slots, in any order."""
    batch = Batch(len(texts) + 2, 64, PagePool(1, page_size), most_nodes)
    free = random.permutation(num_pages).astype(np.int32).tolist()
    slots = []
    for index, text in enumerate(texts):
        num_prompt = int(random.integers(1, len(text) + 1))
        asked = make_request(
            index,
            prompt=text[:num_prompt],
            rng_key=int(random.integers(0, 2**64, dtype=np.uint64)),
            max_new_tokens=20,
            temperature=temperature + index / 8,
        )
        prompt = PromptPages(np.array(text[:num_prompt], np.int32))
        rest = np.array(text[num_prompt:], np.int32)
        sample = Sample(asked, prompt, token_ids=rest, logprobs=np.zeros(len(rest), np.float32))
        batch.put(sample)
        count = -(-(len(text) + most_nodes) // page_size)
        batch.set_pages(sample.slot, np.array([free.pop() for _ in range(count)], np.int32))
        slots.append(sample.slot)
    return batch, random.permutation(np.array(slots, np.int64))


def size_of(batch: Batch, slots: Int64Array, trees: DraftTrees, chunks: list[PrefillChunk], page_size: int) -> StepSize:
    """What the step needs room for."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    ends = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
    return StepSize(
        rows_per_sequence=np.concatenate([1 + trees.sizes, np.array(counts, np.int64)]),
        num_sampled=len(slots) + trees.num_nodes,
        max_keys=max([*(batch.num_tokens[slots] + trees.sizes).tolist(), *ends]),
        page_size=page_size,
    )


def launch(
    runner: Runner,
    batch: Batch,
    slots: Int64Array,
    trees: DraftTrees,
    chunks: Sequence[PrefillChunk] = (),
    filters: RowFilters | None = None,
) -> SampledRows:
    """Compute a step of the batch."""
    inputs = runner.inputs_for(size_of(batch, slots, trees, list(chunks), runner.page_size))
    fill_inputs(inputs, batch.arrays, slots, trees, list(chunks), runner.page_size)
    runner.launch(inputs, filters)
    return runner.wait(len(slots) + trees.num_nodes)


def prefill(runner: Runner, batch: Batch, slots: Int64Array, chunk_tokens: int) -> None:
    """Compute the KV before the roots, in chunks of several samples per step."""
    while True:
        chunks = []
        for slot in slots.tolist():
            start = int(batch.num_computed[slot])
            end = min(start + chunk_tokens, int(batch.num_tokens[slot]) - 1)
            if end > start:
                chunks.append(PrefillChunk(batch.token_ids[slot, start:end], start, batch.pages(slot)))
                batch.num_computed[slot] = end
        if not chunks:
            return
        launch(runner, batch, slots[:0], DraftTrees.empty(0), chunks)
