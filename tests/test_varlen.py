"""Packed attention by FlashAttention: what the kernel is given, and what is refused.

A stand-in with the kernel's signature runs on the CPU; `test_gpu_update.py` runs the kernel itself.
"""

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plain_kernels import packed_attention_reference
from torch import Tensor
from update_cases import random_shares

from srtrl.model.attention import PackedPlan, check_packed_attention, varlen_attention

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def varlen_attn(*inputs: Any, window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False) -> Tensor:
    """What `torch.nn.attention.varlen.varlen_attn` of torch 2.13 computes, and what it refuses.

    Its causal mask is aligned at the end: a GPU test says so.
    """
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k = inputs
    assert window_size == (-1, 0), "not causal"
    assert query.dtype == key.dtype == value.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    num_queries, lengths = cu_seq_q.diff().tolist(), cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(num_queries), max(lengths))
    assert query.shape[1] == key.shape[1] == value.shape[1] or enable_gqa
    assert all(heads.stride(-1) == 1 for heads in (query, key, value))
    return packed_attention_reference(lengths, query, key, value, num_queries)


def varlen_attn_2_11(*args: Any, window_size: tuple[int, int] = (-1, -1)) -> Tensor:
    """The same in torch 2.11, which had no `enable_gqa`."""
    return varlen_attn(*args, window_size=window_size)


@pytest.fixture(params=[varlen_attn, varlen_attn_2_11])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", request.param)


def random_heads(lengths: list[int], counts: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of 8 elements a head; q and k are views, as those of a model are."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_heads, num_kv_heads = counts
    qk = torch.randn(sum(lengths), num_heads + num_kv_heads, 8, generator=generator)
    v = torch.randn(sum(lengths), num_kv_heads, 8, generator=generator)
    q, k = (part.detach() for part in qk.to(dtype).split_with_sizes(counts, dim=1))
    return [heads.requires_grad_() for heads in (q, k, v.to(dtype))]


@pytest.mark.usefixtures("_kernel")
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([(4, 2), (2, 2), (3, 1)]))
def test_the_kernel_is_given_what_it_needs(lengths: list[int], counts: tuple[int, int]) -> None:
    plan = PackedPlan(lengths, CPU, random_shares(lengths, seed=sum(lengths)))
    q, k, v = random_heads(plan.num_added, counts, torch.float64)
    starts, longest = (plan.query_starts, plan.key_starts), (max(plan.num_added), plan.num_positions)
    found = varlen_attention(q, plan._keys(k), plan._keys(v), starts, longest)
    path = torch.cat(plan.paths)
    expected = packed_attention_reference(lengths, q, k[path], v[path], plan.num_added)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    gradients = torch.autograd.grad(found, (q, k, v), slope)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), slope), rtol=1e-11, atol=1e-11)


def test_what_the_kernel_cannot_compute_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old One")
    capability = (9, 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    check_packed_attention(CPU, torch.bfloat16, 20)
    check_packed_attention(CUDA, torch.float32, 20)
    check_packed_attention(CUDA, torch.bfloat16, 128)
    with pytest.raises(ValueError, match=r"attention in bfloat16 takes heads.*20 wide: train in float32"):
        check_packed_attention(CUDA, torch.bfloat16, 20)
    with pytest.raises(ValueError, match=r"320 wide.*model.dtype: float32"):
        check_packed_attention(CUDA, torch.bfloat16, 320)
    capability = (7, 5)
    with pytest.raises(ValueError, match=r"compute capability 8.0, and Old One has less"):
        check_packed_attention(CUDA, torch.float16, 64)
