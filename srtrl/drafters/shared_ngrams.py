"""What follows two tokens, and what follows one, in the completed rollouts of all prompts.

A prompt's trie knows that prompt's texts only: it cannot foresee a token that is new there, and where few texts are
known that is every twentieth one. Texts of other prompts know how a phrase goes on. Two tokens tell most of that, so
instead of one more trie, of everything, this is a table of fixed size: for each context some tokens that followed it,
with counts. Where it is full the rare give way to the new, and all fade with time.

It learns complete rollouts only, in the order of completion: drafts do not depend on threads.
"""

from collections.abc import Sequence
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.trie_memory import NONE, START_TOKEN

_wide: Any = np.int64

Table = npt.NDArray[np.int32]
"""[contexts, 2 + 2 x WAYS]: what tells a context from others of its place, its total, and pairs of token and count."""

NUM_CONTEXTS = 1 << 17
"""Places for contexts: 9 MB."""
WAYS = 8
"""Tokens kept for a context."""
MARK, TOTAL, ENTRIES = 0, 1, 2
MAX_TOTAL = 1 << 10
"""A context that has occurred so often forgets half of that: policies change."""
MAX_UNREAD = 1 << 20
"""Most tokens that wait to be learned."""
NO_TOKEN = -2
"""In the place of the first of two tokens: the context is the second one alone."""


class SharedNgrams:
    """The table, and its filling."""

    def __init__(self, num_contexts: int = NUM_CONTEXTS) -> None:
        self._table: Table = np.zeros((0, ENTRIES + 2 * WAYS), np.int32)
        self._num_contexts = num_contexts
        self._unread: list[npt.NDArray[np.int32]] = []
        """Texts that have been added since the table was last asked for."""
        self._num_unread = 0

    @staticmethod
    def none() -> "SharedNgrams":
        """A table that knows nothing and learns nothing."""
        return SharedNgrams(0)

    @property
    def num_bytes(self) -> int:
        """Memory of the table."""
        return self._table.nbytes

    @property
    def table(self) -> Table:
        """What has been learned; without rows while that is nothing."""
        if self._unread:
            if not len(self._table):
                self._table = np.zeros((self._num_contexts, ENTRIES + 2 * WAYS), np.int32)
            ends = np.array([len(text) for text in self._unread], np.int64).cumsum()
            _add_texts(self._table, np.concatenate(self._unread), ends)
            self._unread, self._num_unread = [], 0
        return self._table

    def extend(self, texts: Sequence[npt.NDArray[np.int32]]) -> None:
        """Learn from completed rollouts, which stay as they are; where nobody drafts, that waits."""
        if not self._num_contexts:
            return
        self._unread += texts
        self._num_unread += sum(map(len, texts))
        if self._num_unread > MAX_UNREAD:
            _ = self.table


@numba.njit(cache=True, nogil=True, forceinline=True)
def _place_of(table: Table, first: int, second: int) -> tuple[int, int]:
    """Row of a context, and its mark there (never 0): a hash by two rounds of multiplying and folding."""
    code = np.uint64(first + 3) << np.uint64(32) | np.uint64(second + 3)
    code = (code ^ (code >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    code = (code ^ (code >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    code ^= code >> np.uint64(32)
    return _wide(code % np.uint64(len(table))), _wide(code >> np.uint64(33)) | 1


@numba.njit(cache=True, nogil=True, forceinline=True)
def find_context(table: Table, first: int, second: int) -> int:
    """Row of a context of two tokens, or of the second (the first is `NO_TOKEN`); `NONE` if nothing is known of it."""
    row, mark = _place_of(table, first, second)
    return row if table[row, MARK] == mark and table[row, TOTAL] > 0 else NONE


@numba.njit(cache=True, nogil=True)
def _add_texts(table: Table, token_ids: Table, ends: Table) -> None:
    """Learn from texts that lie end to end; `ends` [n] int64 are their ends."""
    first = 0
    for end in ends:
        before, last = START_TOKEN, START_TOKEN
        for token in token_ids[first:end]:
            _count(table, before, last, token)
            _count(table, NO_TOKEN, last, token)
            before, last = last, token
        first = end


@numba.njit(cache=True, nogil=True)
def _count(table: Table, first: int, second: int, token: int) -> None:
    """One more occurrence of a token behind a context."""
    place, mark = _place_of(table, first, second)
    row = table[place]
    if row[MARK] != mark:
        if row[TOTAL] > 1:  # another context's place: it is taken when that one has been missed for long enough
            _halve(row)
            return
        row[:] = 0
        row[MARK] = mark
    if row[TOTAL] >= MAX_TOTAL:
        _halve(row)
    rarest = ENTRIES
    for entry in range(ENTRIES, len(row), 2):
        if row[entry] == token and row[entry + 1] > 0:
            row[entry + 1] += 1
            row[TOTAL] += 1
            return
        if row[entry + 1] < row[rarest + 1]:
            rarest = entry
    if row[rarest + 1] > 1:  # as Misra and Gries (1982) find frequent items: what is new wears out what is rare
        row[rarest + 1] -= 1
        row[TOTAL] -= 1
        return
    row[TOTAL] += 1 - row[rarest + 1]
    row[rarest] = token
    row[rarest + 1] = 1


@numba.njit(cache=True, nogil=True)
def _halve(row: Table) -> None:
    """Forget half of what is known of a context, what has occurred once altogether."""
    row[TOTAL] = 0
    for entry in range(ENTRIES, len(row), 2):
        row[entry + 1] >>= 1
        row[TOTAL] += row[entry + 1]
