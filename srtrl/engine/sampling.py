"""Exact sampling by Gumbel-max with counter-based noise (docs/decoder.md, "Sampling").

The token at position p of a sample is argmax over the vocabulary of logit / temperature + Gumbel noise, where the
noise of entry v is a hash of (rng_key, p, v). That is a draw from the softmax (Gumbel 1954; Maddison et al. 2014,
"A* sampling"), and a pure function of (logits, temperature, rng_key, position): it knows nothing of the batch, of the
drafter or of how many tokens a step verified.

docs/examples/reference.py has this in two lines of NumPy. The CPU kernel gives the same tokens faster: a token wins
with the smallest -log(u) / p (the same race as the largest logit + Gumbel), and since 1 - u <= -log(u), a token whose
1 - u is already too large cannot win: one hash and one comparison reject nearly all of the vocabulary. Each row is
computed alone in a fixed order, so its bits do not depend on the batch. Letters: N rows, V vocabulary.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.cpu_threads import use_kernel_threads
from srtrl.model.kernels import makes_arrays
from srtrl.model.noise import hash_row, uniform_of
from srtrl.model.vector_exp import exp_parts
from srtrl.types import TopTokens

Array = npt.NDArray[Any]

NUM_LANES = 16
"""The softmax denominator is summed in this many lanes, by token modulo this."""
MAX_GUMBEL = 37.5
"""No noise of 52 bits is larger: -log(-log(1 - 2**-53)) is 36.7."""
TINY = 1e-30
"""Weights below are too coarse for the quick rejection."""
MARGIN = 1.0001
"""Room for the float32 error of the probabilities that the quick rejection uses (about 1e-6 relative)."""


def _tempered(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Logits over temperature [N, V] float32, divided as in the trainer; a temperature of 0 counts as 1."""
    return logits.float() / torch.where(temperatures > 0, temperatures, 1.0)[:, None]


def row_logprobs(logits: Tensor, temperatures: Tensor, token_ids: Tensor) -> Tensor:
    """Log-probs [N] float32 of `token_ids` [N] under the tempered softmax (of temperature 1 where it is 0)."""
    scaled = _tempered(logits, temperatures)
    return scaled.log_softmax(-1).gather(1, token_ids[:, None]).squeeze(1)


def filter_top_k_top_p(logits: Tensor, temperatures: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Set all but the most likely tokens to -inf: first the `top_k` [N] (0: all), of those the `top_p` [N] of mass.

    Ties at the border are cut by token index, so that exactly k remain. Never leaves a row without a token.
    """
    scaled = _tempered(logits, temperatures)
    sorted_logits, order = scaled.sort(dim=-1, descending=True, stable=True)  # [N, V]
    rank = torch.arange(logits.shape[1], device=logits.device)
    keep = (top_k[:, None] == 0) | (rank < top_k[:, None])
    probs = sorted_logits.masked_fill(~keep, -torch.inf).softmax(-1)
    mass_before = probs.cumsum(-1) - probs
    # In float32 the sum can reach 1 before the last token: 1 must keep all of them.
    keep &= (top_p[:, None] >= 1) | (mass_before < top_p[:, None]) | (rank == 0)
    keep_by_token = torch.zeros_like(keep).scatter_(1, order, keep)
    return logits.masked_fill(~keep_by_token, -torch.inf)


def sample_rows_on_cpu(
    logits: Tensor,
    temperatures: npt.NDArray[np.float32],
    rng_keys: npt.NDArray[np.uint64],
    positions: npt.NDArray[np.int64],
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Sample one token for each row, with its log-prob.

    Args:
        logits: [N, V], computed with in float32; -inf excludes a token.
        temperatures: [N]; 0 takes the most likely token (the first of equals).
        rng_keys: [N].
        positions: [N], index of the token within the response.

    Returns:
        Tokens [N], and log-probs [N] under the tempered softmax (of temperature 1 where it is 0).
    """
    token_ids, logprobs = np.empty(len(logits), np.int32), np.empty(len(logits), np.float32)
    use_kernel_threads(8 * logits.numel())
    _sample_rows(logits.float().numpy(), temperatures, rng_keys, positions, token_ids, logprobs)
    return token_ids, logprobs


@numba.njit(inline="always")
def _race(scaled: Array, weights: Array, best: int, row_key: np.uint64) -> int:
    """Index of the largest scaled[v] + Gumbel(v); `weights` are e**(scaled - max), `best` where scaled is largest."""
    winner = best
    exponential = -np.log(uniform_of(row_key, best))
    highest = np.float64(scaled[best]) - np.log(exponential)
    bound = MARGIN * exponential  # a token with weight w must have -log(u) < bound * w
    for v in range(len(scaled)):
        uniform = uniform_of(row_key, v)
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


@makes_arrays
def _sample_row(logits: Array, temperature: np.float32, rng_key: np.uint64, position: int) -> tuple[int, np.float32]:
    """Sample a token of one row; see `sample_rows_on_cpu`. Returns the token and its log-prob."""
    vocab_size = len(logits)
    padded = (vocab_size + NUM_LANES - 1) // NUM_LANES * NUM_LANES
    scaled, weights, powers = np.empty(padded, np.float32), np.zeros(padded, np.float32), np.empty(padded, np.int32)
    divisor = temperature if temperature > 0 else np.float32(1)
    for v in range(vocab_size):
        scaled[v] = logits[v] / divisor
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
        token = _race(scaled[:vocab_size], weights[:vocab_size], best, hash_row(rng_key, position))
    return token, np.float32(np.float64(scaled[token]) - np.float64(highest) - np.log(lanes.sum()))


@numba.njit(parallel=True, cache=True, nogil=True)
def _sample_rows(
    logits: Array, temperatures: Array, rng_keys: Array, positions: Array, token_ids: Array, logprobs: Array
) -> None:
    for n in numba.prange(len(logits)):
        token_ids[n], logprobs[n] = _sample_row(logits[n], temperatures[n], rng_keys[n], positions[n])


def top_tokens_on_cpu(logits: Tensor, temperatures: Tensor, token_ids: Tensor, logprobs: Tensor, num: int) -> TopTokens:
    """The `num` most likely tokens of each row of `logits` [N, V], or all of them.

    The other arguments are those of `row_logprobs` and what it returned: a sampled token's log-prob has the
    denominator, so that nothing is summed again.
    """
    scaled = _tempered(logits, temperatures)
    top = scaled.topk(min(num, logits.shape[1]))
    differences = top.values - scaled.gather(1, token_ids.long()[:, None])
    return TopTokens(token_ids=top.indices.int().numpy(), logprobs=(differences + logprobs[:, None]).numpy())
