"""Gumbel-max sampling and log-probs on a CPU, one row after the other: the fast twin of `sampler.py`.

A token wins with the smallest -log(u) / p (the same race as the largest logit + Gumbel). Since 1 - u <= -log(u), a
token whose 1 - u is already too large cannot win: one hash and one comparison reject nearly all of the vocabulary, and
only the few left pay for logarithms. Each row is computed alone in a fixed order: its bits do not depend on the batch.
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


@numba.njit(parallel=True, cache=True, nogil=True)
def sample_rows_on_cpu(
    logits: Array, temperatures: Array, streams: Array, positions: Array, token_ids: Array, logprobs: Array
) -> None:
    """Sample one token a row and its log-prob.

    Args:
        logits: [N, V] float32; -inf excludes a token.
        temperatures: [N] float32; 0 takes the most likely token (the first of equals).
        streams: [N] uint64.
        positions: [N] int64, index of the token within the response.
        token_ids: [N] int64, written.
        logprobs: [N] float32, written: under the tempered softmax (of temperature 1 where it is 0).
    """
    vocab_size = logits.shape[1]
    padded = (vocab_size + NUM_LANES - 1) // NUM_LANES * NUM_LANES
    for n in numba.prange(len(logits)):
        temperature = temperatures[n] if temperatures[n] > 0 else np.float32(1)
        scaled = np.empty(vocab_size, np.float32)
        for v in range(vocab_size):
            scaled[v] = logits[n, v] / temperature
        best = 0
        for v in range(vocab_size):
            if scaled[v] > scaled[best]:
                best = v
        weights = np.zeros(padded, np.float32)
        powers = np.zeros(padded, np.int32)
        for v in range(vocab_size):
            weights[v], powers[v] = exp_parts(scaled[v] - scaled[best])
        weights *= powers.view(np.float32)
        lanes = np.zeros(NUM_LANES, np.float64)
        for start in range(0, padded, NUM_LANES):
            for j in range(NUM_LANES):
                lanes[j] += weights[start + j]
        token = best
        if temperatures[n] > 0:
            row_key = _mix(_mix(np.uint64(positions[n]) + _GOLDEN) ^ streams[n])
            token = _race(scaled, weights[:vocab_size], best, row_key)
        token_ids[n] = token
        logprobs[n] = np.float32(np.float64(scaled[token]) - np.float64(scaled[best]) - np.log(lanes.sum()))
