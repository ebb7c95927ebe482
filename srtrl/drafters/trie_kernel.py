"""Insertion into token tries, matching, and exact counts, on the arrays of `trie_memory`.

The trie of all suffixes is stored as a generalised suffix automaton (Blumer et al., 1985; Mohri, Moreno and Weinstein,
"General suffix automaton construction algorithm and space bounds", 2009). A state stands for the strings that end at
the same positions of the inserted text; they are suffixes of its longest string, and its suffix link leads to the
state of the next shorter one.
"""

from typing import NamedTuple

import numba

from srtrl.drafters.trie_alignment import Alignment, align, locate
from srtrl.drafters.trie_counts import count_occurrence, count_pending
from srtrl.drafters.trie_memory import (
    COUNT,
    CURSOR_CLASS,
    FREE_CURSORS,
    LENGTH,
    LINK,
    NONE,
    NUM_TOKENS,
    ROOT,
    START_STATE,
    START_TOKEN,
    Memory,
    Places,
    add_edge,
    allocate,
    clone_state,
    find_edge,
    new_state,
    open_memory,
)

# Record of a cursor.
STATE = 0
"""State of the longest string that matches; of an inserting cursor its whole text, START included."""
MATCH = 1
"""Length of that string, START included."""
KIND = 2
"""One of the kinds below."""
NEW_STATE = 3
"""State that is being linked while an insertion waits for room, or `NONE`."""
NEXT_PARENT = 4
"""Where that insertion goes on."""
ALIGNED_STATE = 5
"""State of the cursor's aligned context (see `trie_alignment`), or `NONE`."""
ALIGNED_MATCH = 6
"""Length of that context."""
ALIGNED_RUN = 7
"""Tokens for which it has held."""
LAST, BEFORE_LAST = 8, 9
"""The last two tokens, `START_TOKEN` where there are none."""
LOOKED_AT = 10
"""`MATCH` when the fields above were brought up to the next token: while an insertion waits for room they are ahead."""
DRAFTS = 11
"""Whether it will be drafted for; if not, the fields from `ALIGNED_STATE` on stay as they are."""

STOPPED, INSERTING, FOLLOWING = 0, 1, 2


@numba.njit(cache=True, nogil=True)
def new_cursor(memory: Memory, kind: int, drafts: bool) -> int:
    """Offset of a new cursor behind the START token, or `NONE` if there is no room."""
    cursor = memory[FREE_CURSORS]
    if cursor != NONE:
        memory[FREE_CURSORS] = memory[cursor]
    else:
        cursor = allocate(memory, CURSOR_CLASS)
        if cursor == NONE:
            return NONE
    memory[cursor + KIND] = kind
    memory[cursor + DRAFTS] = drafts
    _begin_text(memory, cursor)
    return int(cursor)


@numba.njit(cache=True, nogil=True)
def _begin_text(memory: Memory, cursor: int) -> None:
    """Put a cursor behind the START token."""
    memory[cursor + STATE] = START_STATE
    memory[cursor + MATCH] = 1
    memory[cursor + NEW_STATE] = NONE
    memory[cursor + ALIGNED_STATE] = NONE
    memory[cursor + LAST] = memory[cursor + BEFORE_LAST] = START_TOKEN
    memory[cursor + LOOKED_AT] = NONE
    if memory[cursor + KIND] == INSERTING:
        memory[START_STATE + COUNT] += 1


@numba.njit(cache=True, nogil=True)
def free_cursor(memory: Memory, cursor: int) -> None:
    """Give a cursor back."""
    memory[cursor + KIND] = STOPPED
    memory[cursor] = memory[FREE_CURSORS]
    memory[FREE_CURSORS] = cursor


@numba.njit(cache=True, nogil=True)
def resolve(memory: Memory, cursor: int) -> int:
    """State of a cursor's match; a followed one may have moved to a clone since."""
    state = memory[cursor + STATE]
    match = memory[cursor + MATCH]
    state = locate(memory, state, match)
    memory[cursor + STATE] = state
    return int(state)


@numba.njit(cache=True, nogil=True)
def advance(memory: Memory, cursor: int, token_ids: Memory, begin: int) -> int:
    """Insert or follow `token_ids` from index `begin` on; returns the index of the first for which there is no room.

    Among tokens that are inserted, `START_TOKEN` ends a text: another one begins behind it.
    """
    if memory[cursor + KIND] == FOLLOWING:
        for i in range(begin, len(token_ids)):
            _look_at(memory, cursor, token_ids[i])
            _follow_token(memory, cursor, token_ids[i])
        return len(token_ids)
    for i in range(begin, len(token_ids)):
        if token_ids[i] == START_TOKEN:
            _begin_text(memory, cursor)
            continue
        if memory[cursor + LOOKED_AT] != memory[cursor + MATCH]:
            _look_at(memory, cursor, token_ids[i])
        if not _insert_token(memory, cursor, token_ids[i]):
            return i
    return len(token_ids)


@numba.njit(cache=True, nogil=True)
def _look_at(memory: Memory, cursor: int, token: int) -> None:
    """Bring the aligned context and the last tokens up to a token, just before it is inserted or followed."""
    if not memory[cursor + DRAFTS]:
        return
    match = memory[cursor + MATCH]
    aligned = Alignment(memory[cursor + ALIGNED_STATE], memory[cursor + ALIGNED_MATCH], memory[cursor + ALIGNED_RUN])
    aligned = align(memory, resolve(memory, cursor), match, aligned, token)
    memory[cursor + ALIGNED_STATE] = aligned.state
    memory[cursor + ALIGNED_MATCH] = aligned.match
    memory[cursor + ALIGNED_RUN] = aligned.run
    memory[cursor + BEFORE_LAST] = memory[cursor + LAST]
    memory[cursor + LAST] = token
    memory[cursor + LOOKED_AT] = match


@numba.njit(cache=True, nogil=True)
def _insert_token(memory: Memory, cursor: int, token: int) -> bool:
    """Insert the next token of a sample; False if there is no room: then call again with more."""
    last = memory[cursor + STATE]
    length = memory[last + LENGTH] + 1
    state = memory[cursor + NEW_STATE]
    if state == NONE:
        edge = find_edge(memory, last, token)
        if edge != NONE:  # another sample went on from the same text
            state = _state_of(memory, last, token, memory[edge + 1])
            if state == NONE:
                return False
            _arrive(memory, cursor, state)
            return True
        state = new_state(memory, length)
        if state == NONE:
            return False
        memory[cursor + NEW_STATE] = state
        memory[cursor + NEXT_PARENT] = last
    parent = memory[cursor + NEXT_PARENT]
    edge = NONE
    while parent != NONE:
        edge = find_edge(memory, parent, token)
        if edge != NONE:
            break
        if not add_edge(memory, parent, token, state):
            memory[cursor + NEXT_PARENT] = parent
            return False
        parent = memory[parent + LINK]
    if parent != NONE:
        link = _state_of(memory, parent, token, memory[edge + 1])
        if link == NONE:
            memory[cursor + NEXT_PARENT] = parent
            return False
        memory[state + LINK] = link
    memory[cursor + NEW_STATE] = NONE
    _arrive(memory, cursor, state)
    return True


@numba.njit(cache=True, nogil=True)
def _state_of(memory: Memory, parent: int, token: int, target: int) -> int:
    """State whose longest string is that of `parent` and the token; `NONE` if there is no room.

    It is the target of the edge, unless that has longer strings: then they part, and a clone takes the shorter ones.
    """
    length = memory[parent + LENGTH] + 1
    if memory[target + LENGTH] == length:
        return target
    clone = clone_state(memory, target, length)
    if clone == NONE:
        return NONE
    memory[target + LINK] = clone
    while parent != NONE:
        edge = find_edge(memory, parent, token)
        if memory[edge + 1] != target:
            break
        memory[edge + 1] = clone
        parent = memory[parent + LINK]
    return clone


@numba.njit(cache=True, nogil=True)
def _arrive(memory: Memory, cursor: int, state: int) -> None:
    """A sample's token has been inserted: `state` is that of its whole text."""
    memory[cursor + STATE] = state
    memory[cursor + MATCH] = memory[state + LENGTH]
    memory[NUM_TOKENS] += 1
    count_occurrence(memory, state)


@numba.njit(cache=True, nogil=True)
def _follow_token(memory: Memory, cursor: int, token: int) -> None:
    """Move a following cursor to the longest suffix of its match and the token that occurs."""
    state = resolve(memory, cursor)
    match = memory[cursor + MATCH]
    edge = find_edge(memory, state, token)
    while edge == NONE and state != ROOT:
        state = memory[state + LINK]
        match = memory[state + LENGTH]
        edge = find_edge(memory, state, token)
    memory[cursor + STATE] = ROOT if edge == NONE else memory[edge + 1]
    memory[cursor + MATCH] = 0 if edge == NONE else match + 1


class Advance(NamedTuple):
    """The rows of a call of `extend_batch`."""

    rows: Places
    """[B], the rows, those of a trie together."""
    starts: Places
    """[num_tries + 1], where in `rows` those of each trie begin."""
    addresses: Places
    """[B], of the memory of each row's trie."""
    sizes: Places
    """[B], of that memory."""
    cursors: Places
    """[B]."""
    token_ids: Memory
    """Tokens of all rows, end to end."""
    offsets: Places
    """[B + 1], where those of each row begin."""
    progress: Places
    """[B], number of tokens that are in; brought forward, and less than the row's where there is no room."""


@numba.njit(cache=True, nogil=True)
def _advance_group(group: int, batch: Advance) -> None:
    """Advance the cursors of one trie, in the order of `rows`, as long as there is room."""
    first = batch.rows[batch.starts[group]]
    memory = open_memory(batch.addresses[first], batch.sizes[first])
    for i in range(batch.starts[group], batch.starts[group + 1]):
        row = batch.rows[i]
        tokens = batch.token_ids[batch.offsets[row] : batch.offsets[row + 1]]
        batch.progress[row] = advance(memory, batch.cursors[row], tokens, batch.progress[row])
        if batch.progress[row] < len(tokens):
            break


@numba.njit(cache=True, nogil=True)
def advance_groups(batch: Advance) -> None:
    """Advance the cursors of several tries."""
    for group in range(len(batch.starts) - 1):
        _advance_group(group, batch)


@numba.njit(parallel=True, cache=True, nogil=True)
def advance_groups_in_parallel(batch: Advance) -> None:
    """Do as `advance_groups`, each trie in one thread."""
    for group in numba.prange(len(batch.starts) - 1):
        _advance_group(group, batch)


@numba.njit(cache=True, nogil=True)
def find_state(memory: Memory, token_ids: Memory) -> int:
    """State of a string, or `NONE` where it does not occur; its count is exact afterwards."""
    state = ROOT
    for token in token_ids:
        edge = find_edge(memory, state, token)
        if edge == NONE:
            return NONE
        state = memory[edge + 1]
    count_pending(memory)
    return state
