"""Insertion into token tries, matching, and exact counts, on the arrays of `trie_memory`.

The trie of all suffixes is stored as a generalised suffix automaton (Blumer et al., 1985; Mohri, Moreno and Weinstein,
"General suffix automaton construction algorithm and space bounds", 2009). A state stands for the strings that end at
the same positions of the inserted text; they are suffixes of its longest string, and its suffix link leads to the
state of the next shorter one.

Counting. One more occurrence of a state is one more of all states along its suffix links. On "0 0 0 ..." that chain
is as long as the text, and walking it for each token would take quadratic time. So the walk stops after `MAX_WALK`
states and leaves the rest pending. Pending occurrences are added up later, from long states to short ones, merging
where chains meet: one walk for all of them. A count is exact when nothing is pending at states as long as its own.
"""

from typing import NamedTuple

import numba

from srtrl.drafters.trie_memory import (
    BLOCK,
    COUNT,
    DEGREE,
    EMPTY,
    FREE_CURSORS,
    LENGTH,
    LINK,
    LONGEST_PENDING,
    MAX_PENDING,
    NONE,
    NUM_PENDING,
    NUM_TOKENS,
    PENDING,
    RECORD_CLASS,
    ROOT,
    START_STATE,
    Memory,
    Places,
    add_edge,
    allocate,
    clone_state,
    edges_end,
    find_edge,
    new_state,
    open_memory,
)

MAX_WALK = 32
"""States along a chain that are counted at once."""

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

STOPPED, INSERTING, FOLLOWING = 0, 1, 2


@numba.njit(cache=True, nogil=True)
def new_cursor(memory: Memory, kind: int) -> int:
    """Offset of a new cursor behind the START token, or `NONE` if there is no room."""
    cursor = memory[FREE_CURSORS]
    if cursor != NONE:
        memory[FREE_CURSORS] = memory[cursor]
    else:
        cursor = allocate(memory, RECORD_CLASS)
        if cursor == NONE:
            return NONE
    memory[cursor + STATE] = START_STATE
    memory[cursor + MATCH] = 1
    memory[cursor + KIND] = kind
    memory[cursor + NEW_STATE] = NONE
    if kind == INSERTING:
        memory[START_STATE + COUNT] += 1
    return int(cursor)


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
    while state != ROOT and memory[memory[state + LINK] + LENGTH] >= match:
        state = memory[state + LINK]
    memory[cursor + STATE] = state
    return int(state)


@numba.njit(cache=True, nogil=True)
def advance(memory: Memory, cursor: int, token_ids: Memory, begin: int) -> int:
    """Insert or follow `token_ids` from index `begin` on; returns the index of the first for which there is no room."""
    if memory[cursor + KIND] == FOLLOWING:
        for i in range(begin, len(token_ids)):
            _follow_token(memory, cursor, token_ids[i])
        return len(token_ids)
    for i in range(begin, len(token_ids)):
        if not _insert_token(memory, cursor, token_ids[i]):
            return i
    return len(token_ids)


@numba.njit(cache=True, nogil=True)
def count_pending(memory: Memory) -> None:
    """Add all pending occurrences along their chains, those at longer states first."""
    num = memory[NUM_PENDING]
    for i in range(num // 2 - 1, -1, -1):
        _sift_down(memory, i, num)
    while num > 0:
        state = memory[PENDING]
        occurrences = 0
        while num > 0 and memory[PENDING] == state:  # chains that meet here
            occurrences += memory[PENDING + 1]
            num -= 1
            memory[PENDING] = memory[PENDING + 2 * num]
            memory[PENDING + 1] = memory[PENDING + 2 * num + 1]
            _sift_down(memory, 0, num)
        next_length = memory[memory[PENDING] + LENGTH] if num > 0 else 0
        memory[state + COUNT] += occurrences
        state = memory[state + LINK]
        while state != ROOT and memory[state + LENGTH] > next_length:
            memory[state + COUNT] += occurrences
            state = memory[state + LINK]
        if state != ROOT:
            _sift_up(memory, num, state, occurrences)
            num += 1
    memory[NUM_PENDING] = 0
    memory[LONGEST_PENDING] = 0


@numba.njit(cache=True, nogil=True)
def num_continued(memory: Memory, state: int) -> int:
    """Occurrences of the state's strings that go on: the sum of its targets' counts."""
    if memory[LONGEST_PENDING] > memory[state + LENGTH]:  # the targets are longer than the state
        count_pending(memory)
    total = 0
    for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
        if memory[edge] != EMPTY:
            total += memory[memory[edge + 1] + COUNT]
    return total


@numba.njit(cache=True, nogil=True)
def longest_continued(memory: Memory, state: int) -> int:
    """State of the longest suffix that something follows; `ROOT` if there is none."""
    while state != ROOT and memory[state + DEGREE] == 0:
        state = memory[state + LINK]
    return state


@numba.njit(cache=True, nogil=True)
def _later(memory: Memory, state: int, other: int) -> bool:
    """Whether pending occurrences at `state` wait for those at `other`."""
    length, other_length = memory[state + LENGTH], memory[other + LENGTH]
    return length < other_length or (length == other_length and state < other)


@numba.njit(cache=True, nogil=True)
def _sift_down(memory: Memory, place: int, num: int) -> None:
    """Restore the heap of the `num` pending pairs below `place`."""
    state, occurrences = memory[PENDING + 2 * place], memory[PENDING + 2 * place + 1]
    while 2 * place + 1 < num:
        child = 2 * place + 1
        if child + 1 < num and _later(memory, memory[PENDING + 2 * child], memory[PENDING + 2 * child + 2]):
            child += 1
        if not _later(memory, state, memory[PENDING + 2 * child]):
            break
        memory[PENDING + 2 * place] = memory[PENDING + 2 * child]
        memory[PENDING + 2 * place + 1] = memory[PENDING + 2 * child + 1]
        place = child
    memory[PENDING + 2 * place] = state
    memory[PENDING + 2 * place + 1] = occurrences


@numba.njit(cache=True, nogil=True)
def _sift_up(memory: Memory, place: int, state: int, occurrences: int) -> None:
    """Put a pair into the heap whose end is `place`."""
    while place > 0 and _later(memory, memory[PENDING + (place - 1) // 2 * 2], state):
        above = (place - 1) // 2
        memory[PENDING + 2 * place] = memory[PENDING + 2 * above]
        memory[PENDING + 2 * place + 1] = memory[PENDING + 2 * above + 1]
        place = above
    memory[PENDING + 2 * place] = state
    memory[PENDING + 2 * place + 1] = occurrences


@numba.njit(cache=True, nogil=True)
def _count_occurrence(memory: Memory, state: int) -> None:
    """One more occurrence of the strings of a state."""
    for _ in range(MAX_WALK):
        if state == ROOT:
            return
        memory[state + COUNT] += 1
        state = memory[state + LINK]
    if state != ROOT:
        if memory[NUM_PENDING] == MAX_PENDING:
            count_pending(memory)
        place = PENDING + 2 * memory[NUM_PENDING]
        memory[place] = state
        memory[place + 1] = 1
        memory[NUM_PENDING] += 1
        memory[LONGEST_PENDING] = max(memory[LONGEST_PENDING], memory[state + LENGTH])


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
    _count_occurrence(memory, state)


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
