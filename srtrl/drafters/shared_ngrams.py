"""How often tokens follow two tokens, or a single token, in the rollouts of all prompts.

A prompt's trie holds that prompt's texts only: it cannot propose a token that is new there, and with few texts that is
every twentieth token. Texts of other prompts contain common phrases. Two tokens of context are enough for most of them,
so this is a table of fixed size, not another trie: for each context some tokens that followed it, with counts. Where it
is full, new tokens replace rare ones, and all counts fade with time.

Of a sample that the engine decodes it learns more than the tokens that were drawn: each place adds the probabilities of
its most likely tokens, which the policy has computed. Of other texts it learns each token with the weight 1, in the
order of completion. Drafts do not depend on threads.
"""

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.distributions import NUM_TOP, UNKNOWN, probability
from srtrl.drafters.texts import NONE, START_TOKEN, Int32Array, Int64Array
from srtrl.model.kernels import inlined, inner

Table = npt.NDArray[np.int32]
"""[contexts, 2 + 2 x WAYS]: a mark that identifies the row's context, its total, and pairs of token and count.

Total and counts are in units of 1 / `UNIT`."""

NUM_CONTEXTS = 1 << 17
"""Rows: 8 MB."""
WAYS = 7
"""Tokens kept for a context: its row is one cache line."""
MARK, TOTAL, ENTRIES = 0, 1, 2
UNIT = 1 << 8
"""The weight of a token of a text."""
MAX_TOTAL = UNIT << 10
"""A context that has occurred this often forgets half of it: policies change."""
NO_TOKEN = -2
"""In place of the first of two tokens: the context is the second one alone."""
NO_TABLE: Table = np.zeros((0, ENTRIES + 2 * WAYS), np.int32)
"""Without any context."""


def make_table() -> Table:
    """An empty table."""
    return np.zeros((NUM_CONTEXTS, ENTRIES + 2 * WAYS), np.int32)


@inlined
def _row_of(table: Table, first: int, second: int) -> tuple[int, int]:
    """Row of a context, and its mark there (never 0): a hash by two rounds of multiplying and folding."""
    code = np.uint64(first + 3) << np.uint64(32) | np.uint64(second + 3)
    code = (code ^ (code >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    code ^= code >> np.uint64(32)
    return int(np.int64(code % np.uint64(len(table)))), int(np.int64(code >> np.uint64(33))) | 1


@inlined
def find_context(table: Table, first: int, second: int) -> int:
    """Row of a context of two tokens, or of the second (the first is `NO_TOKEN`); `NONE` if it is not in the table."""
    row, mark = _row_of(table, int(first), int(second))
    return row if table[row, MARK] == mark and table[row, TOTAL] > 0 else NONE


@numba.njit(cache=True, nogil=True)
def learn_ngrams(table: Table, text: npt.NDArray[np.int32]) -> None:
    """Learn from a completed rollout."""
    before_last, last = START_TOKEN, START_TOKEN
    for token in text:
        if token == START_TOKEN:  # another turn
            before_last, last = START_TOKEN, START_TOKEN
            continue
        for first in (before_last, NO_TOKEN):  # of one type: `_claim` compiles once
            _count(table, _claim(table, int(first), int(last)), int(token), UNIT)
        before_last, last = last, token


@numba.njit(cache=True, nogil=True)
def learn_distributions(
    table: Table, last_two: Int32Array, token_ids: Int32Array, offsets: Int64Array, known: Int32Array
) -> None:
    """Learn what was likely in place of tokens: those of row b follow the two tokens `last_two[b]`, [B, 2].

    `known`: distributions, [tokens, SIZE], some of them unknown.
    """
    for b in range(len(last_two)):
        before_last, last = int(last_two[b, 0]), int(last_two[b, 1])
        for i in range(offsets[b], offsets[b + 1]):
            if known[i, 0] != UNKNOWN:
                for length in (2, 1):
                    row = _claim(table, before_last if length == 2 else NO_TOKEN, last)
                    for number in range(NUM_TOP):
                        weight = int(UNIT * probability(known[i], 0, number) + 0.5)
                        if weight > 0:
                            _count(table, row, int(known[i, number]), weight)
            before_last, last = last, int(token_ids[i])


@inner
def _claim(table: Table, first: int, second: int) -> int:
    """Row of a context, which it takes if it is another's."""
    row, mark = _row_of(table, first, second)
    if table[row, MARK] != mark:
        table[row] = 0
        table[row, MARK] = mark
    if table[row, TOTAL] >= MAX_TOTAL:
        table[row, TOTAL] = 0
        for entry in range(ENTRIES, ENTRIES + 2 * WAYS, 2):
            table[row, entry + 1] >>= 1
            table[row, TOTAL] += table[row, entry + 1]
    return row


@inner
def _count(table: Table, row: int, token: int, weight: int) -> None:
    """Add to the count of a token after the context of a row."""
    rarest = ENTRIES
    for entry in range(ENTRIES, ENTRIES + 2 * WAYS, 2):
        if table[row, entry] == token and table[row, entry + 1] > 0:
            table[row, entry + 1] += weight
            table[row, TOTAL] += weight
            return
        if table[row, entry + 1] < table[row, rarest + 1]:
            rarest = entry
    if table[row, rarest + 1] > weight:  # as Misra and Gries (1982) find frequent items: what is new wears out the rare
        table[row, rarest + 1] -= weight
        table[row, TOTAL] -= weight
        return
    table[row, TOTAL] += weight - table[row, rarest + 1]
    table[row, rarest] = token
    table[row, rarest + 1] = weight
