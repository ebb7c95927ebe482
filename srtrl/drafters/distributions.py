"""Distributions of the policy as tries keep them: the most likely tokens of a place, and their probabilities."""

import numpy as np
import numpy.typing as npt

from srtrl.model.kernels import inlined
from srtrl.types import TopTokens

Int32Array = npt.NDArray[np.int32]

NUM_TOP = 8
"""Tokens of a distribution: with 4 the drafts lose a quarter of what they gain by it."""
SIZE = NUM_TOP + NUM_TOP // 2
"""Integers of one: token ids, then probabilities in units of 1 / `UNIT`, two in an integer."""
UNIT = (1 << 16) - 1
UNKNOWN = -1
"""In place of the first token: nothing is known of this place."""
NO_DISTRIBUTIONS: Int32Array = np.empty((0, SIZE), np.int32)


def unknown(num: int) -> Int32Array:
    """Nothing is known of `num` places: [num, SIZE]."""
    return np.full((num, SIZE), UNKNOWN, np.int32)


def pack(top: TopTokens) -> Int32Array:
    """[L, SIZE] of L places; where there are fewer than `NUM_TOP` tokens, the others have the probability 0."""
    packed, num = np.zeros((len(top.token_ids), SIZE), np.int32), top.token_ids.shape[1]
    packed[:, :num] = top.token_ids
    chances = np.nan_to_num(np.exp(top.logprobs)).clip(max=1)  # of a broken policy: training stops later in the step
    packed[:, NUM_TOP:].view(np.uint16)[:, :num] = chances * UNIT + 0.5
    return packed


@inlined
def probability(memory: Int32Array, distribution: int, number: int) -> float:
    """The probability of a token of the distribution that begins at an index."""
    pair = memory[distribution + NUM_TOP + number // 2]
    return float(pair >> (16 * (number % 2)) & UNIT) / UNIT
