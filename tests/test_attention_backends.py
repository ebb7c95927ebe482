"""Attention of other libraries in plain decode steps: how they are called, when they are found, what they get to do.

Stand-ins with their signatures run on the CPU; `test_gpu_attention.py` runs the libraries themselves.
"""

import importlib
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from attention_cases import make_cache, make_step
from backend_cases import CPU, FakeBackend, attend_pages, small_planner
from device_cases import device_engine, device_policy, device_requests, runner_of, shapes_of
from engine_cases import KnowingDrafter, decode, options, tiny_policy
from torch import Tensor

from srtrl.engine.buckets import MAX_GRAPH_ROWS
from srtrl.engine.engine import Engine
from srtrl.model import attention_backends
from srtrl.model.attention_backends import (
    BackendChoice,
    FlashAttention,
    PlainAttention,
    VarlenAttention,
    find_backends,
    find_flash,
    find_varlen,
)
from srtrl.model.device_plan import AttentionLaunch, AttentionScratch, DevicePlan
from srtrl.model.device_rows import RowSizes, fill_rows, view_rows
from srtrl.model.paged_attention import KVCache, PagedRows
from srtrl.types import Completion

CUDA = torch.device("cuda")
Completions = dict[tuple[int, int], Completion]
Truth = list[tuple[tuple[int, ...], list[int]]]
PAGE_SIZE = 4


def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """`varlen_attn` of torch 2.13 with FlashAttention 2 behind it, and what that refuses with pages."""
    assert cu_seq_k is not None, "FlashAttention 2 wants starts of keys"
    assert num_splits == 1, "its own choice gives wrong rows"
    assert cu_seq_k.tolist() == [max_k * index for index in range(len(query) + 1)]
    return paged_varlen(query, key, value, cu_seq_q, max_q, max_k, window_size, enable_gqa, seqused_k, block_table)


def varlen_attn_version_3(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """The same with FlashAttention 3."""
    assert cu_seq_k is None, "If cu_seqlens_k is passed in, then page table is not supported"
    assert num_splits is None, "its own choice is right, and fills the chip"
    return paged_varlen(query, key, value, cu_seq_q, max_q, max_k, window_size, enable_gqa, seqused_k, block_table)


def paged_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    max_q: int,
    max_k: int,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor | None,
    block_table: Tensor | None,
) -> Tensor:
    assert seqused_k is not None
    assert block_table is not None
    assert window_size in ((-1, -1), (-1, 0))  # the same for one row
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert max_q == 1
    assert cu_seq_q.tolist() == list(range(len(query) + 1))
    assert cu_seq_q.dtype == torch.int32
    assert max_k == block_table.shape[1] * key.shape[1] >= int(seqused_k.max())
    assert all(tensor.is_contiguous() for tensor in (key, value, block_table, seqused_k))
    return attend_pages(query, key, value, block_table, seqused_k)


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    seqused_k: Tensor | None = None,
) -> Tensor:
    raise AssertionError("it knows no pages, so it must not be called")


def version_2_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    cache_seqlens: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    num_splits: int = 0,
) -> Tensor:
    """`flash_attn.flash_attn_with_kvcache`."""
    assert cache_seqlens is not None
    assert block_table is not None
    assert q.shape[1] == 1
    return attend_pages(q[:, 0], k_cache, v_cache, block_table, cache_seqlens)[:, None]


def version_3_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 0,
) -> Tensor:
    """`flash_attn_interface.flash_attn_with_kvcache`."""
    return version_2_kvcache(q, k_cache, v_cache, cache_seqlens=cache_seqlens, block_table=page_table)


def make_varlen(function: Callable[..., Any] = varlen_attn, *, most_rows: int = 64) -> VarlenAttention:
    is_version_2 = function is not varlen_attn_version_3
    return VarlenAttention(function, takes_starts_of_keys=is_version_2, most_rows=most_rows, device=CPU)


BACKENDS: Mapping[str, Callable[[], PlainAttention]] = {
    "varlen, version 2": make_varlen,
    "varlen, version 3": lambda: make_varlen(varlen_attn_version_3),
    "flash, version 2": lambda: FlashAttention(version_2_kvcache, table_name="block_table"),
    "flash, version 3": lambda: FlashAttention(version_3_kvcache, table_name="page_table"),
}


def plain_plan(
    cache: KVCache, rows: PagedRows, padding: int, num_heads: int, backend: PlainAttention | None
) -> DevicePlan:
    """The plan of a bucket of one row a sequence, `padding` of the rows being padding."""
    num_rows = len(rows.positions) + padding
    sizes = RowSizes(
        num_rows=num_rows,
        num_tables=num_rows,
        table_width=rows.page_tables.shape[1] + 2,
        depth=0,
        num_words=1,
        num_tiles=num_rows,
    )
    host = torch.full((sizes.num_elements,), 123456789, dtype=torch.int32)
    launch = AttentionLaunch(block_m=16, num_splits=1, deterministic=False, backend=backend)
    per_tile = launch.rows_per_tile(num_heads // cache.key_pages.shape[2])
    fill_rows(view_rows(host, sizes), rows, rows_per_tile=per_tile, split_keys=512)
    scratch = AttentionScratch(
        num_rows=num_rows,
        num_heads=num_heads,
        head_dim=cache.key_pages.shape[3],
        num_lanes=0,
        dtype=cache.key_pages.dtype,
        device=CPU,
    )
    return DevicePlan(
        cache, view_rows(host, sizes), num_positions=64, launch=launch, scratch=scratch, use_kernels=False
    )


# --- How they are called ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [(4, 2, 16), (3, 3, 8)])
@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_gives_what_the_reference_gives(name: str, heads: tuple[int, int, int]) -> None:
    """Rows at and around the ends of pages, one with a prompt chunk of a single token, padding behind them."""
    num_heads, num_kv_heads, head_dim = heads
    step = make_step(np.random.default_rng(0), PAGE_SIZE, [1, 3, 4, 5, 30], [[]] * 5, [(8, 1)])
    assert len(step.rows.positions) == len(step.rows.page_tables) == 6
    cache = make_cache(step.num_pages, PAGE_SIZE, num_kv_heads, head_dim, torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(8, num_heads + 5, head_dim, generator=generator)[:, :num_heads]
    expected = plain_plan(cache, step.rows, 2, num_heads, None).attend_stored(1, q)[:6]
    plan = plain_plan(cache, step.rows, 2, num_heads, BACKENDS[name]())
    for _ in range(2):
        found = plan.attend_stored(1, q)
        torch.testing.assert_close(found[:6], expected, rtol=1e-5, atol=1e-5)
        assert found.isfinite().all()


def test_the_numbers_that_a_graph_reads_stay_where_they_are() -> None:
    backend = make_varlen(most_rows=8)
    places: set[tuple[int, int]] = set()

    def record(query: Tensor, key: Tensor, value: Tensor, *arguments: Any, **named: Any) -> Tensor:
        places.add((arguments[0].data_ptr(), arguments[1].data_ptr()))
        return query

    backend._varlen_attn = record
    step = make_step(np.random.default_rng(0), PAGE_SIZE, [1, 30], [[]] * 2)
    cache = make_cache(step.num_pages, PAGE_SIZE, 2, 16, torch.float32, device=CPU)
    for padding in (0, 6, 1):
        plain_plan(cache, step.rows, padding, 4, backend).attend_stored(0, torch.zeros(2 + padding, 4, 16))
    assert len(places) == 1


# --- When they are found ----------------------------------------------------------------------------------------------


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    for package in ("flash_attn", "flash_attn_interface"):
        monkeypatch.setitem(sys.modules, package, None)  # importing it fails


def install(monkeypatch: pytest.MonkeyPatch, package: str, **functions: object) -> None:
    module = types.ModuleType(package)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, package, module)


def use_varlen(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> None:
    monkeypatch.setattr(importlib.import_module("torch.nn.attention.varlen"), "varlen_attn", function)


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (CPU, torch.bfloat16, 128, "the device is cpu"),
        (CUDA, torch.float32, 128, "float32"),
        (CUDA, torch.bfloat16, 264, "264 wide"),
        (CUDA, torch.bfloat16, 12, "12 wide"),
    ],
)
def test_values_that_no_library_takes(device: torch.device, dtype: torch.dtype, head_dim: int, reason: str) -> None:
    found = find_backends(("varlen", "flash"), device=device, dtype=dtype, head_dim=head_dim, most_rows=8)
    assert list(found) == ["varlen", "flash"]
    for one in found.values():
        assert isinstance(one, str)
        assert reason in one


def test_an_old_device_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "T4")
    found = find_backends(("flash",), device=CUDA, dtype=torch.bfloat16, head_dim=64, most_rows=8)
    assert found == {"flash": "T4 has compute capability 7.5, and the kernel needs 8.0"}


@pytest.mark.usefixtures("hopper")
def test_both_are_found_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=version_2_kvcache)
    monkeypatch.setattr(attention_backends, "find_varlen", lambda *_: make_varlen())
    found = find_backends(("varlen", "flash"), device=CUDA, dtype=torch.bfloat16, head_dim=64, most_rows=8)
    assert isinstance(found["varlen"], VarlenAttention)
    assert isinstance(found["flash"], FlashAttention)
    assert [one.name for one in found.values() if not isinstance(one, str)] == ["varlen", "flash"]


def test_varlen_is_known_by_its_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    use_varlen(monkeypatch, varlen_attn_2_11)
    reason = find_varlen(CPU, 8)
    assert isinstance(reason, str)
    assert "does not know block_table" in reason
    use_varlen(monkeypatch, varlen_attn)
    assert isinstance(find_varlen(CPU, 8), VarlenAttention)
    monkeypatch.delattr("torch.nn.attention.varlen.varlen_attn")
    assert "has no varlen_attn" in str(find_varlen(CPU, 8))


@pytest.mark.parametrize(("version", "function"), [("FA2", varlen_attn), ("FA3", varlen_attn_version_3)])
def test_varlen_is_called_as_the_activated_version_wants(
    version: str, function: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    use_varlen(monkeypatch, function)
    monkeypatch.setattr(torch.nn.attention, "current_flash_attention_impl", lambda: version, raising=False)
    backend = find_varlen(CPU, 8)
    assert isinstance(backend, VarlenAttention)
    step = make_step(np.random.default_rng(0), PAGE_SIZE, [1, 30], [[]] * 2)
    cache = make_cache(step.num_pages, PAGE_SIZE, 2, 16, torch.float32, device=CPU)
    plain_plan(cache, step.rows, 1, 4, backend).attend_stored(0, torch.zeros(3, 4, 16))


@pytest.mark.usefixtures("hopper")
def test_the_newer_package_is_taken_on_hopper_and_the_older_one_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = find_flash(CUDA)
    assert isinstance(reason, str)
    assert "flash_attn_interface: " in reason
    assert "; flash_attn: " in reason
    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=version_2_kvcache)
    found = find_flash(CUDA)
    assert isinstance(found, FlashAttention)
    assert found._function is version_2_kvcache
    install(monkeypatch, "flash_attn_interface", flash_attn_with_kvcache=version_3_kvcache)
    found = find_flash(CUDA)
    assert isinstance(found, FlashAttention)
    assert found._function is version_3_kvcache
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    found = find_flash(CUDA)
    assert isinstance(found, FlashAttention)
    assert found._function is version_2_kvcache


@pytest.mark.usefixtures("hopper")
def test_a_package_without_pages_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "flash_attn", flash_attn_with_kvcache=lambda q, k_cache, v_cache: q)
    assert "knows no page tables" in str(find_flash(CUDA))
    install(monkeypatch, "flash_attn")
    assert "has no attribute 'flash_attn_with_kvcache'" in str(find_flash(CUDA))


# --- Which steps they get ---------------------------------------------------------------------------------------------


def test_only_steps_of_one_row_a_sequence_go_to_a_backend() -> None:
    few, many = FakeBackend("varlen"), FakeBackend("flash")
    choice = BackendChoice(classes=((4, few), (32, None), (64, many)))
    planner = replace(small_planner(), backends=choice)

    def backend_of(counts: list[int], depth: int = 0) -> PlainAttention | None:
        shape = planner.shape(np.array(counts), num_logits=1, table_width=3, depth=depth)
        tables = shape.num_tables(len(counts))
        assert tables == (len(counts) if shape.launch.backend is None else shape.num_rows)
        return shape.launch.backend

    assert backend_of([1]) is few
    assert backend_of([1] * 3) is few, "padded to four"
    assert backend_of([1] * 5) is None
    assert backend_of([1] * 33) is many, "padded to 40"
    assert backend_of([1] * 65) is None, "more than any class"
    assert backend_of([1, 2, 1]) is None, "a draft"
    assert backend_of([1, 1, 7]) is None, "a chunk of a prompt"
    fixed = replace(small_planner(deterministic=True), backends=choice)
    assert fixed.shape(np.ones(3, np.int64), num_logits=1, table_width=3, depth=0).launch.backend is None


def test_a_bucket_with_a_backend_is_another_bucket() -> None:
    with_backend = replace(small_planner(), backends=BackendChoice(classes=((8, FakeBackend()),)))
    shapes = [
        planner.shape(np.ones(3, np.int64), num_logits=3, table_width=3, depth=0)
        for planner in (small_planner(), with_backend)
    ]
    assert shapes[0] != shapes[1]
    assert len(set(shapes)) == 2
    assert replace(shapes[1], launch=replace(shapes[1].launch, backend=None)) == shapes[0]


@pytest.mark.parametrize("with_drafts", [False, True])
def test_an_engine_gives_the_same_tokens_with_a_backend(with_drafts: bool) -> None:
    """Sequences come and go, so buckets have padding; prompts and drafts stay with our kernel."""
    policy = device_policy()
    requests = device_requests(num_samples=3, temperature=0.8)

    def run(backend: FakeBackend | None, truth: Truth | None = None) -> tuple[Completions, set[PlainAttention | None]]:
        drafter = KnowingDrafter(truth, accuracy=0.7, vocab_size=policy.config.vocab_size) if truth else None
        engine = device_engine(policy, deterministic=False, slots=7, prefill_chunk_tokens=5, drafter=drafter)
        if backend is not None:
            runner = runner_of(engine)
            runner.planner = replace(runner.planner, backends=BackendChoice(classes=((MAX_GRAPH_ROWS, backend),)))
        completions = decode(engine, requests)
        return completions, {shape.launch.backend for shape in shapes_of(engine)}

    expected, served = run(None)
    assert served == {None}
    backend = FakeBackend()
    truth = [(r.prompt_token_ids, expected[r.draw_index, r.sample_index].token_ids) for r in requests]
    found, served = run(backend, truth if with_drafts else None)
    assert served == {None, backend}, "prompts and drafts are not for it"
    assert backend.num_calls > (0 if with_drafts else 5)
    assert {key: c.token_ids for key, c in found.items()} == {key: c.token_ids for key, c in expected.items()}
    for key, completion in found.items():
        assert np.allclose(completion.rollout_logprobs, expected[key].rollout_logprobs, atol=1e-5, rtol=0)


# --- The option -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["varlen", "flash"])
def test_on_a_cpu_the_option_has_no_meaning(option: str) -> None:
    with pytest.raises(
        ValueError, match=f"rollout.attention: {option} is for decoding on a CUDA device.*leave the option out"
    ):
        Engine(tiny_policy(), options(attention=option))


def test_the_runner_says_who_attends() -> None:
    engine = device_engine(device_policy("cpu"), deterministic=False, attention="auto")
    note = runner_of(engine).attention_note
    assert note is not None
    assert note.startswith("decode steps without drafts attend by triton; varlen cannot: the device is cpu")
    assert runner_of(device_engine(device_policy("cpu"), deterministic=True, attention="auto")).attention_note is None
    assert runner_of(device_engine(device_policy("cpu"), attention="triton")).attention_note is None


def test_an_engine_refuses_what_cannot_attend() -> None:
    with pytest.raises(ValueError, match=r"rollout\.attention: flash cannot attend here: the device is cpu"):
        device_engine(device_policy("cpu"), deterministic=False, attention="flash")
    with pytest.raises(ValueError, match=r"rollout\.attention: varlen has other bits.*rollout\.deterministic"):
        device_engine(device_policy("cpu"), deterministic=True, attention="varlen")
