"""Prompt look-up: what followed the sequence's last few tokens when they last occurred in its own text.

As in A. Saxena, "Prompt Lookup Decoding" (2023), but the latest occurrence counts, and the response is searched too.
Each slot has a hash table from n-grams to the position after their latest occurrence. An entry holds `position * WIDTH
+ n`; the n-gram itself is read from the text, so that equal hashes are told apart.
"""

from collections.abc import Sequence
from typing import Self

import numba
import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from srtrl.drafters.base import DrafterBase, Int32Array, Int64Array, end_to_end, run_warm_up
from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.recipe import Section
from srtrl.types import Completion, Request

WIDTH = 16
"""N-grams are shorter than this."""
EMPTY = -1
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


class NgramOptions(Section):
    """Options of the drafter `ngram`."""

    max_ngram: int = Field(default=4, ge=1, lt=WIDTH)
    """Longest ending of the text that is looked for."""
    min_ngram: int = Field(default=2, ge=1, lt=WIDTH)
    """Shortest ending that is worth a draft."""
    max_tokens: int = Field(default=10, ge=1)
    """Longest draft."""
    acceptance: float = Field(default=0.6, gt=0, lt=1)
    """Guessed chance of each drafted token after an ending of `max_ngram` tokens.

    After one that is m tokens shorter it is `acceptance` / (1 + m / 4). A node's score is the product along its path.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.min_ngram > self.max_ngram:
            raise ValueError(f"min_ngram is {self.min_ngram}, expected at most max_ngram ({self.max_ngram})")
        return self


class Drafter(DrafterBase):
    """See `srtrl.drafters.base.DrafterBase`."""

    Options = NgramOptions
    options: NgramOptions

    def __init__(self, options: Section | None = None) -> None:
        super().__init__(options)
        short_by = np.arange(self.options.max_ngram, -1, -1)
        self._acceptance = (self.options.acceptance / (1 + short_by / 4)).astype(np.float32)
        self._acceptance[: self.options.min_ngram] = 0
        self._lengths = np.zeros(0, np.int64)
        """[slots]."""
        self._texts = np.zeros((0, 64), np.int32)
        """[slots, capacity], prompt and response."""
        self._tables = np.zeros((0, 0), np.int64)
        """[slots, entries], a power of two, more than there will be n-grams."""

    def start(self, slots: Int64Array, requests: Sequence[Request]) -> None:
        """Index the prompts."""
        self._resize(int(slots.max(initial=-1)) + 1, 0)
        self._lengths[slots] = 0
        self._tables[slots] = EMPTY
        self.observe(slots, *end_to_end([request.prompt_token_ids for request in requests]))

    def propose(self, slots: Int64Array, max_nodes: Int64Array) -> DraftTrees:
        """Return a chain for each slot whose ending has occurred before."""
        most = np.minimum(max_nodes, self.options.max_tokens)
        token_ids = np.empty(int(most.sum()), np.int32)
        parents = np.empty(len(token_ids), np.int32)
        scores = np.empty(len(token_ids), np.float32)
        offsets = np.zeros(len(slots) + 1, np.int64)
        _look_up(
            self._texts, self._tables, self._lengths, slots, most, self._acceptance, token_ids, parents, scores, offsets
        )
        end = int(offsets[-1])
        return DraftTrees(token_ids=token_ids[:end], parents=parents[:end], scores=scores[:end], offsets=offsets)

    def observe(self, slots: Int64Array, token_ids: Int32Array, offsets: Int64Array) -> None:
        """Append what was committed."""
        self._resize(0, int((self._lengths[slots] + np.diff(offsets)).max(initial=0)))
        shortest, longest = self.options.min_ngram, self.options.max_ngram
        _append(self._texts, self._tables, self._lengths, slots, token_ids, offsets, shortest, longest)

    def finish(self, slots: Sequence[int], completions: Sequence[Completion | None]) -> None:
        """Forget the samples."""
        self._lengths[list(slots)] = 0

    def warm_up(self) -> None:
        """Compile the kernels."""
        run_warm_up(type(self)(self.options))

    def _resize(self, num_slots: int, length: int) -> None:
        """Make room for `num_slots` and for texts of this length; longer tables are built again from the texts."""
        old_slots, capacity = self._texts.shape
        more_slots = max(0, num_slots - old_slots)
        more_tokens = max(length, 2 * capacity) - capacity if length > capacity else 0
        if not more_slots and not more_tokens:
            return
        self._texts = np.pad(self._texts, ((0, more_slots), (0, more_tokens)))
        self._lengths = np.pad(self._lengths, (0, more_slots))
        shortest, longest = self.options.min_ngram, self.options.max_ngram
        num_entries = 1 << (2 * self._texts.shape[1] * (longest - shortest + 1)).bit_length()
        self._tables = np.full((len(self._lengths), num_entries), EMPTY, np.int64)
        for slot in range(old_slots):
            _index(self._texts[slot], self._tables[slot], 0, int(self._lengths[slot]), shortest, longest)


@numba.njit(cache=True, nogil=True, inline="always")
def _find(text: Int32Array, table: Int64Array, end: int, n: int) -> np.int64:
    """Entry of the n-gram that ends before position `end`: its own, or the empty one where it belongs."""
    key = np.uint64(n)
    for position in range(end - n, end):
        key = (key ^ np.uint64(text[position])) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    entry = np.int64(key & np.uint64(len(table) - 1))
    while table[entry] != EMPTY:
        if table[entry] % WIDTH == n:
            other = table[entry] // WIDTH
            same = True
            for back in range(1, n + 1):
                if text[other - back] != text[end - back]:
                    same = False
                    break
            if same:
                return entry
        entry = (entry + 1) & (len(table) - 1)
    return entry


@numba.njit(cache=True, nogil=True)
def _index(text: Int32Array, table: Int64Array, start: int, stop: int, min_ngram: int, max_ngram: int) -> None:
    """Enter the n-grams that the tokens from `start` to `stop` follow; the later occurrence wins."""
    for position in range(start, stop):
        for n in range(min_ngram, min(max_ngram, position) + 1):
            table[_find(text, table, position, n)] = position * WIDTH + n


@numba.njit(cache=True, nogil=True)
def _append(
    texts: Int32Array,
    tables: Int64Array,
    lengths: Int64Array,
    slots: Int64Array,
    token_ids: Int32Array,
    offsets: Int64Array,
    min_ngram: int,
    max_ngram: int,
) -> None:
    """Append tokens to texts and tables: those of row b are `token_ids[offsets[b] : offsets[b + 1]]`."""
    for row in range(len(slots)):
        slot, start = slots[row], lengths[slots[row]]
        stop = start + offsets[row + 1] - offsets[row]
        texts[slot, start:stop] = token_ids[offsets[row] : offsets[row + 1]]
        lengths[slot] = stop
        _index(texts[slot], tables[slot], start, stop, min_ngram, max_ngram)


@numba.njit(cache=True, nogil=True)
def _look_up(
    texts: Int32Array,
    tables: Int64Array,
    lengths: Int64Array,
    slots: Int64Array,
    max_tokens: Int64Array,
    acceptance: npt.NDArray[np.float32],
    token_ids: Int32Array,
    parents: Int32Array,
    scores: npt.NDArray[np.float32],
    offsets: Int64Array,
) -> None:
    """Draft what followed the latest occurrence of each text's longest known ending.

    Args:
        texts: See `Drafter`, as for `tables` and `lengths`.
        tables: [slots, entries].
        lengths: [slots].
        slots: [B].
        max_tokens: [B], longest draft of each.
        acceptance: [max_ngram + 1], chance of a token after an n-gram; 0 below the shortest n-gram.
        token_ids: [sum of max_tokens], filled.
        parents: [sum of max_tokens], filled.
        scores: [sum of max_tokens], filled.
        offsets: [B + 1], filled.
    """
    for row in range(len(slots)):
        text, table, length = texts[slots[row]], tables[slots[row]], lengths[slots[row]]
        n = min(len(acceptance) - 1, length)
        position = length  # of the next token; none known
        while n > 0 and acceptance[n] > 0:
            found = table[_find(text, table, length, n)]
            if found != EMPTY:
                position = found // WIDTH
                break
            n -= 1
        count = min(max_tokens[row], length - position)
        score = np.float32(1.0)
        for depth in range(count):
            node = offsets[row] + depth
            score *= acceptance[n]
            token_ids[node] = text[position + depth]
            parents[node] = depth - 1 if depth else ROOT
            scores[node] = score
        offsets[row + 1] = offsets[row] + count
