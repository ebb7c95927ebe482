"""Drafts from token tries: the four rules of `DraftRule`, on the arrays of `trie_memory`."""

from typing import Any, NamedTuple

import numba
import numpy as np

from srtrl.drafters.draft_frontier import (
    CONTEXT,
    DEPTH,
    PARENT,
    TARGET,
    TOKEN,
    Node,
    RuleConstants,
    Scratch,
    Tree,
    make_scratch,
    offer,
)
from srtrl.drafters.shared_ngrams import Table
from srtrl.drafters.trie_alignment import Alignment, align, locate
from srtrl.drafters.trie_blend import expand_blend
from srtrl.drafters.trie_counts import longest_continued, num_continued, top_edge
from srtrl.drafters.trie_kernel import (
    ALIGNED_MATCH,
    ALIGNED_RUN,
    ALIGNED_STATE,
    BEFORE_LAST,
    LAST,
    MATCH,
    resolve,
)
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
    open_memory,
)

BLEND, PAPER, AUTHORS, SUFFIX = 0, 1, 2, 3

_wide: Any = np.int64
"""Integers of a record that a loop replaces must all have one width."""


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
            size = offer(scratch, size, room, score, node, token, target, node.match + 1, count)
    return size


@numba.njit(cache=True, nogil=True)
def _root(state: int, match: int, aligned: Alignment, last: int, before_last: int) -> Node:
    return Node(_wide(-1), 1.0, _wide(0), _wide(state), _wide(match), aligned, _wide(last), _wide(before_last))


@numba.njit(cache=True, nogil=True, forceinline=True)
def _node_of(memory: Memory, number: int, slot: int, is_aligned: bool, scratch: Scratch) -> Node:
    """The candidate in a slot as a node of the tree, which is remembered for its children's sake."""
    entry, nodes = scratch.entry, scratch.node
    above = nodes[entry[slot, PARENT] + 1]
    token = entry[slot, TOKEN]
    aligned = Alignment(_wide(NONE), _wide(0), _wide(0))
    if is_aligned:
        before = Alignment(_wide(above[2]), _wide(above[3]), _wide(above[4]))
        aligned = align(memory, above[0], above[1], before, token)
    node = Node(
        _wide(number),
        scratch.score[slot],
        _wide(entry[slot, DEPTH]),
        _wide(entry[slot, TARGET]),
        _wide(entry[slot, CONTEXT]),
        aligned,
        _wide(token),
        _wide(above[5]),
    )
    _remember(node, scratch)
    return node


@numba.njit(inline="always")
def _remember(node: Node, scratch: Scratch) -> None:
    record = scratch.node[node.number + 1]
    record[0], record[1] = node.state, node.match
    record[2], record[3], record[4] = node.aligned.state, node.aligned.match, node.aligned.run
    record[5] = node.token


@numba.njit(cache=True, nogil=True)
def _best_first(
    memory: Memory, shared: Table, node: Node, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree
) -> tuple[int, float]:
    """Grow a tree from its root `node`; returns its number of nodes and the sum of their scores."""
    for slot in range(max_nodes):
        scratch.free[slot] = slot
    _remember(node, scratch)
    size, total = 0, 0.0
    for number in range(max_nodes):
        if node.depth < rule.max_depth:
            if rule.rule == BLEND:
                size = expand_blend(memory, shared, node, rule, scratch, size, max_nodes - number)
            else:
                size = _expand_longest(memory, node, rule.min_score, scratch, size, max_nodes - number)
        if size == 0:
            return number, total
        size -= 1
        slot = scratch.frontier[size]
        scratch.free[size] = slot
        node = _node_of(memory, number, slot, rule.rule == BLEND, scratch)
        tree.token_ids[number], tree.parents[number] = node.token, scratch.entry[slot, PARENT]
        tree.scores[number] = node.score
        total += node.score
    return max_nodes, total


@numba.njit(cache=True, nogil=True)
def _draft_line(memory: Memory, state: int, max_nodes: int, rule: RuleConstants, tree: Tree) -> int:
    """Draft the most frequent continuation again and again; returns the number of tokens."""
    score = 1.0
    for node in range(max_nodes):
        if state == ROOT or memory[state + DEGREE] == 0:
            return node
        total = num_continued(memory, state)
        edge = top_edge(memory, state)
        score *= memory[memory[edge + 1] + COUNT] / total
        if score < rule.min_score:
            return node
        tree.token_ids[node], tree.parents[node], tree.scores[node] = memory[edge], node - 1, score
        state = memory[edge + 1]
    return max_nodes


@numba.njit(cache=True, nogil=True)
def _draft_by_suffixes(
    memory: Memory, shared: Table, root: Node, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree
) -> int:
    """Grow a tree from each suffix that something follows and keep the best one; returns its number of nodes."""
    state, match = root.state, min(root.match, rule.max_match)
    while state != ROOT and memory[memory[state + LINK] + LENGTH] >= match:
        state = memory[state + LINK]
    best_size, best_total = 0, 0.0
    while state != ROOT:
        if memory[state + DEGREE] > 0:
            limit = min(max_nodes, int(rule.nodes_per_match * match))
            root = _root(state, match, root.aligned, root.token, root.token_before)
            size, total = _best_first(memory, shared, root, limit, rule, scratch, scratch.tree)
            if total > best_total:
                best_size, best_total = size, total
                tree.token_ids[:size] = scratch.tree.token_ids[:size]
                tree.parents[:size] = scratch.tree.parents[:size]
                tree.scores[:size] = scratch.tree.scores[:size]
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return best_size


@numba.njit(cache=True, nogil=True)
def _draft(
    memory: Memory, shared: Table, cursor: int, max_nodes: int, rule: RuleConstants, scratch: Scratch, tree: Tree
) -> int:
    """Draft what follows a cursor's match; returns the number of nodes."""
    state = resolve(memory, cursor)
    match = memory[cursor + MATCH]
    max_nodes = min(max_nodes, rule.max_nodes)
    if rule.rule in (PAPER, AUTHORS):
        if memory[state + DEGREE] == 0:
            state = longest_continued(memory, state)
            match = memory[state + LENGTH]
        if rule.rule == AUTHORS:
            return _draft_line(memory, state, min(max_nodes, match), rule, tree)
    root = _root(state, match, _aligned_of(memory, cursor), memory[cursor + LAST], memory[cursor + BEFORE_LAST])
    if rule.rule == SUFFIX:
        return _draft_by_suffixes(memory, shared, root, max_nodes, rule, scratch, tree)
    return _best_first(memory, shared, root, max_nodes, rule, scratch, tree)[0]


@numba.njit(cache=True, nogil=True)
def _aligned_of(memory: Memory, cursor: int) -> Alignment:
    """The cursor's aligned context."""
    state, match = memory[cursor + ALIGNED_STATE], memory[cursor + ALIGNED_MATCH]
    if state != NONE:
        state = locate(memory, state, match)
    return Alignment(_wide(state), _wide(match), _wide(memory[cursor + ALIGNED_RUN]))


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
    shared: Table
    """Of all tries' prompts; see `shared_ngrams`."""


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
        num_nodes[row] = _draft(memory, batch.shared, batch.cursors[row], end - begin, rule, scratch, tree)


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
