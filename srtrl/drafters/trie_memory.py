"""The memory of a token trie: one flat int32 array that holds its states, its edges and its cursors.

All places ("offsets") are indices into that array. It begins with a header, then come records (8 integers of a state,
16 of a cursor) and blocks of edges, in the order in which they were needed; blocks that were outgrown are used again by
blocks of their size. Nothing here grows the array: a function that finds no room says so, and its caller's caller in
Python makes the array larger and calls again.

Small functions that a draft calls dozens of times for each of its nodes are inlined (`forceinline`): an array is seven
arguments of a compiled call, and looking through a state's few edges takes less time than handing them over.

Edges of a state are (token, target) pairs in a block of 2**size_class pairs. One edge lives in the state's record
itself; up to 8 lie in the order of arrival; more are an open-addressing hash table. So most look-ups touch the state's
cache line alone, and all edges of a state lie side by side for those who read them all.
"""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic
from numba.np.numpy_support import carray

Memory = npt.NDArray[np.int32]
Places = npt.NDArray[np.int64]

NONE = -1
"""No state, no edge, no room."""
START_TOKEN = -1
"""What each sample begins with: a token outside the vocabulary, so that the beginning is a context like any other."""
EMPTY = -2
"""Token of a free pair in a hash table of edges."""

# Header.
USED = 0
"""Integers in use; those behind are free."""
NUM_STATES = 1
NUM_TOKENS = 2
NUM_PENDING = 3
"""Occurrences that wait to be counted along their chains; see `trie_kernel.count_pending`."""
LONGEST_PENDING = 4
"""Length of the longest state at which one waits; 0 if none does."""
LARGEST_CLASS = 5
"""Largest size class of a state's edges, the root apart."""
FREE_CURSORS = 6
FREE_BLOCKS = 8
"""For each size class, the first of the blocks that were outgrown; each holds the offset of the next, or `NONE`."""
NUM_CLASSES = 28
PENDING = FREE_BLOCKS + NUM_CLASSES
"""Pairs (state, number of occurrences)."""
MAX_PENDING = 256

RECORD = 8
RECORD_CLASS = 2
"""Size class of a state's record: 4 pairs."""
CURSOR_CLASS = 3
"""Size class of a cursor's record: 8 pairs."""
ROOT = PENDING + 2 * MAX_PENDING
START_STATE = ROOT + RECORD
"""State of the context "beginning of a response"."""
FIRST_FREE = START_STATE + RECORD
INITIAL_SIZE = 1024

# Record of a state.
LENGTH = 0
"""Length of its longest string."""
LINK = 1
"""State of its longest proper suffix that occurs elsewhere too: the suffix link."""
COUNT = 2
"""Occurrences of its strings (without those that are pending)."""
DEGREE = 3
"""Number of edges: of distinct tokens that follow its strings."""
BLOCK = 4
SIZE_CLASS = 5
INLINE = 6
"""Place of the only pair while there is but one."""

LINEAR_CLASS = 3
"""Blocks up to this class are searched from the front; larger ones are hash tables."""


@numba.njit(cache=True, nogil=True)
def format_memory(memory: Memory) -> None:
    """Make an empty trie: the root, and the state behind the START token."""
    memory[:FIRST_FREE] = 0
    memory[FREE_BLOCKS : FREE_BLOCKS + NUM_CLASSES] = NONE
    memory[FREE_CURSORS] = NONE
    memory[USED] = FIRST_FREE
    memory[NUM_STATES] = 2
    for state in (ROOT, START_STATE):
        memory[state + BLOCK] = state + INLINE
    memory[ROOT + LINK] = NONE
    memory[START_STATE + LINK] = ROOT
    memory[START_STATE + LENGTH] = 1
    add_edge(memory, ROOT, START_TOKEN, START_STATE)


@numba.njit(cache=True, nogil=True)
def allocate(memory: Memory, size_class: int) -> int:
    """Offset of a block of 2**size_class pairs, or `NONE` if there is no room."""
    block = memory[FREE_BLOCKS + size_class]
    if block != NONE:
        memory[FREE_BLOCKS + size_class] = memory[block]
        return int(block)
    block = memory[USED]
    end = block + (2 << size_class)
    if end > len(memory):
        return NONE
    memory[USED] = end
    return int(block)


@numba.njit(cache=True, nogil=True)
def release(memory: Memory, block: int, size_class: int) -> None:
    """Give a block back."""
    memory[block] = memory[FREE_BLOCKS + size_class]
    memory[FREE_BLOCKS + size_class] = block


@numba.njit(cache=True, nogil=True)
def new_state(memory: Memory, length: int) -> int:
    """Offset of a new state without edges, not linked yet; `NONE` if there is no room."""
    state = allocate(memory, RECORD_CLASS)
    if state != NONE:
        memory[NUM_STATES] += 1
        memory[state + LENGTH] = length
        memory[state + LINK] = ROOT
        memory[state + COUNT] = 0
        memory[state + DEGREE] = 0
        memory[state + BLOCK] = state + INLINE
        memory[state + SIZE_CLASS] = 0
    return state


@numba.njit(cache=True, nogil=True)
def home_slot(token: int, size_class: int) -> int:
    """Slot of a hash table where the search for a token begins: the high bits of a multiplicative hash."""
    return ((token * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - size_class)


@numba.njit(cache=True, nogil=True, forceinline=True)
def find_edge(memory: Memory, state: int, token: int) -> int:
    """Offset of the state's pair for a token, or `NONE`; the target lies behind it."""
    block = memory[state + BLOCK]
    size_class = memory[state + SIZE_CLASS]
    if size_class <= LINEAR_CLASS:
        for edge in range(block, block + 2 * memory[state + DEGREE], 2):
            if memory[edge] == token:
                return edge
        return NONE
    mask = (1 << size_class) - 1
    slot = home_slot(token, size_class)
    while True:
        edge = block + 2 * slot
        if memory[edge] == token:
            return int(edge)
        if memory[edge] == EMPTY:
            return NONE
        slot = (slot + 1) & mask


@numba.njit(cache=True, nogil=True)
def add_edge(memory: Memory, state: int, token: int, target: int) -> bool:
    """Add an edge that is not there yet; False (and nothing changed) if there is no room."""
    degree = memory[state + DEGREE]
    size_class = memory[state + SIZE_CLASS]
    limit = 1 << size_class if size_class <= LINEAR_CLASS else 3 << (size_class - 2)
    if degree == limit and not _enlarge(memory, state):
        return False
    memory[state + DEGREE] = degree + 1
    _place(memory, memory[state + BLOCK], memory[state + SIZE_CLASS], degree, token, target)
    return True


@numba.njit(cache=True, nogil=True, forceinline=True)
def edges_end(memory: Memory, state: int) -> int:
    """End of the pairs of a state, which begin at its `BLOCK`; those whose token is `EMPTY` are none."""
    size_class = memory[state + SIZE_CLASS]
    pairs = memory[state + DEGREE] if size_class <= LINEAR_CLASS else 1 << size_class
    return int(memory[state + BLOCK] + 2 * pairs)


@numba.njit(cache=True, nogil=True)
def clone_state(memory: Memory, state: int, length: int) -> int:
    """Offset of a copy of a state with another length, its edges copied too; `NONE` if there is no room."""
    clone = allocate(memory, RECORD_CLASS)
    if clone == NONE:
        return NONE
    memory[clone : clone + RECORD] = memory[state : state + RECORD]
    memory[clone + LENGTH] = length
    size_class = memory[state + SIZE_CLASS]
    if size_class == 0:
        memory[clone + BLOCK] = clone + INLINE
    else:
        block = allocate(memory, size_class)
        if block == NONE:
            release(memory, clone, RECORD_CLASS)
            return NONE
        copied = memory[state + BLOCK]
        for i in range(2 << size_class):
            memory[block + i] = memory[copied + i]
        memory[clone + BLOCK] = block
    memory[NUM_STATES] += 1
    return int(clone)


@numba.njit(cache=True, nogil=True)
def _enlarge(memory: Memory, state: int) -> bool:
    """Move a state's edges to a block of twice the size; False (and nothing changed) if there is no room."""
    size_class = memory[state + SIZE_CLASS] + 1
    block = allocate(memory, size_class)
    if block == NONE:
        return False
    if size_class > LINEAR_CLASS:
        for i in range(block, block + (2 << size_class), 2):
            memory[i] = EMPTY
    old = memory[state + BLOCK]
    place = 0
    for edge in range(old, edges_end(memory, state), 2):
        if memory[edge] != EMPTY:
            _place(memory, block, size_class, place, memory[edge], memory[edge + 1])
            place += 1
    if size_class > 1:
        release(memory, old, size_class - 1)
    memory[state + BLOCK] = block
    memory[state + SIZE_CLASS] = size_class
    if state != ROOT:
        memory[LARGEST_CLASS] = max(memory[LARGEST_CLASS], size_class)
    return True


@numba.njit(cache=True, nogil=True)
def _place(memory: Memory, block: int, size_class: int, place: int, token: int, target: int) -> None:
    """Write a pair into a block: at the given place, or where the hash table has one free."""
    if size_class > LINEAR_CLASS:
        mask = (1 << size_class) - 1
        place = home_slot(token, size_class)
        while memory[block + 2 * place] != EMPTY:
            place = (place + 1) & mask
    memory[block + 2 * place] = token
    memory[block + 2 * place + 1] = target


def _address_to_pointer(typing_context: Any, address: Any) -> Any:
    """Turn an int64 address into a pointer to int32."""
    types: Any = numba.types
    signature = types.CPointer(types.int32)(address)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


_pointer: Any = intrinsic(_address_to_pointer)


@numba.njit(cache=True, nogil=True)
def open_memory(address: int, size: int) -> Memory:
    """View of the `size` int32 at an address; the owner of the array must outlive it."""
    return carray(_pointer(address), (size,), np.int32)
