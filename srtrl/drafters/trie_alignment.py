"""The aligned context: what a sample's match would be, had a token that nobody expected been the expected one.

Where a sample says a token that the trie did not foresee (a number, another word), its match shrinks to the little that
has been seen before such a token, though its text goes on, more often than not, like that of the sibling it followed so
far. So a sample keeps a second context: at the surprise, the longest context that something follows, continued by its
most frequent token, as if that had come. It goes on along the sample's tokens as long as they continue it. Where one
does not, it takes the most frequent one for it again, unless the sample's own match has grown longer than the run for
which the aligned context has held: then the match knows better. A draft tree carries it along each path alike.
"""

from typing import Any, NamedTuple

import numba
import numpy as np

from srtrl.drafters.trie_counts import longest_continued, top_edge
from srtrl.drafters.trie_memory import DEGREE, LENGTH, LINK, NONE, ROOT, Memory, find_edge

RUN_AFTER_MISS = 4
"""An aligned context that misses a token keeps one part in so many of its run, for it has proved itself before."""

_wide: Any = np.int64


class Alignment(NamedTuple):
    """An aligned context."""

    state: int
    """`NONE` if there is none."""
    match: int
    """Length of the context."""
    run: int
    """Tokens for which it has held, as above."""


@numba.njit(cache=True, nogil=True, forceinline=True)
def locate(memory: Memory, state: int, match: int) -> int:
    """State of the string of length `match` that was in `state`: it may have moved to a clone since."""
    while state != ROOT and memory[memory[state + LINK] + LENGTH] >= match:
        state = memory[state + LINK]
    return int(state)


@numba.njit(cache=True, nogil=True)
def align(memory: Memory, state: int, match: int, aligned: Alignment, token: int) -> Alignment:
    """Aligned context behind a token, from the context (state, match) and the aligned one before it."""
    if state != ROOT and memory[state + DEGREE] == 0:
        state = longest_continued(memory, state)
        match = memory[state + LENGTH]
    if aligned.state != NONE:
        place = locate(memory, aligned.state, aligned.match)
        edge = find_edge(memory, place, token)
        if edge != NONE:
            return Alignment(_wide(memory[edge + 1]), _wide(aligned.match + 1), _wide(aligned.run + 1))
        if match <= aligned.run:
            edge = top_edge(memory, place)
            if edge == NONE:
                return Alignment(_wide(NONE), _wide(0), _wide(0))
            return Alignment(_wide(memory[edge + 1]), _wide(aligned.match + 1), _wide(aligned.run // RUN_AFTER_MISS))
    if state == ROOT or find_edge(memory, state, token) != NONE:
        return Alignment(_wide(NONE), _wide(0), _wide(0))
    return Alignment(_wide(memory[top_edge(memory, state) + 1]), _wide(match + 1), _wide(0))
