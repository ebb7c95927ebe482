"""The paged decode path: against `transformers` for every family, and the kernel against its plain PyTorch twin."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from attention_cases import make_cache, make_step, random_queries
from hypothesis import given, settings
from hypothesis import strategies as st
from model_cases import CASES, ModelCase, hf_logits, load_ours, make_hf_model, random_sequences
from step_cases import branch, launch, make_batch, prefill, random_tree, record_logits

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.engine.cpu_runner import CpuRunner
from srtrl.engine.options import EngineOptions
from srtrl.model.paged_attention import PagedPlan, ReferencePlan

PAGE_SIZE = 4


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_logits_of_roots_and_tree_nodes_are_those_of_transformers(
    case: ModelCase, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_model = make_hf_model(case, torch.float64)
    policy = load_ours(hf_model, tmp_path, torch.float64)
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
    torch.testing.assert_close(logits, torch.stack(expected), rtol=0, atol=1e-9)


@settings(deadline=None, max_examples=40)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 40)), min_size=1, max_size=4),
    chunk=st.tuples(st.integers(0, 30), st.integers(1, 5)),
    shape=st.tuples(st.sampled_from([1, 5, 16]), st.sampled_from([(1, 1, 2), (4, 2, 16), (6, 1, 9), (7, 7, 24)])),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_kernel_agrees_with_the_reference_and_a_rows_bits_do_not_depend_on_the_batch(
    sequences: list[tuple[int, int]],
    chunk: tuple[int, int],
    shape: tuple[int, tuple[int, int, int]],
    dtype: torch.dtype,
    seed: int,
) -> None:
    page_size, (num_heads, num_kv_heads, head_dim) = shape
    contexts, sizes = zip(*sequences, strict=True)
    step = make_step(seed, contexts=contexts, sizes=sizes, chunks=[chunk], page_size=page_size, padding=3, device="cpu")
    cache = make_cache(
        step.num_pages, page_size, num_kv_heads, head_dim, dtype, num_layers=2, token_major=False, device="cpu"
    )
    heads_of_rows = random_queries(len(step.rows.positions), num_heads + 2 * num_kv_heads, head_dim, dtype, "cpu")
    q, k, v = heads_of_rows.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
    found = PagedPlan(cache, step.rows).attend(1, q, k, v)
    assert found.dtype == dtype
    assert not found[step.num_real :].any()
    expected = ReferencePlan(cache, step.rows).attend(1, q, k, v)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    by_row = ("positions", "kv_indices", "context_lengths", "row_tables", "ancestors")
    for row in range(0, step.num_real, 7):
        one = slice(row, row + 1)
        alone = replace(step.rows, **{name: getattr(step.rows, name)[one] for name in by_row})
        assert torch.equal(PagedPlan(cache, alone).attend(1, q[one], k[one], v[one])[0], found[row])


@pytest.mark.parametrize("token_major", [False, True])
def test_moving_indices_reads_all_sources_before_it_writes(token_major: bool) -> None:
    cache = make_cache(3, 4, 1, 2, torch.float32, num_layers=2, token_major=token_major)
    keys, values = cache.key_pages.clone(), cache.value_pages.clone()
    cache.move_indices(np.array([5, 6, 9], np.int32), np.array([4, 5, 6], np.int32))
    for source, target in ((5, 4), (6, 5), (9, 6)):
        moved_key = cache.key_pages[:, target // 4, :, :, target % 4]
        assert torch.equal(moved_key, keys[:, source // 4, :, :, source % 4])
        moved_value = cache.value_pages[:, target // 4, :, target % 4]
        assert torch.equal(moved_value, values[:, source // 4, :, source % 4])
    assert torch.equal(cache.key_pages[:, 0], keys[:, 0])
    assert torch.equal(cache.value_pages[:, 2], values[:, 2])
