"""Draft trees from token tries, best first: a node's score is the estimated chance that it is accepted.

Rule `BLEND`: Witten-Bell back-off. A node's context and its suffixes, the longest first, each take the share
total / (total + distinct_weight x distinct) x match / (match + match_weight) of the probability mass that is left and
spread it over the tokens that followed them, by count; of a suffix only the occurrences count that are not the longer
context's. What the last two tokens, then the last one, are followed by in texts of other prompts (`shared_ngrams`)
counts as contexts of length 2 and 1. What can change no score by `NEGLIGIBLE` times `min_score` is left out.
"""

from heapq import heappop, heappush
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.shared_ngrams import ENTRIES, NO_TABLE, NO_TOKEN, TOTAL, WAYS, Table, find_context
from srtrl.drafters.suffix_automaton import (
    BEFORE_LAST,
    BLOCK,
    COUNT,
    EDGE,
    EMPTY,
    LAST,
    LENGTH,
    LINK,
    MATCH,
    NONE,
    ROOT,
    STATE,
    TARGET,
    Cursors,
    Int32Array,
    Int64Array,
    edges_end,
    find_edge,
    locate,
    num_edges,
    open_memory,
)
from srtrl.drafters.suffix_automaton import TOTAL as STATE_TOTAL
from srtrl.model.cpu_threads import use_kernel_threads

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

NEGLIGIBLE = 0.25
"""Share of `min_score`: in replays the nodes that a smaller one brought cost as much as they gave."""
SMALLEST_SCORE = 1e-6
MAX_CHILDREN = 64
"""Children of a node that are considered."""
WORK_PER_ROW = 5_000
"""Cost of a row's draft, in the unit of `use_kernel_threads`: about 3 microseconds."""


class Rule(NamedTuple):
    """The parameters by which counts become scores."""

    max_contexts: int
    """Maximum number of contexts that are blended for a node."""
    distinct_weight: float
    """Reduction of the trust in a context for each distinct token that followed it."""
    match_weight: float
    """Length of a match that is trusted by half."""


BLEND = Rule(max_contexts=4, distinct_weight=0.5, match_weight=2.0)


class Children(NamedTuple):
    """The tokens that may follow a node, at most `MAX_CHILDREN`."""

    token_ids: Int32Array
    counts: Int32Array
    """Occurrences in the last context."""
    states: Int32Array
    """State and match of the context that ends with the token."""
    matches: Int32Array
    weights: Float64Array
    """Probability."""


@numba.njit(cache=True, nogil=True, forceinline=True)
def _find_child(children: Children, num: int, token: int) -> int:
    """Index of the child with a token among the first `num`, else `num`."""
    i = 0
    while i < num and children.token_ids[i] != token:
        i += 1
    return i


@numba.njit(cache=True, nogil=True, forceinline=True)
def _blend_contexts(
    memory: Int32Array, state: int, match: int, rule: Rule, negligible: float, children: Children
) -> tuple[int, float]:
    """Share the probability mass among contexts and their children; returns the number of children and the mass left.

    What follows a context also follows its suffixes, where its occurrences are not to count again. A token that is new
    in a suffix is listed if it is not negligible by itself.
    """
    num, before, mass = 0, 0, 1.0
    for _ in range(rule.max_contexts):
        if state == ROOT or mass < negligible:
            break
        more, distinct = memory[state + STATE_TOTAL] - before, num_edges(memory, state)
        if more > 0:
            trust = more / (more + rule.distinct_weight * distinct) * (match / (match + rule.match_weight))
            factor = mass * trust / more
            for i in range(num):
                count = memory[find_edge(memory, state, children.token_ids[i]) + COUNT]
                children.weights[i] += factor * (count - children.counts[i])
                children.counts[i] = count
            num_known = num
            if distinct > num_known:
                for edge in range(memory[state + BLOCK], edges_end(memory, state), EDGE):
                    token, count = memory[edge], memory[edge + COUNT]
                    if token == EMPTY or factor * count < negligible or num == MAX_CHILDREN:
                        continue
                    if _find_child(children, num_known, token) == num_known:
                        children.token_ids[num], children.counts[num] = token, count
                        children.states[num], children.matches[num] = memory[edge + TARGET], match + 1
                        children.weights[num] = factor * count
                        num += 1
            mass *= 1.0 - trust
            before += more
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return num, mass


@numba.njit(cache=True, nogil=True, forceinline=True)
def _add_shared(
    memory: Int32Array,
    shared: Table,
    before_last: int,
    last: int,
    rule: Rule,
    mass: float,
    negligible: float,
    children: Children,
    num: int,
) -> int:
    """Spread `mass` over what the last two tokens, then the last one, were followed by in all prompts' texts."""
    for length in (2, 1):
        row = find_context(shared, before_last if length == 2 else NO_TOKEN, last)
        if row == NONE:
            continue
        total = shared[row, TOTAL]
        distinct = 0
        for way in range(WAYS):
            distinct += shared[row, ENTRIES + 2 * way + 1] > 0
        trust = total / (total + rule.distinct_weight * distinct) * (length / (length + rule.match_weight))
        for way in range(WAYS):
            token, count = shared[row, ENTRIES + 2 * way], shared[row, ENTRIES + 2 * way + 1]
            share = mass * trust * count / total
            if count == 0:
                continue
            i = _find_child(children, num, token)
            if i < num:
                children.weights[i] += share
            elif share >= negligible and num < MAX_CHILDREN:
                edge = find_edge(memory, ROOT, token)
                children.weights[num] = share
                children.token_ids[num] = token
                children.states[num] = ROOT if edge == NONE else memory[edge + TARGET]
                children.matches[num] = edge != NONE
                num += 1
        mass *= 1.0 - trust
    return num


@numba.njit(cache=True, nogil=True)
def _grow(
    memory: Int32Array,
    cursor: Int32Array,
    rule: Rule,
    min_score: float,
    shared: Table,
    token_ids: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
) -> int:
    """Fill a tree with what may follow a cursor's match, best first; returns its number of nodes."""
    children = Children(
        np.empty(MAX_CHILDREN, np.int32),
        np.empty(MAX_CHILDREN, np.int32),
        np.empty(MAX_CHILDREN, np.int32),
        np.empty(MAX_CHILDREN, np.int32),
        np.empty(MAX_CHILDREN, np.float64),
    )
    match = cursor[MATCH]
    state = locate(memory, cursor[STATE], match)
    before_last, last = cursor[BEFORE_LAST], cursor[LAST]
    score = 1.0
    frontier = [(-score, last, NONE, state, match)]  # Numba wants to know the type
    frontier.clear()
    for node in range(len(token_ids)):
        negligible = NEGLIGIBLE * min_score / score  # of the node's own mass
        num, mass = _blend_contexts(memory, state, match, rule, negligible, children)
        if len(shared) > 0 and mass >= negligible:
            num = _add_shared(memory, shared, before_last, last, rule, mass, negligible, children, num)
        for i in range(num):
            child_score = score * min(children.weights[i], 1.0)
            if child_score >= min_score:
                heappush(
                    frontier, (-child_score, children.token_ids[i], node - 1, children.states[i], children.matches[i])
                )
        if not frontier:
            return node
        negative_score, last, parent, state, match = heappop(frontier)
        score = -negative_score
        before_last = cursor[LAST] if parent == NONE else token_ids[parent]
        token_ids[node], parents[node], scores[node] = last, parent, score
    return len(token_ids)


@numba.njit(parallel=True, cache=True, nogil=True)
def _draft_rows(
    cursors: Cursors, slots: Int64Array, max_nodes: Int64Array, rule: Rule, min_score: float, shared: Table
) -> tuple[Int32Array, Int32Array, Float32Array, Int64Array]:
    """Draft for the cursors of some slots, in parallel; returns the fields of `DraftTrees`."""
    rooms = np.zeros(len(slots) + 1, np.int64)
    rooms[1:] = max_nodes.cumsum()
    token_ids = np.empty(rooms[-1], np.int32)
    parents = np.empty(rooms[-1], np.int32)
    scores = np.empty(rooms[-1], np.float32)
    offsets = np.zeros(len(slots) + 1, np.int64)
    for row in numba.prange(len(slots)):
        memory = open_memory(cursors.addresses[slots[row]], cursors.sizes[slots[row]])
        room = slice(rooms[row], rooms[row + 1])
        offsets[row + 1] = _grow(
            memory, cursors.rows[slots[row]], rule, min_score, shared, token_ids[room], parents[room], scores[room]
        )
    for row in range(len(slots)):  # each tree follows the one before
        begin, end, size = rooms[row], offsets[row], offsets[row + 1]
        for node in range(size):
            token_ids[end + node] = token_ids[begin + node]
            parents[end + node] = parents[begin + node]
            scores[end + node] = scores[begin + node]
        offsets[row + 1] += end
    num = offsets[-1]
    return token_ids[:num].copy(), parents[:num].copy(), scores[:num].copy(), offsets


def draft_trees(
    cursors: Cursors,
    slots: Int64Array,
    max_nodes: Int64Array,
    rule: Rule,
    min_score: float,
    shared: Table = NO_TABLE,
) -> DraftTrees:
    """Draft what follows the matches of some cursors.

    Args:
        cursors: Of all slots.
        slots: [B].
        max_nodes: [B], the largest number of nodes of each tree.
        rule: Such as `BLEND`.
        min_score: Smallest score of a node.
        shared: See `shared_ngrams`; without rows where nothing is known.
    """
    if not len(slots):
        return DraftTrees.empty(0)
    use_kernel_threads(len(slots) * WORK_PER_ROW)
    token_ids, parents, scores, offsets = _draft_rows(
        cursors, slots, max_nodes, rule, max(min_score, SMALLEST_SCORE), shared
    )
    return DraftTrees(token_ids=token_ids, parents=parents, scores=scores, offsets=offsets)
