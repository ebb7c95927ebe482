"""Exact counts of a token trie's states, on the arrays of `trie_memory`.

One more occurrence of a state is one more of all states along its suffix links. On "0 0 0 ..." that chain
is as long as the text, and walking it for each token would take quadratic time. So the walk stops after `MAX_WALK`
states and leaves the rest pending. Pending occurrences are added up later, from long states to short ones, merging
where chains meet: one walk for all of them. A count is exact when nothing is pending at states as long as its own.
"""

import numba

from srtrl.drafters.trie_memory import (
    BLOCK,
    COUNT,
    DEGREE,
    EMPTY,
    LENGTH,
    LINK,
    LONGEST_PENDING,
    MAX_PENDING,
    NONE,
    NUM_PENDING,
    PENDING,
    ROOT,
    Memory,
    edges_end,
)

MAX_WALK = 32
"""States along a chain that are counted at once."""


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


@numba.njit(cache=True, nogil=True, forceinline=True)
def settle(memory: Memory, state: int) -> None:
    """Make the counts of the state's targets exact, which are longer than the state."""
    if memory[LONGEST_PENDING] > memory[state + LENGTH]:
        count_pending(memory)


@numba.njit(cache=True, nogil=True, forceinline=True)
def num_continued(memory: Memory, state: int) -> int:
    """Occurrences of the state's strings that go on: the sum of its targets' counts."""
    settle(memory, state)
    total = 0
    for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
        if memory[edge] != EMPTY:
            total += memory[memory[edge + 1] + COUNT]
    return total


@numba.njit(cache=True, nogil=True, forceinline=True)
def top_edge(memory: Memory, state: int) -> int:
    """Pair of the most frequent continuation, of equals that with the smallest token; `NONE` if nothing follows."""
    settle(memory, state)
    best, best_count, best_token = NONE, 0, NONE
    for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
        token = memory[edge]
        if token == EMPTY:
            continue
        count = memory[memory[edge + 1] + COUNT]
        if count > best_count or (count == best_count and token < best_token):
            best, best_count, best_token = edge, count, token
    return best


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
def count_occurrence(memory: Memory, state: int) -> None:
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
