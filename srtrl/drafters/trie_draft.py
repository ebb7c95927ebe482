"""Drafts from token tries: the four rules of `DraftRule`, on the arrays of `trie_memory`.

A context is a pair (state, match): one of the strings of a state, by its length. A tree is grown best-first: the
frontier holds the candidates in order, and never more of them than can still become nodes.
"""

from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.trie_kernel import MATCH, longest_continued, num_continued, resolve
from srtrl.drafters.trie_memory import (
    BLOCK,
    COUNT,
    DEGREE,
    EMPTY,
    LARGEST_CLASS,
    LENGTH,
    LINK,
    NONE,
    ROOT,
    Memory,
    Places,
    edges_end,
    find_edge,
    open_memory,
)

Scores64 = npt.NDArray[np.float64]
Scores32 = npt.NDArray[np.float32]

BLEND, PAPER, AUTHORS, SUFFIX = 0, 1, 2, 3

_wide: Any = np.int64
"""Integers of a record that a loop replaces must all have one width."""


class RuleConstants(NamedTuple):
    """What the kernels need of a `DraftRule`; see there."""

    rule: int
    min_score: float
    max_depth: int
    max_contexts: int
    distinct_weight: float
    match_weight: float
    tail: float
    max_nodes: int
    max_match: int
    nodes_per_match: float


class Tree(NamedTuple):
    """Room for a tree, or for several end to end, as in `DraftTrees`."""

    token_ids: Memory
    parents: Memory
    scores: Scores32


class Node(NamedTuple):
    """A node of which children are sought; the root is number -1, and its score is 1."""

    number: int
    score: float
    depth: int
    state: int
    """State of its context."""
    match: int
    """Length of its context: one more than that of its parent's that had the token."""


class Scratch(NamedTuple):
    """Working memory of one thread."""

    frontier: Memory
    """[capacity], slots of the candidates that may become nodes, the best last."""
    free: Memory
    """[capacity], slots that are free."""
    score: Scores64
    """[capacity], path product of the candidate in a slot."""
    entry: Memory
    """[capacity, 6], its token, count, parent's number, state, match and depth."""
    weight: Scores64
    """[pairs], probability of each edge of the shortest context, which has those of all others."""
    child: Memory
    """[pairs, 3], for each of these edges: target, match and count by the longest context that has the token."""
    context: Memory
    """[max_contexts, 2], state and match of each context that is blended."""
    factor: Scores64
    """[max_contexts], its probability mass per occurrence."""
    tree: Tree
    """[capacity] each, a second tree."""


TOKEN, OCCURRENCES, PARENT, TARGET, CONTEXT, DEPTH = range(6)


@numba.njit(cache=True, nogil=True)
def make_scratch(max_nodes: int, largest_class: int, max_contexts: int) -> Scratch:
    """Working memory for trees of `max_nodes` nodes."""
    capacity = max_nodes + 1
    pairs = 1 << largest_class
    return Scratch(
        np.empty(capacity, np.int32),
        np.empty(capacity, np.int32),
        np.empty(capacity, np.float64),
        np.empty((capacity, 6), np.int32),
        np.empty(pairs, np.float64),
        np.empty((pairs, 3), np.int32),
        np.empty((max_contexts, 2), np.int32),
        np.empty(max_contexts, np.float64),
        Tree(np.empty(capacity, np.int32), np.empty(capacity, np.int32), np.empty(capacity, np.float32)),
    )


@numba.njit(inline="always")
def _is_better(score: float, count: int, token: int, parent: int, slot: int, scratch: Scratch) -> bool:
    """The order of candidates: by score, then count, then token id, then parent."""
    if score != scratch.score[slot]:
        return bool(score > scratch.score[slot])
    if count != scratch.entry[slot, OCCURRENCES]:
        return bool(count > scratch.entry[slot, OCCURRENCES])
    if token != scratch.entry[slot, TOKEN]:
        return bool(token < scratch.entry[slot, TOKEN])
    return bool(parent < scratch.entry[slot, PARENT])


@numba.njit(inline="always")
def _offer(
    scratch: Scratch, size: int, room: int, score: float, node: Node, token: int, target: int, match: int, count: int
) -> int:
    """Put a child of a node into the frontier of `size` candidates, of which the best `room` stay; its new size."""
    frontier = scratch.frontier
    if size == room:
        slot = frontier[0]  # the worst one makes room
        if not _is_better(score, count, token, node.number, slot, scratch):
            return size
        place = 0
        while place + 1 < size and _is_better(score, count, token, node.number, frontier[place + 1], scratch):
            frontier[place] = frontier[place + 1]
            place += 1
    else:
        slot = scratch.free[size]
        place = size
        while place > 0 and not _is_better(score, count, token, node.number, frontier[place - 1], scratch):
            frontier[place] = frontier[place - 1]
            place -= 1
        size += 1
    frontier[place] = slot
    scratch.score[slot] = score
    entry = scratch.entry
    entry[slot, TOKEN] = token
    entry[slot, OCCURRENCES] = count
    entry[slot, PARENT] = node.number
    entry[slot, TARGET] = target
    entry[slot, CONTEXT] = match
    entry[slot, DEPTH] = node.depth + 1
    return size


@numba.njit(cache=True, nogil=True)
def _expand_longest(memory: Memory, node: Node, min_score: float, scratch: Scratch, size: int, room: int) -> int:
    """Offer what follows a node's context, by its share of the occurrences; the frontier's new size."""
    state = node.state
    if memory[state + DEGREE] == 0 or state == ROOT:
        return size
    total = num_continued(memory, state)
    for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
        token = memory[edge]
        if token == EMPTY:
            continue
        target = memory[edge + 1]
        count = memory[target + COUNT]
        score = node.score * (count / total)
        if score >= min_score:
            size = _offer(scratch, size, room, score, node, token, target, node.match + 1, count)
    return size


@numba.njit(cache=True, nogil=True)
def _choose_contexts(memory: Memory, node: Node, rule: RuleConstants, scratch: Scratch) -> int:
    """Fill `scratch.context` and `scratch.factor`, the longest context first; returns how many there are."""
    state, match = node.state, node.match
    mass = 1.0
    num = 0
    while state != ROOT and num < rule.max_contexts and mass >= rule.tail:
        distinct = memory[state + DEGREE]
        if distinct > 0:
            total = num_continued(memory, state)
            trust = total / (total + rule.distinct_weight * distinct) * (match / (match + rule.match_weight))
            scratch.context[num, 0] = state
            scratch.context[num, 1] = match
            scratch.factor[num] = mass * trust / total
            mass *= 1.0 - trust
            num += 1
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return num


@numba.njit(cache=True, nogil=True)
def _expand_blend(memory: Memory, node: Node, rule: RuleConstants, scratch: Scratch, size: int, room: int) -> int:
    """Offer what follows a node's context by Witten-Bell back-off along its suffixes; the frontier's new size.

    What follows a context also follows its suffixes: so the shortest one's edges are all there are, and those of the
    longer ones are added to them.
    """
    num = _choose_contexts(memory, node, rule, scratch)
    if num == 0:
        return size
    weight, child = scratch.weight, scratch.child
    shortest = scratch.context[num - 1, 0]
    begin, end = memory[shortest + BLOCK], edges_end(memory, shortest)
    for i in range((end - begin) >> 1):
        weight[i] = 0.0
    for level in range(num - 1, -1, -1):
        state = scratch.context[level, 0]
        for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
            if memory[edge] == EMPTY:
                continue
            same = edge if state == shortest else find_edge(memory, shortest, memory[edge])
            i = (same - begin) >> 1
            target = memory[edge + 1]
            count = memory[target + COUNT]
            weight[i] += scratch.factor[level] * count
            child[i, 0] = target
            child[i, 1] = scratch.context[level, 1] + 1
            child[i, 2] = count
    for i in range((end - begin) >> 1):
        token = memory[begin + 2 * i]
        if token == EMPTY:
            continue
        score = node.score * min(weight[i], 1.0)
        if score >= rule.min_score:
            size = _offer(scratch, size, room, score, node, token, child[i, 0], child[i, 1], child[i, 2])
    return size


@numba.njit(cache=True, nogil=True)
def _best_first(
    memory: Memory, state: int, match: int, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree
) -> tuple[int, float]:
    """Grow a tree from a context; returns its number of nodes and the sum of their scores."""
    for slot in range(max_nodes):
        scratch.free[slot] = slot
    node = Node(_wide(-1), 1.0, _wide(0), _wide(state), _wide(match))
    size, total = 0, 0.0
    for number in range(max_nodes):
        if node.depth < rule.max_depth:
            if rule.rule == BLEND:
                size = _expand_blend(memory, node, rule, scratch, size, max_nodes - number)
            else:
                size = _expand_longest(memory, node, rule.min_score, scratch, size, max_nodes - number)
        if size == 0:
            return number, total
        size -= 1
        slot = scratch.frontier[size]
        scratch.free[size] = slot
        score = scratch.score[slot]
        entry = scratch.entry
        depth, state, match = _wide(entry[slot, DEPTH]), _wide(entry[slot, TARGET]), _wide(entry[slot, CONTEXT])
        node = Node(_wide(number), score, depth, state, match)
        tree.token_ids[number], tree.parents[number] = entry[slot, TOKEN], entry[slot, PARENT]
        tree.scores[number] = score
        total += score
    return max_nodes, total


@numba.njit(cache=True, nogil=True)
def _draft_line(memory: Memory, state: int, max_nodes: int, rule: RuleConstants, tree: Tree) -> int:
    """Draft the most frequent continuation again and again; returns the number of tokens."""
    score = 1.0
    for node in range(max_nodes):
        if state == ROOT or memory[state + DEGREE] == 0:
            return node
        total = num_continued(memory, state)
        best, best_count, best_token = NONE, 0, NONE
        for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
            token = memory[edge]
            if token == EMPTY:
                continue
            count = memory[memory[edge + 1] + COUNT]
            if count > best_count or (count == best_count and token < best_token):
                best, best_count, best_token = memory[edge + 1], count, token
        score *= best_count / total
        if score < rule.min_score:
            return node
        tree.token_ids[node], tree.parents[node], tree.scores[node] = best_token, node - 1, score
        state = best
    return max_nodes


@numba.njit(cache=True, nogil=True)
def _draft_by_suffixes(
    memory: Memory, state: int, match: int, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree
) -> int:
    """Grow a tree from each suffix that something follows and keep the best one; returns its number of nodes."""
    match = min(match, rule.max_match)
    while state != ROOT and memory[memory[state + LINK] + LENGTH] >= match:
        state = memory[state + LINK]
    best_size, best_total = 0, 0.0
    while state != ROOT:
        if memory[state + DEGREE] > 0:
            limit = min(max_nodes, int(rule.nodes_per_match * match))
            size, total = _best_first(memory, state, match, limit, rule, scratch, scratch.tree)
            if total > best_total:
                best_size, best_total = size, total
                tree.token_ids[:size] = scratch.tree.token_ids[:size]
                tree.parents[:size] = scratch.tree.parents[:size]
                tree.scores[:size] = scratch.tree.scores[:size]
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return best_size


@numba.njit(cache=True, nogil=True)
def _draft(memory: Memory, cursor: int, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree) -> int:
    """Draft what follows a cursor's match; returns the number of nodes."""
    state = resolve(memory, cursor)
    match = memory[cursor + MATCH]
    max_nodes = min(max_nodes, rule.max_nodes)
    if rule.rule == BLEND:
        return _best_first(memory, state, match, max_nodes, rule, scratch, tree)[0]
    if rule.rule == SUFFIX:
        return _draft_by_suffixes(memory, state, match, max_nodes, rule, scratch, tree)
    if memory[state + DEGREE] == 0:
        state = longest_continued(memory, state)
        match = memory[state + LENGTH]
    if rule.rule == PAPER:
        return _best_first(memory, state, match, max_nodes, rule, scratch, tree)[0]
    return _draft_line(memory, state, min(max_nodes, match), rule, tree)


class Batch(NamedTuple):
    """The rows of a call of `propose_batch`."""

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
    rooms: Places
    """[B + 1], where each row's room for nodes begins."""


@numba.njit(cache=True, nogil=True)
def _draft_group(group: int, batch: Batch, rule: RuleConstants, trees: Tree, num_nodes: Places) -> None:
    """Draft for the rows of one trie."""
    first = batch.rows[batch.starts[group]]
    memory = open_memory(batch.addresses[first], batch.sizes[first])
    most = 0
    for i in range(batch.starts[group], batch.starts[group + 1]):
        row = batch.rows[i]
        most = max(most, batch.rooms[row + 1] - batch.rooms[row])
    scratch = make_scratch(min(most, rule.max_nodes), memory[LARGEST_CLASS], rule.max_contexts)
    for i in range(batch.starts[group], batch.starts[group + 1]):
        row = batch.rows[i]
        begin, end = batch.rooms[row], batch.rooms[row + 1]
        tree = Tree(trees.token_ids[begin:end], trees.parents[begin:end], trees.scores[begin:end])
        num_nodes[row] = _draft(memory, batch.cursors[row], end - begin, rule, scratch, tree)


@numba.njit(cache=True, nogil=True)
def _close_up(batch: Batch, num_nodes: Places, trees: Tree, offsets: Places) -> None:
    """Move the trees together, end to end, and fill their `offsets`."""
    place = 0
    for row in range(len(num_nodes)):
        offsets[row] = place
        begin = batch.rooms[row]
        for i in range(begin, begin + num_nodes[row]):
            trees.token_ids[place], trees.parents[place] = trees.token_ids[i], trees.parents[i]
            trees.scores[place] = trees.scores[i]
            place += 1
    offsets[len(num_nodes)] = place


@numba.njit(cache=True, nogil=True)
def draft_groups(batch: Batch, rule: RuleConstants, trees: Tree, offsets: Places) -> None:
    """Draft for the cursors of several tries; fills the fields of `DraftTrees` (of which the ends stay free)."""
    num_nodes = np.empty(len(batch.rows), np.int64)
    for group in range(len(batch.starts) - 1):
        _draft_group(group, batch, rule, trees, num_nodes)
    _close_up(batch, num_nodes, trees, offsets)


@numba.njit(parallel=True, cache=True, nogil=True)
def draft_groups_in_parallel(batch: Batch, rule: RuleConstants, trees: Tree, offsets: Places) -> None:
    """Do as `draft_groups`, each trie in one thread: counting what is pending changes a trie."""
    num_nodes = np.empty(len(batch.rows), np.int64)
    for group in numba.prange(len(batch.starts) - 1):
        _draft_group(group, batch, rule, trees, num_nodes)
    _close_up(batch, num_nodes, trees, offsets)
