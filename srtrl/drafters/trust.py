"""How far drafts trust a context: learned from the tokens that followed, for each purpose.

A context's *trust* is the chance that it decides the next token and its suffixes do not. It begins as a formula and
becomes the share of the tokens that the context has decided among those that it could have. Which context has decided a
token is not seen; each gets its share of the token's probability (the E step of expectation maximisation). Contexts are
taken together by their number of occurrences and their length; those that are all of the answer so far are apart.

Drafts depend on it, tokens never do.
"""

import numpy as np
import numpy.typing as npt

from srtrl.model.kernels import inlined, inner

Float64Array = npt.NDArray[np.float64]

Trust = Float64Array
"""[NUM_CELLS, 2]: of each kind of context the tokens that it has decided and those that it could have."""

DECIDED, REACHED = 0, 1
DISTRIBUTION = 24
"""The first cell of distributions."""
NUM_CELLS = DISTRIBUTION + 8
"""4 of occurrences x 6 of lengths, 6 of distributions, then one each for `shared_ngrams` of length 1 and 2."""
FORMULA_WEIGHT = 8.0
"""The formula counts as this many tokens."""
MAX_REACHED = 2000.0
"""With more, old tokens lose half of their weight: the policy moves."""


def make_trust() -> Trust:
    """Nothing is learned yet."""
    return np.zeros((NUM_CELLS, 2))


@inlined
def column_of(length: int, is_whole: bool) -> int:
    """Lengths of 1, 2, 4, 8, 16 and more tokens, or whole."""
    return 5 if is_whole else (length >= 2) + (length >= 4) + (length >= 8) + (length >= 16)


@inlined
def cell_of(occurrences: int, length: int, is_whole: bool) -> int:
    """Row of a context in a trie: 1, 2, 4 or 8 and more occurrences; see `column_of`."""
    row = (occurrences >= 2) + (occurrences >= 4) + (occurrences >= 8)
    return 6 * row + column_of(length, is_whole)


@inlined
def blend_trust(trust: Trust, cell: int, formula: float) -> float:
    """The chance that a context decides the next token."""
    return float((FORMULA_WEIGHT * formula + trust[cell, DECIDED]) / (FORMULA_WEIGHT + trust[cell, REACHED]))


@inner
def learn_trust(trust: Trust, cell: int, reached: float, decided: float) -> None:
    """A context was reached with this weight, and has decided the token with that one."""
    trust[cell, REACHED] += reached
    trust[cell, DECIDED] += decided
    if trust[cell, REACHED] > MAX_REACHED:
        trust[cell, REACHED] /= 2
        trust[cell, DECIDED] /= 2
