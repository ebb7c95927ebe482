"""Draft trees from token tries, best first: a node's score is the estimated chance that it is accepted.

Rule `BLEND`: Witten-Bell back-off. A node's context and its suffixes, the longest first, each take the share
total / (total + distinct_weight x distinct) x match / (match + match_weight) of the probability mass that is left and
spread it over the tokens that followed them, by count; of a suffix only the occurrences count that are not the longer
context's. What the last two tokens, then the last one, are followed by in texts of other prompts (`shared_ngrams`)
counts as contexts of length 2 and 1. What can change no score by `NEGLIGIBLE` times `min_score` is left out.

Rule `SUFFIX` (SuffixDecoding: Oliaro et al., 2024): a tree from each suffix of the match, by share of the occurrences,
of at most `NODES_PER_MATCH` times its length nodes; the one with the largest sum of scores is taken.
"""

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
from srtrl.drafters.token_trie import TrieCursors
from srtrl.model.cpu_threads import use_kernel_threads

Float32Array = npt.NDArray[np.float32]
Float64Array = npt.NDArray[np.float64]

NEGLIGIBLE = 0.25
"""Share of `min_score`: in replays the nodes that a smaller one brought cost as much as they gave."""
SMALLEST_SCORE = 1e-6
MAX_CHILDREN = 64
"""Children of a node that are considered."""
MAX_CONTEXTS = 3
"""Contexts that are blended at a node, counting those that something follows."""
WORK_PER_ROW = 5_000
"""What a row's draft takes, in the unit of `use_kernel_threads`: about 3 microseconds."""
MAX_TREE, MAX_MATCH, NODES_PER_MATCH = 48, 64, 4
"""Of `SUFFIX`: largest tree, longest match that is looked at, and nodes of a tree for each token of the match."""


class Rule(NamedTuple):
    """How counts become scores."""

    max_contexts: int
    distinct_weight: float
    """What a distinct token takes from the trust in a context."""
    match_weight: float
    """Length of a match that is trusted by half."""
    tries_suffixes: bool
    """Whether each suffix of the match has a tree of its own."""


BLEND = Rule(max_contexts=MAX_CONTEXTS, distinct_weight=0.5, match_weight=2.0, tries_suffixes=False)
SUFFIX = Rule(max_contexts=1, distinct_weight=0.0, match_weight=0.0, tries_suffixes=True)


class Tree(NamedTuple):
    """Room for a tree, or for several end to end, as in `DraftTrees`."""

    token_ids: Int32Array
    parents: Int32Array
    scores: Float32Array


class Scratch(NamedTuple):
    """Working memory of one thread, for trees of at most `capacity` nodes."""

    frontier: Int32Array
    """[capacity], entries of the candidates that may become nodes, the best last."""
    free: Int32Array
    """[capacity], entries that are free."""
    score: Float64Array
    """[capacity], path product of a candidate."""
    entry: Int32Array
    """[capacity, 4], its token, parent, state and match."""
    node: Int32Array
    """[capacity, 2], state and match of each node."""
    child: Int32Array
    """[MAX_CHILDREN, 4], children of the node in hand: token, state and match, and count in the last context."""
    weight: Float64Array
    """[MAX_CHILDREN], their probabilities."""
    context: Int32Array
    """[MAX_CONTEXTS, 2], state and match of each context that is blended."""
    factor: Float64Array
    """[MAX_CONTEXTS], what an occurrence in it is worth."""
    tree: Tree
    """[capacity], a second tree."""


@numba.njit(cache=True, nogil=True)
def _make_scratch(capacity: int) -> Scratch:
    return Scratch(
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.float64),
        np.empty((capacity, 4), np.int32),
        np.empty((capacity, 2), np.int32),
        np.empty((MAX_CHILDREN, 4), np.int32),
        np.empty(MAX_CHILDREN, np.float64),
        np.empty((MAX_CONTEXTS, 2), np.int32),
        np.empty(MAX_CONTEXTS, np.float64),
        Tree(np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.float32)),
    )


class Draft(NamedTuple):
    """What the functions below share while they draft for one slot."""

    memory: Int32Array
    """Of its trie."""
    shared: Table
    """See `shared_ngrams`; without rows where nothing is known."""
    cursor: Int32Array
    rule: Rule
    min_score: float
    """Smallest score of a node."""
    scratch: Scratch


@numba.njit(cache=True, nogil=True, forceinline=True)
def _choose_contexts(draft: Draft, state: int, match: int, negligible: float) -> tuple[int, float]:
    """Share the probability mass among contexts, the longest first; returns their number and the mass that is left."""
    memory, rule, scratch = draft.memory, draft.rule, draft.scratch
    num, before, mass = 0, 0, 1.0
    while state != ROOT and num < rule.max_contexts and mass >= negligible:
        total = memory[state + STATE_TOTAL]
        if total > before:
            more = total - before
            trust = (
                more / (more + rule.distinct_weight * num_edges(memory, state)) * (match / (match + rule.match_weight))
            )
            scratch.context[num, 0] = state
            scratch.context[num, 1] = match
            scratch.factor[num] = mass * trust / more
            mass *= 1.0 - trust
            before = total
            num += 1
        elif rule.tries_suffixes:  # a suffix tree ends here
            break
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return num, mass


@numba.njit(cache=True, nogil=True, forceinline=True)
def _blend_contexts(draft: Draft, num_contexts: int, negligible: float) -> int:
    """List the children that the contexts know, with their weights; returns the number of children.

    What follows a context also follows its suffixes, where its occurrences are not to count again. A token that is new
    in a suffix is listed if it is not negligible by itself.
    """
    memory, scratch = draft.memory, draft.scratch
    child, weight = scratch.child, scratch.weight
    num = 0
    for level in range(num_contexts):
        state, factor = scratch.context[level, 0], scratch.factor[level]
        for i in range(num):
            count = memory[find_edge(memory, state, child[i, 0]) + COUNT]
            weight[i] += factor * (count - child[i, 3])
            child[i, 3] = count
        if num_edges(memory, state) == num:
            continue
        num_known = num
        for edge in range(memory[state + BLOCK], edges_end(memory, state), EDGE):
            token, count = memory[edge], memory[edge + COUNT]
            if token == EMPTY or factor * count < negligible or num == MAX_CHILDREN:
                continue
            is_known = False
            for i in range(num_known):
                is_known |= child[i, 0] == token
            if not is_known:
                weight[num] = factor * count
                child[num, 0] = token
                child[num, 1] = memory[edge + TARGET]
                child[num, 2] = scratch.context[level, 1] + 1
                child[num, 3] = count
                num += 1
    return num


@numba.njit(cache=True, nogil=True, forceinline=True)
def _add_shared(
    draft: Draft, state: int, match: int, before_last: int, last: int, mass: float, negligible: float, num: int
) -> int:
    """Spread `mass` over what the last two tokens, then the last one, were followed by in all prompts' texts."""
    memory, shared, rule = draft.memory, draft.shared, draft.rule
    child, weight = draft.scratch.child, draft.scratch.weight
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
            if count == 0:
                continue
            share = mass * trust * count / total
            i = 0
            while i < num and child[i, 0] != token:
                i += 1
            if i < num:
                weight[i] += share
            elif share >= negligible and num < MAX_CHILDREN:
                longest = state  # of its suffixes, the longest that the token follows
                edge = find_edge(memory, longest, token)
                while edge == NONE and longest != ROOT:
                    longest = memory[longest + LINK]
                    edge = find_edge(memory, longest, token)
                weight[num] = share
                child[num, 0] = token
                child[num, 1] = ROOT if edge == NONE else memory[edge + TARGET]
                child[num, 2] = 0 if edge == NONE else min(match, memory[longest + LENGTH]) + 1
                num += 1
        mass *= 1.0 - trust
    return num


@numba.njit(cache=True, nogil=True, forceinline=True)
def _offer(scratch: Scratch, size: int, room: int, score: float, parent: int, i: int) -> int:
    """Put child `i` of a node into the frontier of `size` candidates, of which the best `room` stay; its new size.

    Order: by score, then token id, then parent.
    """
    frontier, child = scratch.frontier, scratch.child
    token = child[i, 0]
    place = size
    while place > 0:
        other = frontier[place - 1]
        if score > scratch.score[other] or (score == scratch.score[other] and token < scratch.entry[other, 0]):
            break
        place -= 1
    if size < room:
        entry = scratch.free[size]
        for other in range(size, place, -1):
            frontier[other] = frontier[other - 1]
        size += 1
    else:  # the worst one makes room
        if place == 0:
            return size
        place -= 1
        entry = frontier[0]
        for other in range(place):
            frontier[other] = frontier[other + 1]
    frontier[place] = entry
    scratch.score[entry] = score
    scratch.entry[entry, 0] = token
    scratch.entry[entry, 1] = parent
    scratch.entry[entry, 2] = child[i, 1]
    scratch.entry[entry, 3] = child[i, 2]
    return size


@numba.njit(cache=True, nogil=True)
def _grow(draft: Draft, state: int, match: int, max_nodes: int, tree: Tree) -> tuple[int, float]:
    """Grow a tree after the context (state, match); returns its number of nodes and the sum of their scores."""
    scratch, cursor, min_score = draft.scratch, draft.cursor, draft.min_score
    for entry in range(max_nodes):
        scratch.free[entry] = entry
    size, total, score, parent = 0, 0.0, 1.0, NONE
    before_last, last = cursor[BEFORE_LAST], cursor[LAST]
    for number in range(max_nodes):
        negligible = NEGLIGIBLE * min_score / score  # of the node's own mass
        num_contexts, mass = _choose_contexts(draft, state, match, negligible)
        num = _blend_contexts(draft, num_contexts, negligible)
        if len(draft.shared) > 0 and mass >= negligible:
            num = _add_shared(draft, state, match, before_last, last, mass, negligible, num)
        for i in range(num):
            child_score = score * min(scratch.weight[i], 1.0)
            if child_score >= min_score:
                size = _offer(scratch, size, max_nodes - number, child_score, number - 1, i)
        if size == 0:
            return number, total
        size -= 1
        entry = scratch.frontier[size]
        scratch.free[size] = entry
        score = scratch.score[entry]
        parent, state, match = scratch.entry[entry, 1], scratch.entry[entry, 2], scratch.entry[entry, 3]
        before_last = cursor[LAST] if parent == NONE else tree.token_ids[parent]
        last = scratch.entry[entry, 0]
        tree.token_ids[number], tree.parents[number], tree.scores[number] = last, parent, score
        total += score
    return max_nodes, total


@numba.njit(cache=True, nogil=True)
def _draft(draft: Draft, max_nodes: int, tree: Tree) -> int:
    """Draft what follows a cursor's match; returns the number of nodes."""
    memory, other = draft.memory, draft.scratch.tree
    match = draft.cursor[MATCH]
    state = locate(memory, draft.cursor[STATE], match)
    if not draft.rule.tries_suffixes:
        return _grow(draft, state, match, max_nodes, tree)[0]
    match = min(match, MAX_MATCH)
    state = locate(memory, state, match)
    best_size, best_total = 0, 0.0
    while state != ROOT:
        if memory[state + STATE_TOTAL] > 0:
            room = min(max_nodes, MAX_TREE, NODES_PER_MATCH * match)
            size, total = _grow(draft, state, match, room, other)
            if total > best_total:
                best_size, best_total = size, total
                tree.token_ids[:size] = other.token_ids[:size]
                tree.parents[:size] = other.parents[:size]
                tree.scores[:size] = other.scores[:size]
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return best_size


@numba.njit(cache=True, nogil=True)
def _draft_rows(
    cursors: Cursors, slots: Int64Array, max_nodes: Int64Array, shared: Table, rule: Rule, min_score: float, trees: Tree
) -> Int64Array:
    """Draft for the cursors of some slots, one tree after another, into `trees`; returns `DraftTrees.offsets`.

    Args:
        cursors: Of all slots.
        slots: [B].
        max_nodes: [B].
        shared: See `Draft`.
        rule: One of the rules above.
        min_score: See `Draft`.
        trees: [at least the sum of max_nodes].
    """
    offsets = np.zeros(len(slots) + 1, np.int64)
    scratch = _make_scratch(max(1, max_nodes.max()))
    end = 0
    for row in range(len(slots)):
        memory = open_memory(cursors.addresses[slots[row]], cursors.sizes[slots[row]])
        tree = Tree(trees.token_ids[end:], trees.parents[end:], trees.scores[end:])
        draft = Draft(memory, shared, cursors.rows[slots[row]], rule, min_score, scratch)
        end += _draft(draft, max_nodes[row], tree)
        offsets[row + 1] = end
    return offsets


@numba.njit(parallel=True, cache=True, nogil=True)
def _draft_in_parallel(
    cursors: Cursors,
    slots: Int64Array,
    max_nodes: Int64Array,
    shared: Table,
    rule: Rule,
    min_score: float,
    trees: Tree,
    num_parts: int,
) -> Int64Array:
    """Do as `_draft_rows`, `num_parts` equal parts of the rows at the same time: drafting changes no trie."""
    offsets = np.zeros(len(slots) + 1, np.int64)
    rooms = np.zeros(len(slots) + 1, np.int64)
    rooms[1:] = max_nodes.cumsum()
    for part in numba.prange(num_parts):
        rows = slice(part * len(slots) // num_parts, (part + 1) * len(slots) // num_parts)
        if rows.start < rows.stop:
            begin, end = rooms[rows.start], rooms[rows.stop]
            own = Tree(trees.token_ids[begin:end], trees.parents[begin:end], trees.scores[begin:end])
            found = _draft_rows(cursors, slots[rows], max_nodes[rows], shared, rule, min_score, own)
            offsets[rows.start + 1 : rows.stop + 1] = found[1:]
    for part in range(1, num_parts):  # the trees of each part follow those of the part before
        first, last = part * len(slots) // num_parts, (part + 1) * len(slots) // num_parts
        begin, end, size = rooms[first], offsets[first], offsets[last]
        for node in range(size):
            trees.token_ids[end + node] = trees.token_ids[begin + node]
            trees.parents[end + node] = trees.parents[begin + node]
            trees.scores[end + node] = trees.scores[begin + node]
        offsets[first + 1 : last + 1] += end
    return offsets


class TrieDrafts:
    """Makes drafts for slots with cursors, in buffers of its own."""

    def __init__(self) -> None:
        self._buffer = Tree(np.empty(0, np.int32), np.empty(0, np.int32), np.empty(0, np.float32))

    def propose(
        self,
        cursors: TrieCursors,
        slots: Int64Array,
        max_nodes: Int64Array,
        rule: Rule,
        min_score: float,
        shared: Table = NO_TABLE,
    ) -> DraftTrees:
        """Draft a tree for each of `slots` [B], of at most `max_nodes` [B] nodes, no score below `min_score`."""
        if not len(slots):
            return DraftTrees.empty(0)
        room = int(max_nodes.sum())
        if room > len(self._buffer.token_ids):
            self._buffer = Tree(np.empty(room, np.int32), np.empty(room, np.int32), np.empty(room, np.float32))
        min_score = max(min_score, SMALLEST_SCORE)
        use_kernel_threads(len(slots) * WORK_PER_ROW)
        num_parts = numba.get_num_threads()
        offsets = _draft_in_parallel(cursors.arrays, slots, max_nodes, shared, rule, min_score, self._buffer, num_parts)
        end = int(offsets[-1])
        return DraftTrees(
            token_ids=self._buffer.token_ids[:end].copy(),
            parents=self._buffer.parents[:end].copy(),
            scores=self._buffer.scores[:end].copy(),
            offsets=offsets,
        )
