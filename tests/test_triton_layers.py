"""The kernels between the matrix products against the eager model's operations, where each rounds.

Inputs of the norms are small whole numbers, whose squares any order sums exactly: then every bit must be equal.
"""

import pytest
import torch
import triton.language as tl
from kernel_cases import KERNEL_DEVICE
from torch import Tensor

from srtrl.model.transformer import RopeConfig, RotaryTable, rms_norm, rotate
from srtrl.model.triton_jit import jit
from srtrl.model.triton_layers import add_rms_norm, rope_and_store, rounded

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
EPS = 1e-6
ULP = {torch.float32: 3e-7, torch.bfloat16: 2**-7}
"""Relative: about two units in the last place."""


def whole_numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-9, 10, shape, generator=generator).to(KERNEL_DEVICE, dtype)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(KERNEL_DEVICE, dtype)


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Equal bits under the interpreter; on a device its reciprocal square root and exponential may differ by a bit."""
    if KERNEL_DEVICE == "cpu":
        assert torch.equal(actual, expected)
    else:
        torch.testing.assert_close(actual, expected, rtol=ULP[actual.dtype], atol=0)


@jit
def _round_all(values: tl.tensor, out: tl.tensor, LENGTH: tl.constexpr) -> None:
    lanes = tl.arange(0, LENGTH)
    tl.store(out + lanes, rounded(tl.load(values + lanes), tl.bfloat16))


def test_rounding_is_to_the_nearest_and_ties_go_to_even() -> None:
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    bits[:2048] &= ~0x7FFF  # ties, up to even and down to even
    values = bits.view(torch.float32)
    values[values.abs() < 1e-37] = 0.0  # the interpreter's conversion of subnormals is wrong
    values[:3] = torch.tensor([torch.inf, -torch.inf, torch.nan])
    values = values.to(KERNEL_DEVICE)
    out = torch.empty(4096, dtype=torch.bfloat16, device=KERNEL_DEVICE)
    _round_all[(1,)](values, out, LENGTH=4096)
    assert torch.equal(out.nan_to_num(7.0), values.bfloat16().nan_to_num(7.0))


@DTYPES
@pytest.mark.parametrize("width", [1, 5, 64, 100])
def test_norm_of_the_sum_rounds_as_the_eager_model(width: int, dtype: torch.dtype) -> None:
    weight = normal(width, dtype=dtype, seed=2)
    hidden, update = (whole_numbers(4, width, dtype=dtype, seed=seed) for seed in (0, 1))
    expected_hidden = hidden + update
    normed = add_rms_norm(hidden, update, weight, EPS)
    assert torch.equal(hidden, expected_hidden)
    assert_same(normed, rms_norm(expected_hidden, weight, EPS))
    out = torch.empty_like(hidden)
    assert add_rms_norm(hidden, None, weight, EPS, out=out) is out
    assert_same(out, normed)
    assert torch.equal(hidden, expected_hidden)


@DTYPES
def test_residual_add_rounds_once_and_the_norm_reads_the_rounded_sum(dtype: torch.dtype) -> None:
    hidden, update = normal(6, 96, dtype=dtype), normal(6, 96, dtype=dtype, seed=1)
    weight = normal(96, dtype=dtype, seed=2)
    expected_hidden = hidden + update
    normed = add_rms_norm(hidden, update, weight, EPS)
    assert torch.equal(hidden, expected_hidden)
    torch.testing.assert_close(normed, rms_norm(expected_hidden, weight, EPS), rtol=ULP[dtype], atol=1e-30)


class Rope:
    """A projection's rows, a token-major cache and the angles, with the eager result."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, qk_norm: bool) -> None:
        self.shape = (num_heads, num_kv_heads, head_dim)
        make = whole_numbers if qk_norm else normal
        self.qkv = make(4, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype)
        self.positions = torch.tensor([0, 19, 7, 0], dtype=torch.int32, device=KERNEL_DEVICE)
        self.indices = torch.tensor([5, 0, 11, -1], dtype=torch.int32, device=KERNEL_DEVICE)
        weights = (normal(head_dim, dtype=dtype, seed=3), normal(head_dim, dtype=dtype, seed=4))
        self.qk_norm = weights if qk_norm else None
        self.rotary = RotaryTable(RopeConfig(rope_theta=100.0), head_dim)
        self.table = self.rotary.build(20, dtype, torch.device(KERNEL_DEVICE))
        self.keys, self.values = (normal(3, 4, num_kv_heads, head_dim, dtype=dtype, seed=seed) for seed in (5, 6))

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, and the cache's keys and values."""
        num_heads, num_kv_heads, head_dim = self.shape
        heads = self.qkv.view(len(self.qkv), -1, head_dim)
        q, k, v = heads.split_with_sizes((num_heads, num_kv_heads, num_kv_heads), dim=1)
        if self.qk_norm is not None:
            q, k = (rms_norm(part, weight, EPS) for part, weight in zip((q, k), self.qk_norm, strict=True))
        cosines, sines = self.table[self.positions].unsqueeze(1).chunk(2, dim=-1)
        keys, values = self.keys.clone(), self.values.clone()
        real = self.indices >= 0
        keys.flatten(0, 1)[self.indices[real].long()] = rotate(k, cosines, sines)[real]
        values.flatten(0, 1)[self.indices[real].long()] = v[real]
        return rotate(q, cosines, sines), keys, values

    def run(self) -> Tensor:
        return rope_and_store(
            self.qkv, self.table, self.positions, self.indices, self.keys, self.values, self.qk_norm, EPS
        )


@DTYPES
@pytest.mark.parametrize("shape", [(2, 1, 8), (6, 3, 10), (1, 1, 2), (4, 2, 64), (12, 4, 6)], ids=str)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_rotation_and_store_round_as_the_eager_model(
    shape: tuple[int, int, int], qk_norm: bool, dtype: torch.dtype
) -> None:
    rope = Rope(*shape, dtype, qk_norm)
    q, keys, values = rope.expected()
    rotated = rope.run()
    if qk_norm:
        assert_same(rotated, q)
        assert_same(rope.keys, keys)
    else:
        assert torch.equal(rotated, q)
        assert torch.equal(rope.keys, keys)
    assert torch.equal(rope.values, values)
