"""Decode steps without an engine: random batches and trees, a runner's rows, and what the model itself says of each."""

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from engine_cases import make_request, tiny_policy
from kernel_cases import KERNEL_DEVICE
from plain_kernels import sample_rows_reference
from torch import Tensor

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.batch import Batch, PromptPages, Sample
from srtrl.engine.page_pool import PagePool
from srtrl.engine.runner import EngineOptions, RowFilters, Runner, SampledRows
from srtrl.engine.sampling import row_logprobs
from srtrl.engine.step_inputs import BatchArrays, Int32Array, Int64Array, PrefillChunk, StepSize, fill_inputs
from srtrl.model.attention import PackedPlan
from srtrl.model.transformer import Transformer

if TYPE_CHECKING:
    from srtrl.cuda.runner import CudaRunner


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
    """Index of a position's KV."""
    return int(page_ids[position // page_size]) * page_size + position % page_size


def make_batch(
    random: np.random.Generator,
    texts: Sequence[Sequence[int]],
    *,
    page_size: int,
    num_pages: int,
    max_nodes: int,
    temperature: float = 1.0,
) -> tuple[Batch, Int64Array]:
    """Samples whose tokens so far are `texts`, with pages for themselves and a tree; and their slots, in any order."""
    batch = Batch(len(texts) + 2, 64, PagePool(1, page_size), max_nodes)
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
        count = -(-(len(text) + max_nodes) // page_size)
        batch.set_pages(sample.slot, np.array([free.pop() for _ in range(count)], np.int32))
        slots.append(sample.slot)
    return batch, random.permutation(np.array(slots, np.int64))


def size_of(batch: Batch, slots: Int64Array, trees: DraftTrees, chunks: list[PrefillChunk], page_size: int) -> StepSize:
    """Size of the step."""
    counts = [len(chunk.token_ids) for chunk in chunks]
    ends = [chunk.start + count for chunk, count in zip(chunks, counts, strict=True)]
    return StepSize(
        rows_per_sequence=np.concatenate([1 + trees.sizes, np.array(counts, np.int64)]),
        num_sampled=len(slots) + trees.num_nodes,
        num_keys=np.concatenate([batch.num_tokens[slots] + trees.sizes, np.array(ends, np.int64)]),
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
                chunks.append(PrefillChunk(batch.token_ids[slot, start:end], start, batch.pages(slot), 0))
                batch.num_computed[slot] = end
        if not chunks:
            return
        launch(runner, batch, slots[:0], DraftTrees.empty(0), chunks)


PAGE_SIZE = 4
MAX_TOKENS = 48
MAX_NODES = 33  # their bits fill more than a word
NUM_TOP = 5
PROMPTS = ([5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [3, 3, 3, 3, 10, 11])

RunnerFactory = Callable[[Transformer], Runner]
"""Makes a runner of a policy and the dtype to decode in, with the sizes above."""


def runner_policy() -> Transformer:
    """Two layers, with query heads that share key-value heads and norms of heads."""
    return tiny_policy(
        hidden_size=32, model_type="qwen3", scale=4.0, num_attention_heads=4, num_key_value_heads=2, head_dim=16
    ).to(KERNEL_DEVICE)


def cuda_runner(policy: Transformer, **changes: object) -> "CudaRunner":
    """A runner as on a CUDA device, where the policy is."""
    from srtrl.cuda.runner import CudaRunner  # needs Triton, which macOS has not

    return CudaRunner(policy, runner_options(**changes), MAX_TOKENS)


def runner_options(**changes: Any) -> EngineOptions:
    """Options with the sizes above."""
    values = {"page_size": PAGE_SIZE, "max_draft_nodes": MAX_NODES, "slots": 128, "num_top": NUM_TOP}
    return EngineOptions(**(values | changes))


def batch_arrays(**arrays: Any) -> BatchArrays:
    """The arrays that the rows of a step are made from; zeros for those that `fill_inputs` does not read."""
    num_slots = len(arrays["num_tokens"])
    values = {name: np.zeros((num_slots, 1), np.int32) for name in BatchArrays._fields}
    return BatchArrays(**(values | arrays))


class Samples:
    """A batch with one slot for each prompt, and a runner that decodes them."""

    def __init__(self, runner: Runner, policy: Transformer, prompts: Sequence[Sequence[int]] = PROMPTS) -> None:
        self.runner = runner
        self.oracle = copy.deepcopy(policy).to("cpu")
        """Computes whole sequences, without pages."""
        self.batch, _ = make_batch(
            np.random.default_rng(0), prompts, page_size=PAGE_SIZE, num_pages=80, max_nodes=MAX_NODES + 16
        )
        self.slots = np.arange(len(prompts))
        self.batch.temperatures[self.slots] = np.linspace(0.0, 1.5, len(prompts))
        runner.allocate_pages(80)

    def step(
        self,
        slots: Sequence[int] = (0, 1, 2),
        trees: DraftTrees | None = None,
        chunks: Sequence[PrefillChunk] = (),
        filters: RowFilters | None = None,
    ) -> SampledRows:
        """Decode these slots, by default without drafts, beside prefill chunks."""
        trees = DraftTrees.empty(len(slots)) if trees is None else trees
        return launch(self.runner, self.batch, np.array(slots, np.int64), trees, chunks, filters)

    def chunk(self, slot: int, start: int, end: int) -> PrefillChunk:
        """Part of a sample's tokens."""
        return PrefillChunk(self.batch.token_ids[slot, start:end], start, self.batch.pages(slot), 0)

    def prefill(self) -> None:
        """All prompts but for their last tokens, which are the roots of the first step."""
        self.batch.num_computed[:] = 0
        prefill(self.runner, self.batch, self.slots, MAX_TOKENS)

    def expected_logits(self, slots: Sequence[int], trees: DraftTrees) -> Tensor:
        """[rows, V]: of each root and node as the end of a sequence of its own."""
        sequences = []
        for slot, tree in zip(slots, trees, strict=True):
            committed = self.batch.token_ids[slot, : self.batch.num_tokens[slot]]
            branches = [branch(tree, node) for node in range(ROOT, tree.num_nodes)]
            sequences += [np.concatenate([committed, tree.token_ids[nodes]]) for nodes in branches]
        lengths = [len(sequence) for sequence in sequences]
        with torch.inference_mode():
            tokens = torch.from_numpy(np.concatenate(sequences)).long()
            hidden = self.oracle(tokens, PackedPlan(lengths, "cpu"))
            return self.oracle.logits(hidden[torch.tensor(lengths).cumsum(0) - 1])

    def check_step(
        self,
        slots: Sequence[int] = (0, 1, 2),
        trees: DraftTrees | None = None,
        chunks: Sequence[PrefillChunk] = (),
        filters: RowFilters | None = None,
    ) -> None:
        """Do a step, in which each row must get the token and log-prob that the model gives it."""
        found = self.step(slots, trees, chunks, filters)
        trees = DraftTrees.empty(len(slots)) if trees is None else trees
        logits = self.expected_logits(slots, trees)
        tokens, logprobs = self.sample(logits, slots, trees)
        assert found.token_ids.tolist() == tokens.tolist()
        np.testing.assert_allclose(found.logprobs, logprobs, atol=2e-4)
        self.check_top(logits, slots, trees)

    def check_top(self, logits: Tensor, slots: Sequence[int], trees: DraftTrees) -> None:
        """The most likely tokens of each second row; a block of the CUDA kernels, which is all of V here, gives two."""
        temperatures = torch.from_numpy(self.batch.temperatures[np.repeat(np.array(slots), trees.sizes + 1)])[::2]
        expected = (logits[::2] / torch.where(temperatures > 0, temperatures, 1.0)[:, None]).log_softmax(-1)
        top = self.runner.top_tokens(np.arange(0, len(logits), 2), NUM_TOP)
        assert top is not None
        is_there = np.isfinite(top.logprobs)
        assert set(is_there.sum(1)) <= {2, NUM_TOP}
        for row, logprobs, ids, there in zip(expected, top.logprobs, top.token_ids, is_there, strict=True):
            np.testing.assert_allclose(np.sort(logprobs[there])[::-1], row.topk(int(there.sum())).values, atol=2e-4)
            np.testing.assert_allclose(row[ids[there].tolist()], logprobs[there], atol=2e-4)

    def sample(
        self, logits: Tensor, slots: Sequence[int], trees: DraftTrees, filtered: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Tokens (of `filtered` if given) and log-probs of `logits` [rows, V] by definition."""
        batch, owners = self.batch, np.repeat(np.array(slots), trees.sizes + 1)
        depths = np.concatenate([[len(branch(tree, node)) for node in range(ROOT, tree.num_nodes)] for tree in trees])
        positions = batch.num_tokens[owners] - batch.num_prompt_tokens[owners] + depths
        temperatures = torch.from_numpy(batch.temperatures[owners])
        keys = torch.from_numpy(batch.rng_keys[owners].view(np.int64))
        wanted = logits if filtered is None else filtered
        tokens = sample_rows_reference(wanted, temperatures, keys, torch.from_numpy(positions))
        return tokens, row_logprobs(logits, temperatures, tokens)

    def accept(self, slots: Sequence[int], trees: DraftTrees, paths: Sequence[Sequence[int]]) -> None:
        """Commit a path of nodes in each tree, and a bonus token; the KV of the nodes moves after the root's."""
        moves: list[list[int]] = []
        for slot, tree, path in zip(slots, trees, paths, strict=True):
            first = int(self.batch.num_tokens[slot])
            places = [(first + node, first + level) for level, node in enumerate(path) if node != level]
            pages = self.batch.pages(slot)
            for number, (source, target) in enumerate(places):
                lengths = 0 if number else len(places)
                moves.append([kv_index(pages, source, PAGE_SIZE), kv_index(pages, target, PAGE_SIZE), lengths])
            tokens = [*tree.token_ids[list(path)].tolist(), 7]
            self.batch.token_ids[slot, first : first + len(tokens)] = tokens
            self.batch.num_tokens[slot] += len(tokens)
        self.runner.move_kv(np.array(moves, np.int32).reshape(-1, 3))
