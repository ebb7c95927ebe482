"""The paged attention of the CPU against its plain PyTorch twin, and the bits of a row in any batch."""

from dataclasses import replace

import torch
from attention_cases import make_cache, make_step, random_queries
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_kernels import ReferencePlan

from srtrl.model.paged_attention import PagedPlan


@settings(deadline=None)
@given(
    sequences=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 40)), min_size=1, max_size=4),
    chunk=st.tuples(st.integers(0, 30), st.integers(1, 5)),
    shape=st.tuples(st.sampled_from([1, 5, 16]), st.sampled_from([(1, 1, 2), (4, 2, 16), (6, 1, 9), (7, 7, 24)])),
    window=st.none() | st.integers(1, 100),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 1000),
)
def test_kernel_agrees_with_the_reference_and_a_rows_bits_do_not_depend_on_the_batch(
    sequences: list[tuple[int, int]],
    chunk: tuple[int, int],
    shape: tuple[int, tuple[int, int, int]],
    window: int | None,
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
    found = PagedPlan(cache, step.rows).attend(1, q, k, v, window)
    assert found.dtype == dtype
    assert not found[step.num_real :].any()
    expected = ReferencePlan(cache, step.rows).attend(1, q, k, v, window)
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    by_row = ("positions", "kv_indices", "context_lengths", "row_tables", "ancestors")
    for row in range(0, step.num_real, 7):
        one = slice(row, row + 1)
        alone = replace(step.rows, **{name: getattr(step.rows, name)[one] for name in by_row})
        assert torch.equal(PagedPlan(cache, alone).attend(1, q[one], k[one], v[one], window)[0], found[row])
