"""The trie of all suffixes of some texts, as a generalised suffix automaton in one flat int32 array.

A state stands for the strings that end at the same positions of the inserted texts; they are suffixes of its longest
string, and its suffix link leads to the state of the next shorter one (Blumer et al., 1985; Mohri, Moreno and
Weinstein, "General suffix automaton construction algorithm and space bounds", 2009). Each edge counts how often its
token followed the strings of its state, so that a draft reads one state and never its successors.

The array begins with a header; records of states and blocks of edges follow in the order in which they were needed, and
are known by their index. An edge is a triple (token, target, count). The only edge of a state lies in its record; up to
8 lie in the order of arrival in a block; more are an open-addressing hash table. Kernels get addresses of arrays, not
arrays: a decode step has sequences of many tries. They cannot enlarge an array: where there is no room they stop, the
array is doubled, and they are called again.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
from numba.extending import intrinsic
from numba.np.numpy_support import carray

from srtrl.drafters.distributions import SIZE, UNKNOWN
from srtrl.model.kernels import inlined, inner, makes_arrays

Int32Array = npt.NDArray[np.int32]
Int64Array = npt.NDArray[np.int64]

NONE = -1
"""No state, no edge."""
START_TOKEN = -1
"""The first token of each text: a token outside the vocabulary, so that the beginning is a context like any other."""
EMPTY = -2
"""Token of a free entry in a hash table of edges."""

# Header.
USED = 0
"""Integers in use; all later ones are free."""
NUM_STATES = 1
NUM_TOKENS = 2

# Record of a state.
LENGTH = 0
"""Length of its longest string."""
LINK = 1
"""The suffix link: state of its longest proper suffix that ends elsewhere too."""
TOTAL = 2
"""Number of times that a token followed its strings: the sum of its edges' counts."""
EDGES = 3
"""Number of edges times 32, plus the size class of their block."""
BLOCK = 4
"""Index of its first edge."""
INLINE = 5
"""Place of the only edge while there is but one."""
NEWEST = 8
"""Index of the policy's distribution after the newest occurrence of its strings of which it is known; 0: of none."""
RECORD = 9
CLASS_BITS = 5
CLASS_MASK = (1 << CLASS_BITS) - 1

TARGET, COUNT, EDGE = 1, 2, 3
"""Of an edge: index of its target and of its count, and its size."""
LINEAR_CLASS = 3
"""Blocks up to this size class are searched from the front; larger ones are hash tables."""

ROOT = 3
"""State of the empty string."""
INITIAL_SIZE = 1024
INTEGERS_PER_TOKEN = 10
"""Room that a trie begins with for each expected token; less than new text takes, for rollouts repeat each other."""
MAX_COUNTED = 256
"""Suffixes of a position that are counted, the longest first. Fewer than a thousandth of all positions have more; on
"0 0 0 ..." counting all of them would take quadratic time."""

# Fields of a cursor.
STATE = 0
"""State of the longest string that matches; of an inserting cursor its whole text."""
MATCH = 1
"""Length of that string, START included."""
LAST, BEFORE_LAST = 2, 3
"""The last two tokens."""
INSERTS = 4
"""Whether its tokens enter the trie; if not, they are only followed there."""
NUM_PASSED = 5
"""Tokens of its text, START included: of a match of this length nothing is missing."""
CURSOR = 6

WORK_PER_TOKEN = 20
"""Cost of inserting a token, in the unit of `use_kernel_threads`: about 0.1 microseconds."""


def _address_to_pointer(typing_context: Any, address: Any) -> Any:
    """Turn an int64 address into a pointer to int32."""
    types: Any = numba.types
    signature = types.CPointer(types.int32)(address)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


_pointer: Any = intrinsic(_address_to_pointer)


@makes_arrays
def open_memory(address: int, size: int) -> Int32Array:
    """View of the `size` int32 at an address; the owner of the array must outlive it."""
    return carray(_pointer(address), (size,), np.int32)


# --- Edges ------------------------------------------------------------------------------------------------------------


@inlined
def num_edges(memory: Int32Array, state: int) -> int:
    """Number of distinct tokens that follow a state's strings."""
    return int(memory[state + EDGES] >> CLASS_BITS)


@numba.njit(cache=True, nogil=True, forceinline=True)
def edges_end(memory: Int32Array, state: int) -> int:
    """End of a state's edges, which begin at its `BLOCK`; those whose token is `EMPTY` are none."""
    size_class = memory[state + EDGES] & CLASS_MASK
    entries = memory[state + EDGES] >> CLASS_BITS if size_class <= LINEAR_CLASS else 1 << size_class
    return int(memory[state + BLOCK] + EDGE * entries)


@inlined
def _home(token: int, size_class: int) -> int:
    """Entry of a hash table where the search for a token begins: the high bits of a multiplicative hash."""
    return ((token * 0x9E3779B1) & 0xFFFFFFFF) >> (32 - size_class)


@numba.njit(cache=True, nogil=True, forceinline=True)
def find_edge(memory: Int32Array, state: int, token: int) -> int:
    """Edge of a state for a token, or `NONE`."""
    edges = memory[state + EDGES]
    block = memory[state + BLOCK]
    size_class = edges & CLASS_MASK
    if size_class <= LINEAR_CLASS:
        for edge in range(block, block + EDGE * (edges >> CLASS_BITS), EDGE):
            if memory[edge] == token:
                return int(edge)
        return NONE
    mask = (1 << size_class) - 1
    entry = _home(token, size_class)
    while True:
        edge = block + EDGE * entry
        if memory[edge] == token:
            return int(edge)
        if memory[edge] == EMPTY:
            return NONE
        entry = (entry + 1) & mask


@inlined
def _is_full(memory: Int32Array, state: int) -> bool:
    """Whether one more edge needs a larger block; hash tables are filled to three quarters."""
    size_class = memory[state + EDGES] & CLASS_MASK
    limit = 1 << size_class if size_class <= LINEAR_CLASS else 3 << (size_class - 2)
    return bool(num_edges(memory, state) == limit)


@inner
def _allocate(memory: Int32Array, size_class: int) -> int:
    """Index of a block for 2**size_class edges; there is room."""
    block = memory[USED]
    memory[USED] += EDGE << size_class
    return int(block)


@inner
def _put_edge(memory: Int32Array, state: int, token: int, target: int, count: int) -> None:
    """Write an edge where it belongs in the state's block, which has a free entry, and increase their number."""
    size_class = memory[state + EDGES] & CLASS_MASK
    entry = num_edges(memory, state)
    block = memory[state + BLOCK]
    if size_class > LINEAR_CLASS:
        mask = (1 << size_class) - 1
        entry = _home(token, size_class)
        while memory[block + EDGE * entry] != EMPTY:
            entry = (entry + 1) & mask
    edge = block + EDGE * entry
    memory[edge] = token
    memory[edge + TARGET] = target
    memory[edge + COUNT] = count
    memory[state + EDGES] += 1 << CLASS_BITS


@inner
def _add_edge(memory: Int32Array, state: int, token: int, target: int) -> None:
    """Add an edge that is not there yet, followed once; a full block is replaced by one of twice the size."""
    if _is_full(memory, state):
        old, end = memory[state + BLOCK], edges_end(memory, state)
        size_class = (memory[state + EDGES] & CLASS_MASK) + 1
        block = _allocate(memory, size_class)
        if size_class > LINEAR_CLASS:
            for edge in range(block, block + (EDGE << size_class), EDGE):
                memory[edge] = EMPTY
        memory[state + BLOCK] = block
        memory[state + EDGES] = size_class
        for edge in range(old, end, EDGE):
            if memory[edge] != EMPTY:
                _put_edge(memory, state, memory[edge], memory[edge + TARGET], memory[edge + COUNT])
    _put_edge(memory, state, token, target, 1)
    memory[state + TOTAL] += 1


# --- Insertion --------------------------------------------------------------------------------------------------------


@inner
def _new_state(memory: Int32Array, length: int) -> int:
    state = memory[USED]
    memory[USED] += RECORD
    memory[NUM_STATES] += 1
    memory[state + LENGTH] = length
    memory[state + LINK] = NONE
    memory[state + TOTAL] = 0
    memory[state + EDGES] = 0
    memory[state + BLOCK] = state + INLINE
    memory[state + NEWEST] = 0
    return int(state)


@numba.njit(cache=True, nogil=True)
def format_memory(memory: Int32Array) -> None:
    """Make an empty trie."""
    memory[:ROOT] = 0
    memory[USED] = ROOT
    _new_state(memory, 0)


@inner
def _state_after(memory: Int32Array, parent: int, token: int, edge: int) -> int:
    """State whose longest string is that of `parent` and the token, whose edge is given.

    It is the target of the edge, unless that has longer strings: then they part, and a clone takes the shorter ones.
    """
    target = memory[edge + TARGET]
    length = memory[parent + LENGTH] + 1
    if memory[target + LENGTH] == length:
        return int(target)
    clone = _new_state(memory, length)
    memory[clone + LINK] = memory[target + LINK]
    memory[clone + TOTAL] = memory[target + TOTAL]
    memory[clone + NEWEST] = memory[target + NEWEST]
    memory[clone + EDGES] = memory[target + EDGES]
    size_class = memory[target + EDGES] & CLASS_MASK
    if size_class > 0:
        memory[clone + BLOCK] = _allocate(memory, size_class)
    source, block = memory[target + BLOCK], memory[clone + BLOCK]
    for i in range(EDGE << size_class):
        memory[block + i] = memory[source + i]
    memory[target + LINK] = clone
    while parent != NONE:
        edge = find_edge(memory, parent, token)
        if memory[edge + TARGET] != target:
            break
        memory[edge + TARGET] = clone
        parent = memory[parent + LINK]
    return clone


@inner
def _find_continued(memory: Int32Array, state: int, token: int) -> tuple[int, int, int, int]:
    """Search for earlier occurrences of a token that is to follow the text of `state`, before its insertion.

    Returns:
        The number of the text's suffixes (states) that the token never followed, the next suffix, its edge for the
        token (both `NONE` where the token is new), and an upper bound of the integers that the insertion takes.
    """
    num_new = 0
    needed = 2 * RECORD
    edge = find_edge(memory, state, token)
    while edge == NONE:
        num_new += 1
        if _is_full(memory, state):
            needed += EDGE << ((memory[state + EDGES] & CLASS_MASK) + 1)
        state = memory[state + LINK]
        if state == NONE:
            return num_new, NONE, NONE, needed
        edge = find_edge(memory, state, token)
    # The target may have to be cloned, after it has got one more edge.
    return num_new, int(state), edge, needed + (EDGE << ((memory[memory[edge + TARGET] + EDGES] & CLASS_MASK) + 1))


@inner
def _put_distribution(memory: Int32Array, numbers: Int32Array) -> int:
    """Write a distribution, there being room; returns its index."""
    start = memory[USED]
    memory[USED] += SIZE
    for i in range(SIZE):
        memory[start + i] = numbers[i]
    return int(start)


@inner
def _insert_token(
    memory: Int32Array, last: int, token: int, num_new: int, parent: int, edge: int, distribution: int
) -> int:
    """Insert a token after the text of the state `last`, there being room; returns the state of the longer text.

    `distribution`: the index of what it was drawn from, or 0. The other arguments are those that `_find_continued`
    returns.
    """
    state = NONE
    if num_new > 0:
        state = _new_state(memory, memory[last + LENGTH] + 1)
        for _ in range(num_new):
            _add_edge(memory, last, token, state)
            if distribution > 0:
                memory[last + NEWEST] = distribution
            last = memory[last + LINK]
    longest_known = ROOT if parent == NONE else _state_after(memory, parent, token, edge)
    if state == NONE:  # another text continued in the same way
        state = longest_known
    else:
        memory[state + LINK] = longest_known
    for _ in range(MAX_COUNTED):
        if parent == NONE:
            break
        memory[find_edge(memory, parent, token) + COUNT] += 1
        memory[parent + TOTAL] += 1
        if distribution > 0:
            memory[parent + NEWEST] = distribution
        parent = memory[parent + LINK]
    memory[NUM_TOKENS] += token != START_TOKEN
    return int(state)


# --- Cursors ----------------------------------------------------------------------------------------------------------


@numba.njit(cache=True, nogil=True, forceinline=True)
def locate(memory: Int32Array, state: int, match: int) -> int:
    """State of the string of length `match` that was in `state`: it may have moved to a clone since."""
    while state != ROOT and memory[memory[state + LINK] + LENGTH] >= match:
        state = memory[state + LINK]
    return int(state)


@inlined
def follow(memory: Int32Array, state: int, match: int, token: int) -> tuple[int, int]:
    """The longest string that ends with a token, after a string: its state and length."""
    edge = find_edge(memory, state, token)
    while edge == NONE and state != ROOT:
        state = int(memory[state + LINK])
        match = int(memory[state + LENGTH])
        edge = find_edge(memory, state, token)
    return (ROOT, 0) if edge == NONE else (int(memory[edge + TARGET]), match + 1)


@inner
def _advance(
    memory: Int32Array, cursor: Int32Array, token_ids: Int32Array, distributions: Int32Array, begin: int
) -> int:
    """Insert or follow `token_ids` from index `begin` on; returns the index of the first for which there is no room.

    `START_TOKEN` begins a new text. `distributions`: what they were drawn from, [tokens, SIZE]; or [0, SIZE].
    """
    state, match = int(cursor[STATE]), int(cursor[MATCH])
    done = begin
    while done < len(token_ids):
        token = token_ids[done]
        if token == START_TOKEN:
            state, match, cursor[LAST], cursor[NUM_PASSED] = ROOT, 0, START_TOKEN, 0
        if cursor[INSERTS]:
            num_new, parent, edge, needed = _find_continued(memory, state, token)
            if memory[USED] + needed + SIZE > len(memory):
                break
            distribution = 0
            if len(distributions) > 0 and distributions[done, 0] != UNKNOWN:
                distribution = _put_distribution(memory, distributions[done])
            state = _insert_token(memory, state, token, num_new, parent, edge, distribution)
            match += 1
        else:
            state, match = follow(memory, locate(memory, state, match), match, token)
        cursor[BEFORE_LAST], cursor[LAST] = cursor[LAST], token
        cursor[NUM_PASSED] += 1
        done += 1
    cursor[STATE], cursor[MATCH] = state, match
    return done


class Cursors(NamedTuple):
    """A cursor for each slot."""

    addresses: Int64Array
    """[slots], of the memory of each slot's trie."""
    sizes: Int64Array
    """[slots], of that memory."""
    rows: Int32Array
    """[slots, CURSOR]."""


@numba.njit(parallel=True, cache=True, nogil=True)
def advance_rows(
    cursors: Cursors,
    slots: Int64Array,
    token_ids: Int32Array,
    offsets: Int64Array,
    distributions: Int32Array,
    progress: Int64Array,
    num_parts: int,
) -> None:
    """Advance the cursors of some slots as far as there is room: those of a trie in order, several tries in parallel.

    Args:
        cursors: Of all slots.
        slots: [B].
        token_ids: Tokens of all rows, end to end.
        offsets: [B + 1], where those of each row begin.
        distributions: What the tokens were drawn from, see `_advance`.
        progress: [B], number of tokens that are in; brought forward.
        num_parts: Tries are dealt to this number of threads by their address.
    """
    for part in numba.prange(num_parts):
        for row in range(len(slots)):
            address = cursors.addresses[slots[row]]
            if _home(address >> 12, 16) % num_parts == part:
                memory = open_memory(address, cursors.sizes[slots[row]])
                tokens = token_ids[offsets[row] : offsets[row + 1]]
                known = distributions[offsets[row] : offsets[row + 1]]
                progress[row] = _advance(memory, cursors.rows[slots[row]], tokens, known, progress[row])


@numba.njit(cache=True, nogil=True)
def read_distributions(memory: Int32Array, text: Int32Array, found: Int32Array) -> None:
    """Write [tokens, SIZE] what each token of a text may have been drawn from, by the newest text that began as this.

    The text begins with `START_TOKEN`, and so does each of its turns.
    """
    state = ROOT
    for i in range(len(text)):
        if text[i] == START_TOKEN:
            state = ROOT
        distribution = 0 if state in (ROOT, NONE) else memory[state + NEWEST]
        if distribution > 0:
            found[i] = memory[distribution : distribution + SIZE]
        if state != NONE:
            edge = find_edge(memory, state, text[i])
            state = NONE if edge == NONE else int(memory[edge + TARGET])
