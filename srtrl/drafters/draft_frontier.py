"""A draft tree that grows from a token trie: its rule, its nodes, and the frontier of candidates for more.

A context is a pair (state, match): one of the strings of a state, by its length. A tree is grown best-first: the
frontier holds the candidates in order, and never more of them than can still become nodes.
"""

from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.shared_ngrams import WAYS
from srtrl.drafters.trie_alignment import Alignment
from srtrl.drafters.trie_memory import Memory

Scores64 = npt.NDArray[np.float64]
Scores32 = npt.NDArray[np.float32]


class RuleConstants(NamedTuple):
    """What the kernels need of a `DraftRule`; see there."""

    rule: int
    min_score: float
    least_score: float
    """Of `blend`: nodes below it are left out. At least `min_score`, which alone decides what the scores are."""
    max_depth: int
    max_contexts: int
    distinct_weight: float
    match_weight: float
    tail: float
    max_nodes: int
    max_match: int
    nodes_per_match: float
    first_run: float
    run_weight: float


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
    aligned: Alignment
    """Its aligned context."""
    token: int
    """The node's own token; the sample's last one at the root."""
    token_before: int


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
    """[max_contexts], what an occurrence in it is worth."""
    other_token: Memory
    """[pairs + 2 * WAYS], tokens that follow none of these contexts, but the aligned one or texts of other prompts."""
    other_weight: Scores64
    """[pairs + 2 * WAYS], their probabilities."""
    node: Memory
    """[capacity, 6], of the root and of each node behind it: state, match, aligned state, match and run, token."""
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
        np.empty(pairs + 2 * WAYS, np.int32),
        np.empty(pairs + 2 * WAYS, np.float64),
        np.empty((capacity, 6), np.int32),
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
def offer(
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
