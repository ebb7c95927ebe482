"""The paged decode path: against `transformers` for every family, and the kernel against its plain PyTorch twin."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CASES, ModelCase, hf_logits, load_ours, make_hf_model, random_sequences

from srtrl.drafters.draft_tree import ROOT, DraftTree, DraftTrees
from srtrl.engine.runner import ModelRunner
from srtrl.engine.sequence import PrefillChunk, PromptPages, ScheduledStep, Sequence
from srtrl.model.paged_attention import KVCache, PagedPlan, PagedRows, ReferenceRows
from srtrl.types import Request, SamplingParams

PAGE_SIZE = 4


def sequence_of(token_ids: list[int], pages: list[int]) -> Sequence:
    request = Request(
        prompt_id="",
        prompt_token_ids=tuple(token_ids),
        draw_index=0,
        sample_index=0,
        rng_key=0,
        sampling=SamplingParams(max_new_tokens=1),
    )
    sequence = Sequence(token_ids=token_ids, sequence_id=0, request=request, prompt=PromptPages([]))
    sequence.set_pages(pages)
    return sequence


def random_tree(random: np.random.Generator, num_nodes: int, vocab_size: int) -> DraftTree:
    parents = [int(random.integers(ROOT, node)) if node else ROOT for node in range(num_nodes)]
    return DraftTree(
        token_ids=np.arange(num_nodes, dtype=np.int32) % vocab_size,
        parents=np.array(parents, np.int32),
        scores=np.ones(num_nodes, np.float32),
    )


def branch(tree: DraftTree, node: int) -> list[int]:
    """Tokens from the root's child down to `node`."""
    path: list[int] = []
    while node != ROOT:
        path.append(int(tree.token_ids[node]))
        node = int(tree.parents[node])
    return path[::-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=["fp32", "fp64"])
def test_logits_of_roots_and_tree_nodes_are_those_of_transformers(
    case: ModelCase, dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    hf_model = make_hf_model(case, dtype)
    policy = load_ours(hf_model, tmp_path, dtype)
    runner = ModelRunner(policy, num_pages=64, page_size=PAGE_SIZE, decode_dtype=None, deterministic=True)
    random = np.random.default_rng(0)
    pages = random.permutation(64).tolist()
    vocab_size = policy.config.vocab_size
    sequences = [
        sequence_of(token_ids.tolist(), pages[16 * i : 16 * i + 16])
        for i, token_ids in enumerate(random_sequences(vocab_size, (1, 5, 33)))
    ]
    for sequence in sequences:  # prompts in chunks of seven
        while sequence.num_missing:
            chunk = PrefillChunk(sequence, sequence.num_computed, min(7, sequence.num_missing))
            runner.execute(ScheduledStep(prefills=[chunk]), DraftTrees.empty(0))
            sequence.num_computed += chunk.count
    trees = [random_tree(random, num_nodes, vocab_size) for num_nodes in (6, 0, 9)]
    logits = runner.execute(ScheduledStep(decodes=sequences), DraftTrees.of(trees))
    expected = []
    with torch.no_grad():
        for sequence, tree in zip(sequences, trees, strict=True):
            for node in range(ROOT, tree.num_nodes):
                tokens = torch.tensor(sequence.token_ids + branch(tree, node))
                expected.append(hf_logits(hf_model, [tokens])[-1])
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=tolerance)


def random_rows(random: np.random.Generator, num_rows: int, longest: int, page_size: int) -> tuple[PagedRows, int]:
    """Rows of as many sequences, some of them draft nodes at scattered slots; and the number of pages."""
    pages_each = (longest + 12) // page_size + 1
    num_pages = num_rows * pages_each
    tables = random.permutation(num_pages).astype(np.int32).reshape(num_rows, pages_each)
    contexts = random.integers(1, longest + 1, num_rows).astype(np.int32)
    depths = random.integers(0, 6, num_rows).astype(np.int32)
    paths = np.zeros((num_rows, 5), np.int32)
    write_slots = np.zeros(num_rows, np.int32)
    for n in range(num_rows):
        positions = contexts[n] + 2 * np.arange(depths[n])
        paths[n, : depths[n]] = tables[n, positions // page_size] * page_size + positions % page_size
        own = positions[-1] if depths[n] else contexts[n] - 1
        write_slots[n] = tables[n, own // page_size] * page_size + own % page_size
    rows = PagedRows(
        positions=(contexts - 1 + depths).astype(np.int64),
        write_slots=write_slots,
        page_tables=tables,
        row_tables=np.arange(num_rows, dtype=np.int32),
        context_lengths=contexts,
        path_slots=paths,
        path_lengths=depths,
    )
    return rows, num_pages


@settings(deadline=None, max_examples=40)
@given(
    num_rows=st.integers(1, 20),
    longest=st.integers(1, 90),
    page_size=st.sampled_from([1, 5, 16]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 1), (7, 7)]),
    head_dim=st.sampled_from([2, 9, 16]),
    half=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_kernel_agrees_with_the_reference(
    num_rows: int, longest: int, page_size: int, heads: tuple[int, int], head_dim: int, half: bool, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, num_pages = random_rows(random, num_rows, longest, page_size)
    dtype = torch.bfloat16 if half else torch.float32
    cache = KVCache(
        num_layers=2,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        dtype=dtype,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(seed)
    cache.key_pages.normal_(generator=generator)
    cache.value_pages.normal_(generator=generator)
    q = (3 * torch.randn(num_rows + 3, heads[0], head_dim, generator=generator)).to(dtype)
    k, v = torch.randn(2, num_rows + 3, heads[1], head_dim, generator=generator).to(dtype)
    found = PagedPlan(cache, rows, num_padded_rows=num_rows + 3).attend(1, q, k, v)
    expected = ReferenceRows(cache, rows).attend(1, q[:num_rows], k[:num_rows], v[:num_rows])
    assert not found[num_rows:].any()
    tolerance = 0.02 if half else 1e-5
    torch.testing.assert_close(found[:num_rows], expected, rtol=tolerance, atol=tolerance)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    random = np.random.default_rng(1)
    rows, num_pages = random_rows(random, 12, 70, 16)
    cache = KVCache(
        num_layers=1, num_pages=num_pages, page_size=16, num_kv_heads=2, head_dim=24, dtype=torch.float32, device="cpu"
    )
    cache.key_pages.normal_()
    cache.value_pages.normal_()
    q, k, v = torch.randn(12, 6, 24), torch.randn(12, 2, 24), torch.randn(12, 2, 24)
    together = PagedPlan(cache, rows).attend(0, q, k, v)
    for n in range(12):
        one = slice(n, n + 1)
        alone = PagedRows(
            positions=rows.positions[one],
            write_slots=rows.write_slots[one],
            page_tables=rows.page_tables[one],
            row_tables=np.zeros(1, np.int32),
            context_lengths=rows.context_lengths[one],
            path_slots=rows.path_slots[one],
            path_lengths=rows.path_lengths[one],
        )
        assert torch.equal(PagedPlan(cache, alone).attend(0, q[one], k[one], v[one])[0], together[n])


def test_moving_slots_reads_all_sources_before_it_writes() -> None:
    cache = KVCache(
        num_layers=2, num_pages=3, page_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32, device="cpu"
    )
    cache.key_pages.normal_()
    cache.value_pages.normal_()
    keys, values = cache.key_pages.clone(), cache.value_pages.clone()
    cache.move_slots(np.array([5, 6, 9], np.int32), np.array([4, 5, 6], np.int32))
    for source, target in ((5, 4), (6, 5), (9, 6)):
        moved_key = cache.key_pages[:, target // 4, :, :, target % 4]
        assert torch.equal(moved_key, keys[:, source // 4, :, :, source % 4])
        moved_value = cache.value_pages[:, target // 4, :, target % 4]
        assert torch.equal(moved_value, values[:, source // 4, :, source % 4])
    assert torch.equal(cache.key_pages[:, 0], keys[:, 0])
    assert torch.equal(cache.value_pages[:, 2], values[:, 2])
