"""The rule `blend`: what follows a draft node, by all that is known.

Three things are mixed (see `DraftRule`): the node's context and its suffixes (Witten-Bell back-off), its aligned
context (`trie_alignment`), and what its last two tokens are followed by in texts of all prompts (`shared_ngrams`).
"""

from typing import Any

import numba
import numpy as np

from srtrl.drafters.draft_frontier import Node, RuleConstants, Scratch, offer
from srtrl.drafters.shared_ngrams import ENTRIES, NO_TOKEN, TOTAL, WAYS, Table, find_context
from srtrl.drafters.trie_counts import num_continued, settle
from srtrl.drafters.trie_memory import (
    BLOCK,
    COUNT,
    DEGREE,
    EMPTY,
    LENGTH,
    LINK,
    NONE,
    ROOT,
    Memory,
    edges_end,
    find_edge,
)

_wide: Any = np.int64


@numba.njit(cache=True, nogil=True, forceinline=True)
def expand_blend(
    memory: Memory, shared: Table, node: Node, rule: RuleConstants, scratch: Scratch, size: int, room: int
) -> int:
    """Offer what follows a node; the frontier's new size.

    What follows a context also follows its suffixes: so the shortest one's edges are all there are, and those of the
    longer ones are added to them. Other tokens are listed apart.
    """
    aligned_mass = _aligned_mass(memory, node, rule)
    num, mass = _choose_contexts(memory, node, 1.0 - aligned_mass, rule, scratch)
    weight, child = scratch.weight, scratch.child
    shortest, begin, end = _wide(NONE), _wide(0), _wide(0)
    if num > 0:
        shortest = _wide(scratch.context[num - 1, 0])
        begin, end = _wide(memory[shortest + BLOCK]), _wide(edges_end(memory, shortest))
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
    num_others = _wide(0)
    if aligned_mass > 0.0:
        num_others = _add_aligned(memory, node.aligned.state, aligned_mass, shortest, scratch)
    if len(shared) > 0 and node.score * mass >= rule.min_score:
        num_others = _add_shared(memory, shared, node, mass, rule, shortest, scratch, num_others)
    num_edges = (end - begin) >> 1
    for i in range(num_edges + num_others):  # one loop, for `offer` is long and compiled where it is called
        other = i - num_edges
        token = memory[begin + 2 * i] if other < 0 else scratch.other_token[other]
        if token == EMPTY:
            continue
        score = node.score * min(weight[i] if other < 0 else scratch.other_weight[other], 1.0)
        if score < rule.least_score:
            continue
        if other < 0:
            target, match, count = _wide(child[i, 0]), _wide(child[i, 1]), _wide(child[i, 2])
        else:
            target, match, count = _longest_behind(memory, node, token)
        size = offer(scratch, size, room, score, node, token, target, match, count)
    return size


@numba.njit(cache=True, nogil=True, forceinline=True)
def _aligned_mass(memory: Memory, node: Node, rule: RuleConstants) -> float:
    """Probability mass of the node's aligned context; 0 if it has none that something follows."""
    aligned = node.aligned
    if aligned.state == NONE or memory[aligned.state + DEGREE] == 0:
        return 0.0
    before = aligned.match - aligned.run
    trust = (aligned.run + rule.first_run) / (aligned.run + rule.run_weight)
    return float(min(trust, 1.0) * (before / (before + rule.match_weight)))


@numba.njit(cache=True, nogil=True, forceinline=True)
def _choose_contexts(
    memory: Memory, node: Node, mass: float, rule: RuleConstants, scratch: Scratch
) -> tuple[int, float]:
    """Share `mass` among contexts: fill `scratch.context` and `scratch.factor`, the longest first.

    All occurrences of a context are also its suffixes'. A suffix speaks for those only that it has beside: its share is
    spread over them, which is why an occurrence in the context takes its worth in the suffix away again.

    Returns:
        The number of contexts, and the mass that is left.
    """
    state, match = node.state, node.match
    num, before = 0, 0
    while state != ROOT and num < rule.max_contexts and mass >= rule.tail:
        distinct = memory[state + DEGREE]
        if distinct > 0:
            total = num_continued(memory, state)
            more = total - before
            if more > 0:
                trust = more / (more + rule.distinct_weight * distinct) * (match / (match + rule.match_weight))
                factor = mass * trust / more
                scratch.context[num, 0] = state
                scratch.context[num, 1] = match
                scratch.factor[num] = factor
                if num > 0:
                    scratch.factor[num - 1] -= factor
                mass *= 1.0 - trust
                before = total
                num += 1
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return num, mass


@numba.njit(cache=True, nogil=True, forceinline=True)
def _add(memory: Memory, shortest: int, token: int, share: float, scratch: Scratch, first: int, num_others: int) -> int:
    """Add to a token's probability: at the shortest context's edge, or among the others from index `first` on."""
    if shortest != NONE:
        same = find_edge(memory, shortest, token)
        if same != NONE:
            scratch.weight[(same - memory[shortest + BLOCK]) >> 1] += share
            return num_others
    for i in range(first, num_others):
        if scratch.other_token[i] == token:
            scratch.other_weight[i] += share
            return num_others
    scratch.other_token[num_others] = token
    scratch.other_weight[num_others] = share
    return num_others + 1


@numba.njit(cache=True, nogil=True, forceinline=True)
def _add_aligned(memory: Memory, state: int, mass: float, shortest: int, scratch: Scratch) -> int:
    """Spread `mass` over what follows the aligned context, by count; returns the number of other tokens."""
    num_others = _wide(0)
    total = num_continued(memory, state)
    for edge in range(memory[state + BLOCK], edges_end(memory, state), 2):
        if memory[edge] != EMPTY:
            share = mass * memory[memory[edge + 1] + COUNT] / total
            num_others = _wide(_add(memory, shortest, memory[edge], share, scratch, num_others, num_others))
    return int(num_others)


@numba.njit(cache=True, nogil=True, forceinline=True)
def _add_shared(
    memory: Memory,
    shared: Table,
    node: Node,
    mass: float,
    rule: RuleConstants,
    shortest: int,
    scratch: Scratch,
    num_others: int,
) -> int:
    """Spread `mass` over what the last two tokens, then the last one, were followed by in all prompts' texts."""
    for length in (2, 1):
        context = find_context(shared, node.token_before if length == 2 else NO_TOKEN, node.token)
        if context == NONE:
            continue
        total = shared[context, TOTAL]
        distinct = 0
        for way in range(WAYS):
            distinct += shared[context, ENTRIES + 2 * way + 1] > 0
        trust = total / (total + rule.distinct_weight * distinct) * (length / (length + rule.match_weight))
        for way in range(WAYS):
            token, count = shared[context, ENTRIES + 2 * way], shared[context, ENTRIES + 2 * way + 1]
            if count > 0:
                share = mass * trust * count / total
                num_others = _wide(_add(memory, shortest, token, share, scratch, 0, num_others))
        mass *= 1.0 - trust
    return num_others


@numba.njit(cache=True, nogil=True, forceinline=True)
def _longest_behind(memory: Memory, node: Node, token: int) -> tuple[int, int, int]:
    """State, length and count of the longest suffix of the node's context and the token; (`ROOT`, 0, 0) if unknown."""
    state, match = node.state, node.match
    edge = find_edge(memory, state, token)
    while edge == NONE and state != ROOT:
        state = _wide(memory[state + LINK])
        match = _wide(memory[state + LENGTH])
        edge = find_edge(memory, state, token)
    if edge == NONE:
        return _wide(ROOT), _wide(0), _wide(0)
    settle(memory, state)
    target = memory[edge + 1]
    return _wide(target), _wide(match + 1), _wide(memory[target + COUNT])
