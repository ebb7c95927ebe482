"""The kernel for packed sequences: when it is chosen, what it is given, and that a broken one is found out.

A stand-in with the kernel's signature runs on the CPU; `test_gpu_update.py` runs the kernel itself.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from update_cases import make_policy

from srtrl.model import attention, varlen_attention
from srtrl.model.attention import PackedPlan, packed_attention_reference
from srtrl.model.transformer import Transformer
from srtrl.model.varlen_attention import VarlenKernel, choose_kernel, find_fault, probe_kernel
from srtrl.trainer.build import attention_note

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


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
    """What `torch.nn.attention.varlen.varlen_attn` of torch 2.13 computes, and what it refuses."""
    assert cu_seq_k is not None
    assert window_size == (-1, 0), "not causal"
    assert query.dtype == key.dtype == value.dtype
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    lengths = cu_seq_q.diff().tolist()
    assert lengths == cu_seq_k.diff().tolist()
    assert (max_q, max_k) == (max(lengths), max(lengths))
    assert query.shape[1] == key.shape[1] == value.shape[1] or enable_gqa
    assert all(heads.stride(-1) == 1 for heads in (query, key, value))
    return packed_attention_reference(lengths, query, key, value)


def varlen_attn_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    """The same in torch 2.11, which had no `enable_gqa`."""
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size=window_size)


KERNELS = [varlen_attn, varlen_attn_2_11]


def use(kernel: VarlenKernel | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "choose_kernel", lambda *_, **__: kernel)


def random_heads(lengths: list[int], counts: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    """q, k, v of 8 elements a head; q and k are views, as those of a model are."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_heads, num_kv_heads = counts
    qk = torch.randn(sum(lengths), num_heads + num_kv_heads, 8, generator=generator)
    v = torch.randn(sum(lengths), num_kv_heads, 8, generator=generator)
    q, k = (part.detach() for part in qk.to(dtype).split_with_sizes(counts, dim=1))
    return [heads.requires_grad_() for heads in (q, k, v.to(dtype))]


@settings(deadline=None, max_examples=30)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.sampled_from([(4, 2), (2, 2), (3, 1)]))
@pytest.mark.parametrize("kernel", KERNELS)
def test_plan_gives_the_kernel_what_it_needs(
    kernel: Callable[..., Tensor], lengths: list[int], counts: tuple[int, int]
) -> None:
    q, k, v = random_heads(lengths, counts, torch.float64)
    plan = PackedPlan.from_lengths(lengths, CPU)
    with pytest.MonkeyPatch.context() as monkeypatch:
        use(VarlenKernel.of(kernel), monkeypatch)
        found = plan.attend(0, q, k, v)
    expected = packed_attention_reference(lengths, q, k, v)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn(found.shape, generator=torch.Generator().manual_seed(0), dtype=found.dtype)
    gradients = torch.autograd.grad(found, (q, k, v), slope)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, (q, k, v), slope), rtol=1e-11, atol=1e-11)


def test_starts_are_those_of_the_sequences() -> None:
    plan = PackedPlan.from_lengths([3, 1, 5], CPU)
    assert plan.starts.tolist() == [0, 3, 4, 9]
    assert plan.starts.dtype == torch.int32
    assert plan.starts is plan.starts, "made once for all layers"


@pytest.mark.parametrize("kernel", KERNELS)
def test_float32_queries_of_autocast_are_cast_to_the_values_type(kernel: Callable[..., Tensor]) -> None:
    """The rotary table is float32 where the weights are, so queries and keys are; values come out of a product."""
    q, k, v = random_heads([4, 2], (4, 2), torch.float32)
    starts = torch.tensor([0, 4, 6], dtype=torch.int32)
    found = VarlenKernel.of(kernel).attend(q, k, v.bfloat16(), starts, 4)
    assert found.dtype == torch.bfloat16
    expected = packed_attention_reference([4, 2], q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(found, expected)
    found.float().sum().backward()  # type: ignore[no-untyped-call]
    assert q.grad is not None
    assert q.grad.dtype == torch.float32


@pytest.mark.parametrize("mixed", [False, True])
def test_a_model_has_the_same_outputs_and_gradients_either_way(mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [7, 3, 12]
    token_ids = torch.randint(19, (sum(lengths),), generator=torch.Generator().manual_seed(3))

    def run(kernel: VarlenKernel | str) -> list[Tensor]:
        use(kernel, monkeypatch)
        model: Transformer = make_policy(dtype=torch.float32 if mixed else torch.bfloat16, scale=4)
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            hidden = model(token_ids, PackedPlan.from_lengths(lengths, CPU))
        slope = torch.randn(hidden.shape, generator=torch.Generator().manual_seed(4))
        (hidden.float() * slope).sum().backward()
        return [hidden.detach().float(), *(p.grad.float() for p in model.parameters() if p.grad is not None)]

    for ours, padded in zip(run(VarlenKernel.of(varlen_attn)), run("no kernel"), strict=True):
        assert (ours - padded).norm() <= 0.05 * padded.norm()


# --- The choice -------------------------------------------------------------------------------------------------------


@pytest.fixture
def _probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device on which the kernel runs."""
    monkeypatch.setattr(varlen_attention, "probe_kernel", lambda *_: VarlenKernel.of(varlen_attn))


@pytest.mark.usefixtures("_probed")
@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "reason"),
    [
        (CPU, torch.bfloat16, 64, "the device is cpu"),
        (CUDA, torch.float32, 64, "keys and values are torch.float32"),
        (CUDA, torch.bfloat16, 20, "heads are 20 wide"),
        (CUDA, torch.bfloat16, 320, "heads are 320 wide"),
        (CUDA, torch.bfloat16, 128, None),
        (CUDA, torch.float16, 64, None),
    ],
)
def test_the_kernel_is_chosen_where_it_runs_and_a_reason_is_given_elsewhere(
    device: torch.device, dtype: torch.dtype, head_dim: int, reason: str | None
) -> None:
    found = choose_kernel(device, dtype, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    if reason is None:
        assert isinstance(found, VarlenKernel)
    else:
        assert isinstance(found, str)
        assert found.startswith(reason)


@pytest.mark.usefixtures("_probed")
def test_a_run_says_why_its_attention_is_slow() -> None:
    config = replace(make_policy().config, head_dim=64)
    assert attention_note(config, CPU, torch.float32) is None, "there is no other on a CPU"
    assert attention_note(config, CUDA, torch.bfloat16) is None
    note = attention_note(config, CUDA, torch.float32)
    assert note == (
        "the update's attention pads its sequences: keys and values are torch.float32, and the kernel takes bfloat16 "
        "and float16"
    )


def test_the_installed_torch_has_the_function_with_a_known_signature() -> None:
    from torch.nn.attention.varlen import varlen_attn as installed

    kernel = VarlenKernel.of(installed)
    assert kernel.has_gqa or torch.__version__.startswith("2.11")


SHAPE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64}


def fault_of(kernel: VarlenKernel) -> str | None:
    return find_fault(kernel, CPU, torch.bfloat16, **SHAPE)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_that_works_has_no_fault(kernel: Callable[..., Tensor]) -> None:
    assert fault_of(VarlenKernel.of(kernel)) is None


@pytest.mark.parametrize(
    "around", [torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.float16)], ids=["no", "inf", "cast"]
)
def test_the_first_pass_may_be_one_of_any_mode(around: AbstractContextManager[Any]) -> None:
    def checked(q: Tensor, k: Tensor, v: Tensor, *args: Any, **options: Any) -> Tensor:
        assert (q @ q.mT).dtype == torch.bfloat16, "autocast reaches the kernel"
        return varlen_attn(q, k, v, *args, **options)

    with around:
        assert fault_of(VarlenKernel(varlen_attn=checked, has_gqa=True)) is None


def test_the_first_pass_may_be_one_of_layers_that_are_computed_again() -> None:
    hiddens, faults = [], []

    def layer(hidden: Tensor) -> Tensor:
        hiddens.append(hidden)
        faults.append(fault_of(VarlenKernel.of(varlen_attn)))
        return (hidden * hidden).sin()

    out = checkpoint(layer, torch.ones(3, requires_grad=True), use_reentrant=False)
    assert len(hiddens) == 1, "the probe's backward pass computed the layer again"
    out.sum().backward()
    assert len(hiddens) == 2
    assert faults == [None, None]


@pytest.mark.parametrize(("num_heads", "num_kv_heads", "head_dim"), [(12, 2, 128), (3, 1, 16), (2, 2, 8)])
def test_the_probe_has_the_models_own_heads(num_heads: int, num_kv_heads: int, head_dim: int) -> None:
    shapes: list[tuple[torch.Size, torch.dtype]] = []

    def record(q: Tensor, k: Tensor, v: Tensor, *args: Any, enable_gqa: bool, **options: Any) -> Tensor:
        shapes.extend((heads.shape, heads.dtype) for heads in (q, k))
        return varlen_attn(q, k, v, *args, enable_gqa=enable_gqa, **options)

    assert (
        find_fault(
            VarlenKernel.of(record),
            CPU,
            torch.float16,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
        )
        is None
    )
    assert shapes == [((5, count, head_dim), torch.float16) for count in (num_heads, num_kv_heads)]


def not_causal(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    """Each token sees all of its sequence."""
    flipped = (heads.flip(0) for heads in (q, k, v))
    return (packed_attention_reference([3, 2], q, k, v) + packed_attention_reference([2, 3], *flipped).flip(0)) / 2


def across_sequences(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    return packed_attention_reference([5], q, k, v)


def without_gradient(q: Tensor, k: Tensor, v: Tensor, *_: Any, **options: Any) -> Tensor:
    """The values of each token for itself: a right output for first tokens alone."""
    return v.repeat_interleave(q.shape[1] // v.shape[1], dim=1)


@pytest.mark.parametrize(
    ("kernel", "fault"),
    [
        (not_causal, "another output than its own value"),
        (across_sequences, "another output than its own value"),
        (without_gradient, "its gradient reaches the values of other tokens"),
    ],
)
def test_a_broken_kernel_is_found_out(kernel: Callable[..., Tensor], fault: str) -> None:
    found = fault_of(VarlenKernel(varlen_attn=kernel, has_gqa=True))
    assert found is not None
    assert fault in found


def refuse(*_: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor execution on the device")


def refuse_the_arguments(*_: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    raise TypeError


def run_out(*_: Any, enable_gqa: bool = False, **options: Any) -> Tensor:
    raise torch.OutOfMemoryError("full")


def test_the_probe_says_why_there_is_no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    def probe(device: torch.device) -> VarlenKernel | str:
        found: VarlenKernel | str = probe_kernel.__wrapped__(device, torch.bfloat16, *SHAPE.values())  # no cache
        return found

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "Old One")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    assert probe(CPU) == "Old One has compute capability 7.5, and the kernel needs 8.0"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse)
    assert probe(CPU) == "it failed when it was tried: no kernel image is available"
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", refuse_the_arguments)
    assert probe(CPU) == "it failed when it was tried: TypeError"
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        probe(CPU)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen_attn)
    assert isinstance(probe(CPU), VarlenKernel)
