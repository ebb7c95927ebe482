"""The tokens that may follow a node of a draft, and the shares that contexts give them."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from srtrl.drafters.distributions import NUM_TOP
from srtrl.drafters.shared_ngrams import WAYS
from srtrl.drafters.texts import MAX_PLACES
from srtrl.model.kernels import inlined, makes_arrays
from srtrl.model.noise import uniform_of

Int32Array = npt.NDArray[np.int32]
Float64Array = npt.NDArray[np.float64]

MAX_CHILDREN = MAX_PLACES + NUM_TOP + 2 * WAYS
"""Tokens of a node's places, of a distribution, and of two contexts of other prompts."""
NOT_YET = np.inf
NOISE_POWER = 0.8
"""The noise g of a token multiplies its count by e^(NOISE_POWER x g): a count is only a guess at its probability."""
MAX_CONTEXTS = 7
"""Contexts that give them: a distribution, those of a rule, and two of other prompts."""


class Row(NamedTuple):
    """The noise and the policy's share in the next token after a node, beside its contexts."""

    key: np.uint64
    """Key of its noise."""
    is_known: bool
    num_passed: int
    """Tokens of the text before it, START included."""


class Children(NamedTuple):
    """The tokens that may follow a node, at most `MAX_CHILDREN`, and the contexts that say so."""

    token_ids: Int32Array
    counts: Int32Array
    """Occurrences in all contexts so far."""
    noise: Float64Array
    """See `gumbel_of`; `NOT_YET` where no context has needed it."""
    weights: Float64Array
    """Probability: the sum of its shares."""
    shares: Float64Array
    """[MAX_CONTEXTS, MAX_CHILDREN], of each context; of children that it knows."""
    cells: Int32Array
    """By context, see `cell_of`."""
    ends: Int32Array
    """By context, number of children with the context's own."""


@makes_arrays
def make_children() -> Children:
    """No child yet."""
    numbers, floats = np.empty((4, MAX_CHILDREN), np.int32), np.empty((2 + MAX_CONTEXTS, MAX_CHILDREN), np.float64)
    token_ids, counts, cells, ends = numbers
    return Children(token_ids, counts, floats[0], floats[1], floats[2:], cells, ends)


@inlined
def find_child(children: Children, num: int, token: int) -> int:
    """Index of the child with a token among the first `num`, else `num`."""
    i = 0
    while i < num and children.token_ids[i] != token:
        i += 1
    return i


@inlined
def gumbel_of(row: Row, token: int) -> float:
    """The noise of a token."""
    return -math.log(-math.log(uniform_of(row.key, token)))


@inlined
def add_child(children: Children, num: int, token: int) -> None:
    """Write a child without weight."""
    children.token_ids[num], children.counts[num], children.weights[num] = token, 0, 0.0
    children.noise[num] = NOT_YET


@inlined
def share_out(children: Children, context: int, num: int, row: Row, listed: int, cell: int, mass: float) -> None:
    """Divide the mass of a context among its children; their shares are counts so far, `listed` in total."""
    shares, total = children.shares[context], float(listed)
    if row.is_known:
        total = 0.0
        for i in range(num):
            if 0 < shares[i] < listed:  # of a single one the noise does not matter
                if children.noise[i] == NOT_YET:
                    children.noise[i] = gumbel_of(row, children.token_ids[i])
                shares[i] *= math.exp(NOISE_POWER * children.noise[i])
            total += shares[i]
    scale_shares(children, context, num, cell, mass / total)


@inlined
def scale_shares(children: Children, context: int, num: int, cell: int, factor: float) -> None:
    """Multiply the shares of a context, which are complete, and add them to the children's weights."""
    for i in range(num):
        children.shares[context, i] *= factor
        children.weights[i] += children.shares[context, i]
    children.cells[context], children.ends[context] = cell, num
