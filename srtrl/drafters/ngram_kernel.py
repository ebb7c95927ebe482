"""Where the last few tokens of a text were seen before: a hash table a sequence, one kernel call a step.

The table maps each n-gram to the place that followed its latest occurrence. A slot holds `place * WIDTH + n`; the
n-gram itself is read from the text, so that equal hashes are told apart. Letters: B sequences, S rows of the tables.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT

Array = npt.NDArray[Any]

WIDTH = 16
"""N-grams are shorter than this."""
EMPTY = -1
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@numba.njit(cache=True, nogil=True, inline="always")
def _find(text: Array, table: Array, end: int, n: int) -> np.int64:
    """The slot of the n-gram that ends before place `end`: its own, or the empty one where it belongs."""
    key = np.uint64(n)
    for place in range(end - n, end):
        key = (key ^ np.uint64(text[place])) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    slot = np.int64(key & np.uint64(len(table) - 1))
    while table[slot] != EMPTY:
        if table[slot] % WIDTH == n:
            other = table[slot] // WIDTH
            same = True
            for back in range(1, n + 1):
                if text[other - back] != text[end - back]:
                    same = False
                    break
            if same:
                return slot
        slot = (slot + 1) & (len(table) - 1)
    return slot


@numba.njit(cache=True, nogil=True)
def index_text(text: Array, table: Array, start: int, stop: int, min_ngram: int, max_ngram: int) -> None:
    """Enter the n-grams that are followed by the tokens at places `start` to `stop`; the later occurrence wins."""
    for place in range(start, stop):
        for n in range(min_ngram, min(max_ngram, place) + 1):
            table[_find(text, table, place, n)] = place * WIDTH + n


@numba.njit(cache=True, nogil=True)
def append_tokens(
    texts: Array,
    tables: Array,
    lengths: Array,
    rows: Array,
    tokens: Array,
    offsets: Array,
    min_ngram: int,
    max_ngram: int,
) -> None:
    """Append tokens to texts and tables; those of sequence b are `tokens[offsets[b] : offsets[b + 1]]`.

    Args:
        texts: [S, capacity] int32.
        tables: [S, slots] int64, a power of two of slots, more than there will be n-grams.
        lengths: [S] int64, changed.
        rows: [B] rows of the sequences.
        tokens: [all tokens] int32.
        offsets: [B + 1].
        min_ngram: Shortest n-gram.
        max_ngram: Longest n-gram.
    """
    for b in range(len(rows)):
        row, count = rows[b], offsets[b + 1] - offsets[b]
        start = lengths[row]
        texts[row, start : start + count] = tokens[offsets[b] : offsets[b + 1]]
        lengths[row] = start + count
        index_text(texts[row], tables[row], start, start + count, min_ngram, max_ngram)


@numba.njit(cache=True, nogil=True)
def look_up(
    texts: Array,
    tables: Array,
    lengths: Array,
    rows: Array,
    max_tokens: Array,
    acceptance: Array,
    token_ids: Array,
    parents: Array,
    scores: Array,
    offsets: Array,
) -> None:
    """Draft what followed the latest occurrence of each text's longest known ending.

    Args:
        texts: As in `append_tokens`.
        tables: As in `append_tokens`.
        lengths: As in `append_tokens`.
        rows: [B].
        max_tokens: [B], longest draft of each sequence.
        acceptance: [max_ngram + 1] float32: chance of a token behind an n-gram, 0 below the shortest n-gram.
        token_ids: [sum of max_tokens] int32, filled.
        parents: Like `token_ids`.
        scores: [sum of max_tokens] float32, filled.
        offsets: [B + 1], filled.
    """
    offsets[0] = 0
    for b in range(len(rows)):
        text, table, length = texts[rows[b]], tables[rows[b]], lengths[rows[b]]
        n = min(len(acceptance) - 1, length)
        place = length  # of the next token; none known
        while n > 0 and acceptance[n] > 0:
            found = table[_find(text, table, length, n)]
            if found != EMPTY:
                place = found // WIDTH
                break
            n -= 1
        count = min(max_tokens[b], length - place)
        score = np.float32(1.0)
        for depth in range(count):
            node = offsets[b] + depth
            score *= acceptance[n]
            token_ids[node] = text[place + depth]
            parents[node] = depth - 1 if depth else ROOT
            scores[node] = score
        offsets[b + 1] = offsets[b] + count
