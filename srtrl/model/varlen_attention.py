"""Causal attention over packed sequences by the FlashAttention kernel that torch carries, where it runs.

The kernel needs CUDA and half types; everywhere else `PackedPlan` pads. Whether it runs is tried once for each device,
type and shape of heads, by using it: a build may lack it, and a device be too old for it.

B sequences, T packed tokens, H query heads, K key-value heads, E head width.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.bfloat16, torch.float16)
MAX_HEAD_DIM = 256
HEAD_DIM_MULTIPLE = 8
MIN_CAPABILITY = (8, 0)
"""Compute capability of Ampere: FlashAttention-2 needs it."""


@dataclass(kw_only=True, slots=True, frozen=True)
class VarlenKernel:
    """`torch.nn.attention.varlen.varlen_attn`, or what stands in for it in a test."""

    varlen_attn: Callable[..., Any]
    has_gqa: bool
    """It takes `enable_gqa` (torch 2.12 and later); without it keys and values are repeated for each query head."""

    @classmethod
    def of(cls, varlen_attn: Callable[..., Any]) -> "VarlenKernel":
        """The kernel behind a function with the signature of `varlen_attn` in any torch from 2.11 on."""
        return cls(varlen_attn=varlen_attn, has_gqa="enable_gqa" in inspect.signature(varlen_attn).parameters)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, longest: int) -> Tensor:
        """Causal attention within each sequence, with scale E**-0.5; differentiable.

        Args:
            q: [T, H, E]; any float type, cast to that of `v` (under autocast the rotary embedding gives float32).
            k: [T, K, E]; likewise.
            v: [T, K, E], bfloat16 or float16.
            starts: packed position of each sequence's first token, then T: [B + 1] int32, on the device.
            longest: tokens of the longest sequence.

        Returns:
            [T, H, E], in the dtype of `v`.
        """
        num_shared = q.shape[1] // k.shape[1]  # query heads on one key-value head
        options = {}
        if self.has_gqa:
            options["enable_gqa"] = num_shared > 1
        elif num_shared > 1:
            k, v = (heads.repeat_interleave(num_shared, dim=1) for heads in (k, v))  # [T, H, E]
        out: Tensor = self.varlen_attn(
            q.to(v.dtype),
            k.to(v.dtype),
            v,
            starts,
            starts,
            longest,
            longest,
            window_size=(-1, 0),  # causal
            **options,
        )
        return out


def choose_kernel(
    device: torch.device, dtype: torch.dtype, *, num_heads: int, num_kv_heads: int, head_dim: int
) -> VarlenKernel | str:
    """The kernel for such values on `device`, or why there is none, as a clause for a sentence."""
    reason = unsupported(device, dtype, head_dim)
    if reason is not None:
        return reason
    return probe_kernel(device, dtype, num_heads, num_kv_heads, head_dim)


def unsupported(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why FlashAttention is not for such values on `device`, whoever packages it, as a clause; None: it may be."""
    if device.type != "cuda":
        return f"the device is {device.type}, and the kernel is for cuda"
    if dtype not in KERNEL_DTYPES:
        return f"keys and values are {dtype}, and the kernel takes bfloat16 and float16"
    if head_dim > MAX_HEAD_DIM or head_dim % HEAD_DIM_MULTIPLE != 0:
        return f"heads are {head_dim} wide, and the kernel takes multiples of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}"
    return None


def too_old(device: torch.device) -> str | None:
    """The same of a CUDA device that no FlashAttention runs on."""
    capability = torch.cuda.get_device_capability(device)
    if capability >= MIN_CAPABILITY:
        return None
    found = "{}.{}".format(*capability)
    return f"{torch.cuda.get_device_name(device)} has compute capability {found}, and the kernel needs 8.0"


def first_line(error: BaseException) -> str:
    """What a library says went wrong, without the stack that C++ adds."""
    return (str(error).splitlines() or [type(error).__name__])[0]


@functools.cache
def probe_kernel(
    device: torch.device, dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> VarlenKernel | str:
    """The kernel of a CUDA device, tried forward and backward on a few tokens, or why it does not run there."""
    reason = too_old(device)
    if reason is not None:
        return reason
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError as error:
        return f"torch {torch.__version__} has none ({error})"
    kernel = VarlenKernel.of(varlen_attn)
    try:
        fault = find_fault(kernel, device, dtype, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim)
    except torch.OutOfMemoryError:
        raise  # says nothing of the kernel
    except (RuntimeError, TypeError, ValueError) as error:
        fault = f"it failed when it was tried: {first_line(error)}"
    return kernel if fault is None else fault


def find_fault(
    kernel: VarlenKernel,
    device: torch.device,
    dtype: torch.dtype,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> str | None:
    """Try the kernel on two short sequences; returns what is wrong with it, or None.

    The first token of a sequence sees itself alone, so its output is its value; and the gradient of a later token's
    output must reach the values before it and no others.

    The first pass that asks may be one in inference mode, under autocast, or of layers that are computed again; none of
    that reaches in here.
    """
    lengths = (3, 2)
    generator = torch.Generator().manual_seed(0)

    def random_heads(count: int) -> Tensor:
        heads = torch.randn(sum(lengths), count, head_dim, generator=generator, dtype=torch.float32)
        return heads.to(device=device, dtype=dtype).requires_grad_()

    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.autocast(device.type, enabled=False),
        torch.autograd.graph.saved_tensors_hooks(_same, _same),
    ):
        q, k, v = random_heads(num_heads), random_heads(num_kv_heads), random_heads(num_kv_heads)
        starts = torch.tensor([0, 3, 5], dtype=torch.int32, device=device)
        out = kernel.attend(q, k, v, starts, max(lengths))  # [T, H, E]
        (slope,) = torch.autograd.grad(out[1].sum(), v)
    first = out.detach()[[0, 3]].float()
    expected = v.detach()[[0, 3]].repeat_interleave(num_heads // num_kv_heads, dim=1).float()
    if not torch.allclose(first, expected, rtol=0.01, atol=0.01):
        return "it gives a first token another output than its own value"
    reached = slope.float().abs().sum(dim=(1, 2)) > 0  # [T]
    if reached.tolist() != [True, True, False, False, False]:
        return "its gradient reaches the values of other tokens than those that are seen"
    return None


def _same(tensor: Tensor) -> Tensor:
    """Keep a tensor for the backward pass as it is, whatever hooks are around."""
    return tensor
