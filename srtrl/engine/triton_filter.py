"""Top-k and top-p on a CUDA device without sorting the vocabulary: the fast twin of `sampler.filter_top_k_top_p`.

What the filters leave of a row is all tokens above one scaled logit, and of those that equal it the first few. That
*cut* is found by bisection over the ordered bits of the logits: the highest limit that k logits reach, then the highest
whose logits have p of the mass. Dividing by the temperature keeps the order but can make two logits equal, so the last
step, which of the equals stay, looks at scaled logits. One program a row goes over the row once for each bit; this is
for evaluation, for nothing is filtered in training. A CUDA graph can hold it.

Letters: N rows, V vocabulary.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from srtrl.model.triton_jit import jit

_MINUS_INFINITY = tl.constexpr(float("-inf"))
_PLUS_INFINITY = tl.constexpr(float("inf"))

BLOCK = 8192
"""Tokens that a program looks at together: a program waits for memory once a block, and has a multiprocessor alone."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Cuts:
    """What is left of each row: tokens whose scaled logit is above the value, or equals it up to the token."""

    values: Tensor
    """[N] float32, logit / temperature; -inf where a row is whole."""
    tokens: Tensor
    """[N] int32, the last token that stays of those whose scaled logit equals the value."""

    @staticmethod
    def allocate(num_rows: int, device: torch.device | str) -> "Cuts":
        """Room for up to `num_rows` rows."""
        return Cuts(
            values=torch.empty(num_rows, dtype=torch.float32, device=device),
            tokens=torch.empty(num_rows, dtype=torch.int32, device=device),
        )


def find_cuts(
    logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor, cuts: Cuts, *, block: int = BLOCK
) -> None:
    """Find what top-k, and then top-p of what that left, keep of each row.

    The set for top-k is exactly that of `filter_top_k_top_p`. For top-p both sum in float32, in another order: a token
    whose mass before it is within about 1e-6 of p can fall on the other side. A row keeps at least one token.

    Args:
        logits: [N, V], any float type up to float32, a row adjacent in memory; -inf excludes a token.
        temperatures: [N] float32; 0 counts as 1, as there.
        top_k: [N] int32; 0 keeps all.
        top_p: [N] float32; 1 keeps all.
        cuts: For at least N rows, written.
        block: A power of two.
    """
    num_rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert num_rows <= len(cuts.values)
    if num_rows == 0:
        return
    search_cuts[(num_rows,)](
        logits,
        temperatures,
        top_k,
        top_p,
        cuts.values,
        cuts.tokens,
        vocab_size,
        logits.stride(0),
        NUM_BITS=16 if logits.dtype == torch.bfloat16 else 32,
        BLOCK=block,
        num_warps=32,
        enable_fp_fusion=False,
    )


@jit
def _load(row_start: tl.tensor, tokens: tl.tensor, vocab_size: tl.tensor) -> tl.tensor:
    """Logits as float32; behind the vocabulary -inf, which has no mass."""
    return tl.load(row_start + tokens, mask=tokens < vocab_size, other=_MINUS_INFINITY).to(tl.float32)


@jit
def _ordered(logits: tl.tensor) -> tl.tensor:
    """Uint32 in the order of float32 `logits`."""
    bits = logits.to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@jit
def _scale(logits: tl.tensor, divisor: tl.tensor) -> tl.tensor:
    return tl.div_rn(logits, divisor)


@jit
def _count_reaching(row_start: tl.tensor, vocab_size: tl.tensor, limit: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """How many logits are at least `limit`, in ordered bits; int32."""
    counts = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        reaches = (_ordered(_load(row_start, tokens, vocab_size)) >= limit) & (tokens < vocab_size)
        counts += reaches.to(tl.int32)
    return tl.sum(counts, axis=0)


@jit
def _mass_reaching(
    row_start: tl.tensor,
    vocab_size: tl.tensor,
    limit: tl.tensor,
    divisor: tl.tensor,
    highest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Sum of e**(scaled - highest) over the logits that are at least `limit`, in ordered bits; float32.

    Always in one order, so that a higher limit never has more mass.
    """
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        loaded = _load(row_start, start + tl.arange(0, BLOCK), vocab_size)
        weights = tl.exp(_scale(loaded, divisor) - highest)
        masses += tl.where(_ordered(loaded) >= limit, weights, 0.0)
    return tl.sum(masses, axis=0)


@jit
def _lowest_reaching(
    row_start: tl.tensor, vocab_size: tl.tensor, limit: tl.tensor, divisor: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """The smallest scaled logit of those that are at least `limit`, in ordered bits."""
    lowest = tl.full((BLOCK,), float("inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        loaded = _load(row_start, tokens, vocab_size)
        reaches = (_ordered(loaded) >= limit) & (tokens < vocab_size)
        lowest = tl.minimum(lowest, tl.where(reaches, _scale(loaded, divisor), _PLUS_INFINITY))
    return tl.min(lowest, axis=0)


@jit
def _highest(row_start: tl.tensor, vocab_size: tl.tensor, divisor: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest scaled logit."""
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        highest = tl.maximum(highest, _load(row_start, start + tl.arange(0, BLOCK), vocab_size))
    return tl.max(_scale(highest, divisor), axis=0)


@jit
def _above(
    row_start: tl.tensor,
    vocab_size: tl.tensor,
    value: tl.tensor,
    divisor: tl.tensor,
    highest: tl.tensor,
    BLOCK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Count (int32) and mass (float32) of the scaled logits above `value`."""
    counts = tl.zeros((BLOCK,), tl.int32)
    masses = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, vocab_size, BLOCK):
        scaled = _scale(_load(row_start, start + tl.arange(0, BLOCK), vocab_size), divisor)
        counts += (scaled > value).to(tl.int32)
        masses += tl.where(scaled > value, tl.exp(scaled - highest), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@jit
def _last_equal(
    row_start: tl.tensor,
    vocab_size: tl.tensor,
    value: tl.tensor,
    divisor: tl.tensor,
    num_kept: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The token that is the `num_kept`-th whose scaled logit equals `value`, or the last of them."""
    last = tl.zeros((), tl.int32)
    num_before = tl.zeros((), tl.int32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        equal = (_scale(_load(row_start, tokens, vocab_size), divisor) == value) & (tokens < vocab_size)
        rank = num_before + tl.cumsum(equal.to(tl.int32), axis=0)
        last = tl.maximum(last, tl.max(tl.where(equal & (rank <= num_kept), tokens, 0), axis=0))
        num_before += tl.sum(equal.to(tl.int32), axis=0)
    return last


@jit
def search_cuts(
    logits: tl.tensor,
    temperatures: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    cut_values: tl.tensor,
    cut_tokens: tl.tensor,
    vocab_size: tl.tensor,
    row_stride: tl.tensor,
    NUM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """The cut of a row; one program a row. The upper NUM_BITS of a float32 tell the logits apart (bfloat16: 16)."""
    row = tl.program_id(0)
    row_start = logits + row.to(tl.int64) * row_stride
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0, temperature, 1.0)
    k = tl.minimum(tl.load(top_k + row), vocab_size)
    p = tl.load(top_p + row)
    value = tl.full((), float("-inf"), tl.float32)
    last = vocab_size + tl.zeros((), tl.int32)
    if (k > 0) | (p < 1.0):
        num_equal = vocab_size + tl.zeros((), tl.int32)  # how many stay of those that equal the value
        highest = _highest(row_start, vocab_size, divisor, BLOCK)
        if k > 0:
            limit = tl.zeros((), tl.uint32)
            step = tl.full((), 0x80000000, tl.uint32)
            for _ in range(NUM_BITS):
                if _count_reaching(row_start, vocab_size, limit | step, BLOCK) >= k:
                    limit = limit | step
                step = step >> 1
            value = _lowest_reaching(row_start, vocab_size, limit, divisor, BLOCK)
            num_above, _ = _above(row_start, vocab_size, value, divisor, highest, BLOCK)
            num_equal = k - num_above
        if p < 1.0:
            _, mass_above = _above(row_start, vocab_size, value, divisor, highest, BLOCK)
            # Without top-k the value is -inf, and its equals have no mass.
            target = p * (mass_above + num_equal.to(tl.float32) * tl.exp(value - highest))
            limit = tl.zeros((), tl.uint32)
            step = tl.full((), 0x80000000, tl.uint32)
            for _ in range(NUM_BITS):
                if _mass_reaching(row_start, vocab_size, limit | step, divisor, highest, BLOCK) >= target:
                    limit = limit | step
                step = step >> 1
            top_p_value = _lowest_reaching(row_start, vocab_size, limit, divisor, BLOCK)
            _, mass_above = _above(row_start, vocab_size, top_p_value, divisor, highest, BLOCK)
            # The j-th equal stays if the mass above and j of its own size are less than the target.
            wanted = tl.ceil((target - mass_above) / tl.exp(top_p_value - highest))
            num_wanted = tl.minimum(tl.maximum(wanted, 1.0), vocab_size).to(tl.int32)
            num_equal = tl.where(top_p_value > value, num_wanted, tl.minimum(num_wanted, num_equal))
            value = tl.maximum(value, top_p_value)
        last = _last_equal(row_start, vocab_size, value, divisor, num_equal, BLOCK)
    tl.store(cut_values + row, value)
    tl.store(cut_tokens + row, last)
