"""Gumbel-max sampling and log-probs on a CPU, one row after the other: the fast twin of `sampler.py`.

A token wins with the smallest -log(u) / p (the same race as the largest logit + Gumbel). Since 1 - u <= -log(u), a
token whose 1 - u is already too large cannot win: one hash and one comparison reject nearly all of the vocabulary, and
only the few left pay for logarithms. Each row is computed alone in a fixed order by `sample_row`, on which all that
samples on a CPU relies: its bits do not depend on the batch.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.engine.sampler import GOLDEN, MIX_1, MIX_2
from srtrl.model.vector_exp import exp_parts

Array = npt.NDArray[Any]

_GOLDEN = np.uint64(GOLDEN)
_MIX_1 = np.uint64(MIX_1)
_MIX_2 = np.uint64(MIX_2)
NUM_LANES = 16
MAX_GUMBEL = 37.5
"""No noise of 52 bits is larger: -log(-log(1 - 2**-53)) is 36.7."""
TINY = 1e-30
"""Weights below are too coarse for the quick rejection."""
MARGIN = 1.0001
"""Room for the float32 error of the probabilities that the quick rejection uses (about 1e-6 relative)."""


@numba.njit(inline="always")
def _mix(bits: np.uint64) -> np.uint64:
    bits = (bits ^ (bits >> np.uint64(30))) * _MIX_1
    bits = (bits ^ (bits >> np.uint64(27))) * _MIX_2
    return bits ^ (bits >> np.uint64(31))


@numba.njit(inline="always")
def _race(scaled: Array, weights: Array, best: int, row_key: np.uint64) -> int:
    """Index of the largest scaled[v] + Gumbel(v); `weights` are e**(scaled - max), `best` where scaled is largest."""
    winner = best
    bits = _mix(row_key + np.uint64(best + 1) * _GOLDEN)
    exponential = -np.log((np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52)
    highest = np.float64(scaled[best]) - np.log(exponential)
    bound = MARGIN * exponential  # a token with weight w must have -log(u) < bound * w
    for v in range(len(scaled)):
        bits = _mix(row_key + np.uint64(v + 1) * _GOLDEN)
        uniform = (np.float64(bits >> np.uint64(12)) + 0.5) * 2.0**-52
        if weights[v] < TINY:
            if scaled[v] + MAX_GUMBEL < highest:
                continue
        elif 1.0 - uniform >= bound * weights[v]:
            continue
        noisy = np.float64(scaled[v]) - np.log(-np.log(uniform))
        if noisy > highest or (noisy == highest and v < winner):
            winner = v
            highest = noisy
            if weights[v] >= TINY:
                bound = min(bound, MARGIN * -np.log(uniform) / weights[v])
    return winner


@numba.njit(nogil=True)
def make_scratch(vocab_size: int) -> tuple[Array, Array, Array]:
    """Room for one row at a time: scaled logits, weights and bits of powers, a multiple of `NUM_LANES` long."""
    padded = (vocab_size + NUM_LANES - 1) // NUM_LANES * NUM_LANES
    return np.empty(padded, np.float32), np.zeros(padded, np.float32), np.empty(padded, np.int32)


@numba.njit(nogil=True)
def sample_row(
    logits: Array,
    temperature: np.float32,
    rng_key: np.uint64,
    position: int,
    forced: int,
    scratch: tuple[Array, Array, Array],
) -> tuple[int, np.float32]:
    """Sample a token of one row; see `sample_rows_on_cpu`. Returns the token and its log-prob."""
    vocab_size = len(logits)
    scaled, weights, powers = scratch
    bits = scaled.view(np.uint32)
    shift = np.uint32(32 - 8 * logits.itemsize)
    divisor = temperature if temperature > 0 else np.float32(1)
    for v in range(vocab_size):
        bits[v] = np.uint32(logits[v]) << shift
    for v in range(vocab_size):
        scaled[v] = scaled[v] / divisor
    best = 0
    for v in range(vocab_size):
        if scaled[v] > scaled[best]:
            best = v
    highest = scaled[best]
    for v in range(vocab_size):
        weights[v], powers[v] = exp_parts(scaled[v] - highest)
    factors = powers.view(np.float32)
    for v in range(vocab_size):
        weights[v] *= factors[v]
    lanes = np.zeros(NUM_LANES, np.float64)
    for start in range(0, len(weights), NUM_LANES):
        for j in range(NUM_LANES):
            lanes[j] += weights[start + j]
    token = best
    if temperature > 0:
        row_key = _mix(_mix(np.uint64(position) + _GOLDEN) ^ rng_key)
        token = _race(scaled[:vocab_size], weights[:vocab_size], best, row_key)
    if forced >= 0:
        token = forced
    return token, np.float32(np.float64(scaled[token]) - np.float64(highest) - np.log(lanes.sum()))


@numba.njit(parallel=True, cache=True, nogil=True)
def sample_rows_on_cpu(
    logits: Array,
    temperatures: Array,
    rng_keys: Array,
    positions: Array,
    forced: Array,
    token_ids: Array,
    logprobs: Array,
) -> None:
    """Sample one token a row and its log-prob.

    Args:
        logits: [N, V], the bits of float32 as uint32, or of bfloat16 as uint16; -inf excludes a token.
        temperatures: [N] float32; 0 takes the most likely token (the first of equals).
        rng_keys: [N] uint64.
        positions: [N] int64, index of the token within the response.
        forced: [N] int32, the token to take whatever is sampled; -1 takes the sampled one.
        token_ids: [N] int64, written.
        logprobs: [N] float32, written: under the tempered softmax (of temperature 1 where it is 0).
    """
    for n in numba.prange(len(logits)):
        scratch = make_scratch(logits.shape[1])
        token_ids[n], logprobs[n] = sample_row(
            logits[n], temperatures[n], rng_keys[n], positions[n], forced[n], scratch
        )
