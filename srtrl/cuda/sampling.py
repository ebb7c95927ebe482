"""Gumbel-max sampling and log-probs on a CUDA device: the fast twin of `sampling.py`, in two kernels.

In the first a program takes one block of one row's vocabulary, so that a few rows fill the device. It sums the softmax
and ranks the noisy logits in float32, good to about 1e-5. In the second a program takes one row: only the blocks whose
best is within `MARGIN` of the row's best can hold the winner, nearly always one, and only they are computed again as
the definition says, in float64. Blocks begin at fixed tokens and are combined in their order: the bits of a
row do not depend on other rows. Nothing asks the device anything, so a CUDA graph can hold it.

Where drafters want the most likely tokens of a row, too, the first kernel keeps the best two of each block, and the
second takes the best of these: a third one in the same block is missed.

Letters: N rows, V vocabulary, K most likely tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from srtrl.cuda.jit import jit
from srtrl.model.noise import GOLDEN, MIX_1, MIX_2

_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_ALL_ONES = tl.constexpr(2**64 - 1)
_LAST_BIT = tl.constexpr(2.0**-52)
_HIGH_PART = tl.constexpr(2.0**-32)
_MINUS_INFINITY = tl.constexpr(float("-inf"))

BLOCK = 1024
"""Tokens of a block: what one candidate costs in float64 against what the maxima of all blocks cost in memory."""
MARGIN = tl.constexpr(1e-3)
RELATIVE_MARGIN = tl.constexpr(1e-6)
"""A noisy logit in float32 is off by at most some 2e-5 (its noise, the fast logarithms) and 1e-7 of its size."""


class SamplingScratch:
    """Results of the blocks of each row; [N, blocks] float32 each."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device | str, *, block: int = BLOCK) -> None:
        """Room for up to `num_rows` rows; `block`, the tokens of a block, is a power of two."""
        self.block = block
        shape = (num_rows, triton.cdiv(vocab_size, block))
        self.best = torch.empty(shape, dtype=torch.float32, device=device)
        """Largest noisy logit, roughly."""
        self.maxima = torch.empty_like(self.best)
        """Largest scaled logit."""
        self.sums = torch.empty_like(self.best)
        """Sum of e**(scaled - maximum)."""
        self.top_logits = torch.empty((num_rows, 2 * shape[1]), dtype=torch.float32, device=device)
        """[N, 2 x blocks], scaled logits of the two most likely tokens of each block."""
        self.top_tokens = torch.empty_like(self.top_logits, dtype=torch.int32)


def sample_rows_triton(
    logits: Tensor,
    temperatures: Tensor,
    rng_keys: Tensor,
    positions: Tensor,
    out_tokens: Tensor,
    out_logprobs: Tensor,
    scratch: SamplingScratch,
    out_top: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Sample one token per row and its log-prob; everything lies on the device.

    A row that is not finite gets a log-prob that is not finite, and some token of the vocabulary.

    Args:
        logits: [N, V], any float type up to float32, a row adjacent in memory; -inf excludes a token.
        temperatures: [N] float32; 0 takes the most likely token (the first of equals).
        rng_keys: [N] int64, the bits of the unsigned keys.
        positions: [N] int32, index of the token within the response.
        out_tokens: [N] int32, written: those of `sampling.sample_rows_on_cpu`.
        out_logprobs: [N] float32, written: under the whole tempered softmax, as `sampling.row_logprobs`.
        scratch: For at least N rows of V tokens.
        out_top: [N, K] int32 and float32, written: the most likely tokens, of each block no more than two, and their
            log-probs, -inf where there are fewer tokens.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = scratch.best.shape[1]
    assert logits.stride(1) == 1
    assert num_rows <= len(scratch.best)
    assert num_blocks == triton.cdiv(vocab_size, scratch.block)
    out_top_tokens, out_top_logprobs = out_top or (scratch.top_tokens, scratch.top_logits)
    num_top = 0 if out_top is None else out_top_tokens.shape[1]
    top = (scratch.top_logits, scratch.top_tokens)
    shared = (scratch.best, scratch.maxima, scratch.sums, *top, vocab_size, num_blocks, logits.stride(0))
    rows = (logits, temperatures, rng_keys, positions)
    # Without fusion of multiply and add the float64 noise has the bits of the reference but for its logarithms.
    options = {"NUM_TOP": num_top, "BLOCK": scratch.block, "num_warps": 4, "enable_fp_fusion": False}
    rank_blocks[(num_rows, num_blocks)](*rows, *shared, **options)
    outputs = (out_tokens, out_logprobs, out_top_tokens, out_top_logprobs)
    finish_rows[(num_rows,)](*rows, *outputs, *shared, NUM_BLOCKS=triton.next_power_of_2(num_blocks), **options)


@jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """SplitMix64's finaliser, on uint64."""
    bits = (bits ^ (bits >> 30)) * _MIX_1
    bits = (bits ^ (bits >> 27)) * _MIX_2
    return bits ^ (bits >> 31)


@jit
def noise_bits(rng_keys: tl.tensor, positions: tl.tensor, row: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """The hash of (rng_key, position, token) of some tokens of a row, uint64; see `srtrl.model.noise`."""
    rng_key = tl.load(rng_keys + row).to(tl.uint64)
    position = tl.load(positions + row).to(tl.uint64)
    row_key = _mix(_mix(position + _GOLDEN) ^ rng_key)
    return _mix(row_key + (tokens + 1).to(tl.uint64) * _GOLDEN)


@jit
def rough_gumbel(bits: tl.tensor) -> tl.tensor:
    """-log(-log(u)) in float32, off by at most 2e-5 for every u.

    Near 0 and near 1 float32 cannot hold u or 1 - u as a difference; so the smaller of the two comes from the bits.
    """
    is_upper = (bits >> 63) != 0  # u is at least one half
    smaller = tl.where(is_upper, bits ^ _ALL_ONES, bits) >> 12  # the 52 bits of u, or of 1 - u
    high = (smaller >> 20).to(tl.int32).to(tl.float32)
    low = (smaller & 0xFFFFF).to(tl.int32).to(tl.float32)
    share = high * _HIGH_PART + (low + 0.5) * _LAST_BIT
    logarithm = -tl.log(tl.where(is_upper, 1.0 - share, share))
    series = share * (1.0 + share * (0.5 + share * (0.33333333 + share * 0.25)))  # -log(1 - share) where it is small
    return -tl.log(tl.where(is_upper & (share < 0.03125), series, logarithm))


@jit
def _exact_gumbel(bits: tl.tensor) -> tl.tensor:
    """-log(-log(u)) in float64, as the reference computes it."""
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * _LAST_BIT
    return -tl.log(-tl.log(uniform))


@jit
def load_scaled(
    logits: tl.tensor,
    temperature: tl.tensor,
    row: tl.tensor,
    row_stride: tl.tensor,
    tokens: tl.tensor,
    vocab_size: tl.tensor,
) -> tl.tensor:
    """Logits over temperature, float32; -inf after the vocabulary."""
    whole_row = logits + row.to(tl.int64) * row_stride
    loaded = tl.load(whole_row + tokens, mask=tokens < vocab_size, other=_MINUS_INFINITY).to(tl.float32)
    if (temperature > 0) & (temperature != 1.0):
        loaded = tl.div_rn(loaded, temperature)  # not `/`, which is an approximation: the trainer divides exactly
    return loaded


@jit
def rank_blocks(
    logits: tl.tensor,
    temperatures: tl.tensor,
    rng_keys: tl.tensor,
    positions: tl.tensor,
    best: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    top_logits: tl.tensor,
    top_tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    row_stride: tl.tensor,
    NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Fill `SamplingScratch`; one program per row and block."""
    row, block = tl.program_id(0), tl.program_id(1)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    temperature = tl.load(temperatures + row)
    scaled = load_scaled(logits, temperature, row, row_stride, tokens, vocab_size)
    highest = tl.max(scaled, axis=0)
    # In a block of excluded tokens only, -inf - -inf would be NaN.
    weights = tl.exp(scaled - tl.where(highest == _MINUS_INFINITY, 0.0, highest))
    entry = row.to(tl.int64) * num_blocks + block
    tl.store(maxima + entry, highest)
    tl.store(sums + entry, tl.sum(weights, axis=0))
    if NUM_TOP > 0:
        others = scaled
        for place in tl.static_range(2):
            likely = tl.max(others, axis=0)
            token = tl.min(tl.where(others == likely, tokens, vocab_size), axis=0)
            tl.store(top_logits + 2 * entry + place, likely)
            tl.store(top_tokens + 2 * entry + place, token)
            others = tl.where(tokens == token, _MINUS_INFINITY, others)
    if temperature > 0:  # padding is greedy: it pays for no noise
        scaled += rough_gumbel(noise_bits(rng_keys, positions, row, tokens))
    tl.store(best + entry, tl.max(scaled, axis=0))


@jit
def finish_rows(
    logits: tl.tensor,
    temperatures: tl.tensor,
    rng_keys: tl.tensor,
    positions: tl.tensor,
    out_tokens: tl.tensor,
    out_logprobs: tl.tensor,
    out_top_tokens: tl.tensor,
    out_top_logprobs: tl.tensor,
    best: tl.tensor,
    maxima: tl.tensor,
    sums: tl.tensor,
    top_logits: tl.tensor,
    top_tokens: tl.tensor,
    vocab_size: tl.tensor,
    num_blocks: tl.tensor,
    row_stride: tl.tensor,
    NUM_BLOCKS: tl.constexpr,
    NUM_TOP: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Token and log-prob of a row, and its most likely tokens, from the results of its blocks; one program per row."""
    row = tl.program_id(0)
    temperature = tl.load(temperatures + row)
    blocks = tl.arange(0, NUM_BLOCKS)
    entries = row.to(tl.int64) * num_blocks + blocks
    inside = blocks < num_blocks
    block_maxima = tl.load(maxima + entries, mask=inside, other=_MINUS_INFINITY)
    highest = tl.max(block_maxima, axis=0)
    # A row without any finite logit comes out as NaN here, and so do +inf and NaN.
    total = tl.sum(tl.load(sums + entries, mask=inside, other=0.0) * tl.exp(block_maxima - highest), axis=0)

    rough = tl.load(best + entries, mask=inside, other=_MINUS_INFINITY)
    best_rough = tl.max(rough, axis=0)
    can_win = inside & (rough >= best_rough - (MARGIN + RELATIVE_MARGIN * tl.abs(best_rough)))
    winner = tl.zeros((), tl.int32)
    winning = tl.full((), float("-inf"), tl.float64)
    block = tl.min(tl.where(can_win, blocks, NUM_BLOCKS), axis=0)
    while block < NUM_BLOCKS:
        tokens = block * BLOCK + tl.arange(0, BLOCK)
        scaled = load_scaled(logits, temperature, row, row_stride, tokens, vocab_size)
        gumbel = _exact_gumbel(noise_bits(rng_keys, positions, row, tokens))
        noisy = scaled.to(tl.float64) + tl.where(temperature > 0, gumbel, 0.0)
        highest_noisy = tl.max(noisy, axis=0)
        first = tl.min(tl.where(noisy == highest_noisy, tokens, vocab_size), axis=0)
        is_better = highest_noisy > winning  # of equals the first block's stays
        winner = tl.where(is_better, first, winner)
        winning = tl.where(is_better, highest_noisy, winning)
        block = tl.min(tl.where(can_win & (blocks > block), blocks, NUM_BLOCKS), axis=0)

    chosen = load_scaled(logits, temperature, row, row_stride, winner, vocab_size)
    logprob = chosen.to(tl.float64) - highest.to(tl.float64) - tl.log(total.to(tl.float64))
    tl.store(out_tokens + row, winner)
    tl.store(out_logprobs + row, logprob.to(tl.float32))
    if NUM_TOP > 0:
        candidates = tl.arange(0, 2 * NUM_BLOCKS)
        first = 2 * row.to(tl.int64) * num_blocks
        others = tl.load(top_logits + first + candidates, mask=candidates < 2 * num_blocks, other=_MINUS_INFINITY)
        normalizer = highest + tl.log(total)
        for place in tl.static_range(NUM_TOP):
            likely = tl.max(others, axis=0)
            candidate = tl.min(tl.where(others == likely, candidates, 2 * num_blocks - 1), axis=0)
            tl.store(out_top_tokens + row * NUM_TOP + place, tl.load(top_tokens + first + candidate))
            tl.store(out_top_logprobs + row * NUM_TOP + place, likely - normalizer)
            others = tl.where(candidates == candidate, _MINUS_INFINITY, others)
