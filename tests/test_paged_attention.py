"""The paged decode path: against `transformers` for every family, and the kernel against its plain PyTorch twin."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CASES, ModelCase, hf_logits, load_ours, make_hf_model, random_sequences
from step_cases import branch, launch, make_batch, prefill, random_tree, record_logits

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.options import EngineOptions
from srtrl.model.paged_attention import KVCache, PagedPlan, PagedRows, ReferenceRows

PAGE_SIZE = 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-9)], ids=["fp32", "fp64"])
def test_logits_of_roots_and_tree_nodes_are_those_of_transformers(
    case: ModelCase, dtype: torch.dtype, tolerance: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model = make_hf_model(case, dtype)
    policy = load_ours(hf_model, tmp_path, dtype)
    runner = CpuRunner(policy, EngineOptions(page_size=PAGE_SIZE, max_draft_nodes=40))
    runner.allocate_pages(70)
    random = np.random.default_rng(0)
    vocab_size = policy.config.vocab_size
    texts = [token_ids.tolist() for token_ids in random_sequences(vocab_size, (1, 5, 33))]
    batch, slots = make_batch(random, texts, page_size=PAGE_SIZE, num_pages=70, most_nodes=40)
    prefill(runner, batch, slots, chunk_tokens=7)
    # The last one's ancestors take two words.
    trees = DraftTrees.of(random_tree(random, num_nodes, vocab_size) for num_nodes in (6, 0, 37))
    computed = record_logits(policy, monkeypatch)
    launch(runner, batch, slots, trees)
    expected = []
    with torch.no_grad():
        for slot, tree in zip(slots.tolist(), trees, strict=True):
            for node in range(ROOT, tree.num_nodes):
                drafted = tree.token_ids[branch(tree, node)]
                tokens = np.concatenate([batch.token_ids[slot, : batch.num_tokens[slot]], drafted])
                expected.append(hf_logits(hf_model, [torch.from_numpy(tokens).long()])[-1])
    logits = computed[0][: len(expected)]
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=tolerance)


def random_rows(random: np.random.Generator, num_rows: int, longest: int, page_size: int) -> tuple[PagedRows, int]:
    """Rows of as many sequences, some of them draft nodes with ancestors anywhere in two words; and their pages."""
    pages_each = (longest + 64) // page_size + 1
    num_pages = num_rows * pages_each
    tables = random.permutation(num_pages).astype(np.int32).reshape(num_rows, pages_each)
    contexts = random.integers(1, longest + 1, num_rows).astype(np.int32)
    depths = random.integers(0, 6, num_rows)
    seen = np.zeros((num_rows, 64), np.uint8)
    for n in range(num_rows):
        seen[n, random.permutation(64)[: depths[n]]] = 1
    last = np.where(depths > 0, 63 - seen[:, ::-1].argmax(axis=1), -1)  # the row's own node
    own = contexts + last
    rows = PagedRows(
        positions=(contexts - 1 + depths).astype(np.int32),
        kv_indices=tables[np.arange(num_rows), own // page_size] * np.int32(page_size) + (own % page_size).astype("i4"),
        context_lengths=contexts,
        ancestors=np.packbits(seen, axis=1, bitorder="little").view(np.int32),
        row_tables=np.arange(num_rows, dtype=np.int32),
        page_tables=tables,
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
    padded = PagedRows(
        **{
            name: np.concatenate([getattr(rows, name), np.zeros((3, *getattr(rows, name).shape[1:]), np.int32)])
            for name in ("positions", "kv_indices", "context_lengths", "ancestors", "row_tables")
        },
        page_tables=rows.page_tables,
    )
    found = PagedPlan(cache, padded, num_rows).attend(1, q, k, v)
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
            kv_indices=rows.kv_indices[one],
            context_lengths=rows.context_lengths[one],
            ancestors=rows.ancestors[one],
            row_tables=np.zeros(1, np.int32),
            page_tables=rows.page_tables[one],
        )
        assert torch.equal(PagedPlan(cache, alone).attend(0, q[one], k[one], v[one])[0], together[n])


def test_moving_indices_reads_all_sources_before_it_writes() -> None:
    cache = KVCache(
        num_layers=2, num_pages=3, page_size=4, num_kv_heads=1, head_dim=2, dtype=torch.float32, device="cpu"
    )
    cache.key_pages.normal_()
    cache.value_pages.normal_()
    keys, values = cache.key_pages.clone(), cache.value_pages.clone()
    cache.move_indices(np.array([5, 6, 9], np.int32), np.array([4, 5, 6], np.int32))
    for source, target in ((5, 4), (6, 5), (9, 6)):
        moved_key = cache.key_pages[:, target // 4, :, :, target % 4]
        assert torch.equal(moved_key, keys[:, source // 4, :, :, source % 4])
        moved_value = cache.value_pages[:, target // 4, :, target % 4]
        assert torch.equal(moved_value, values[:, source // 4, :, source % 4])
    assert torch.equal(cache.key_pages[:, 0], keys[:, 0])
    assert torch.equal(cache.value_pages[:, 2], values[:, 2])
