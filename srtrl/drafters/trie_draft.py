"""Draft trees from token tries, best first: a node's score is the estimated chance that it is accepted.

Rule `BLEND`: Witten-Bell back-off. A node's context and its suffixes, the longest first, each take the share
total / (total + distinct_weight x distinct) x match / (match + match_weight) of the probability mass that is left and
spread it over the tokens that followed them, by count; of a suffix only the occurrences count that are not the longer
context's. What the last two tokens, then the last one, are followed by in texts of other prompts (`shared_ngrams`)
counts as contexts of length 2 and 1. The longest context with a known distribution of the policy at its newest
occurrence comes before all others, with probabilities in place of counts. What can change no score by `NEGLIGIBLE`
times `min_score` is left out.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.children import (
    MAX_CHILDREN,
    Children,
    Row,
    add_child,
    find_child,
    log_exponential,
    make_children,
    scale_shares,
    share_out,
)
from srtrl.drafters.distributions import NUM_TOP, probability
from srtrl.drafters.draft_tree import DraftTrees, ranges
from srtrl.drafters.frontier import Frontier, make_frontier, put_candidate
from srtrl.drafters.shared_ngrams import ENTRIES, NO_TABLE, NO_TOKEN, TOTAL, UNIT, WAYS, Table, find_context
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
    NEWEST,
    NONE,
    NUM_PASSED,
    ROOT,
    STATE,
    TARGET,
    Cursors,
    Int32Array,
    Int64Array,
    edges_end,
    find_edge,
    follow,
    locate,
    num_edges,
    open_memory,
)
from srtrl.drafters.suffix_automaton import TOTAL as STATE_TOTAL
from srtrl.drafters.trust import (
    DISTRIBUTION,
    NUM_CELLS,
    POWER,
    Trust,
    blend_trust,
    cell_of,
    column_of,
    is_distribution,
    learn_noise,
    learn_trust,
    make_trust,
)
from srtrl.model.cpu_threads import use_kernel_threads
from srtrl.model.kernels import inlined, inner
from srtrl.model.noise import hash_row

Float32Array = npt.NDArray[np.float32]

NEGLIGIBLE = 0.25
"""Share of `min_score`: in replays the nodes that a smaller one brought cost as much as they gave."""
SMALLEST_SCORE = 1e-6
LIFT = 0.125
"""Share of what is negligible that a token of a distribution needs: the noise may lift it."""
LEARNED_MASS = 0.002
"""Children with less are not listed where trust is learned."""
LEARN_EVERY = 4
"""One draft in this many teaches trust: each costs about as much as growing the accepted nodes."""
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


NO_TRUST = make_trust()
"""Where no noise is known."""
BLEND = Rule(max_contexts=4, distinct_weight=0.5, match_weight=2.0)


class Noise(NamedTuple):
    """What decides the next tokens beside the policy, and is known before it has run: see `srtrl.model.noise`."""

    rng_keys: npt.NDArray[np.uint64]
    """[slots]."""
    positions: Int64Array
    """[slots], index of the next token in the response."""
    is_known: npt.NDArray[np.bool_]
    """[slots]; where it is not, counts and the formula alone decide."""


NO_NOISE = Noise(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
"""Of no slot."""


class Basis(NamedTuple):
    """What scores come from, beside the tries."""

    rule: Rule
    """Such as `BLEND`."""
    shared: Table = NO_TABLE
    """See `shared_ngrams`; without rows where nothing is known."""
    trust: Trust = NO_TRUST
    """See `srtrl.drafters.trust`; for slots whose noise is known."""
    noise: Noise = NO_NOISE
    """Of all slots."""


class Nodes(NamedTuple):
    """Nodes of trees, in the order in which they were drafted."""

    token_ids: Int32Array
    parents: Int32Array
    depths: Int32Array
    scores: Float32Array


@inlined
def _find_distribution(memory: Int32Array, state: int, match: int) -> tuple[int, int]:
    """Longest context that has a distribution at its newest occurrence: its state, `ROOT` if none has, and length."""
    while state != ROOT and memory[state + NEWEST] == 0:
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return state, match


@inlined
def _add_distribution(
    memory: Int32Array, state: int, match: int, basis: Basis, row: Row, negligible: float, children: Children
) -> tuple[int, float]:
    """Share mass by the distribution of a context, and the noise; returns the number of children and the mass left."""
    cell = DISTRIBUTION + column_of(match, match == row.num_passed)
    num, listed, total, power, start = 0, 0.0, 0.0, basis.trust[cell, POWER], memory[state + NEWEST]
    for number in range(NUM_TOP):
        chance = probability(memory, start, number)
        if chance > 0 and chance >= LIFT * negligible:
            add_child(children, num, memory[start + number], NONE, 0)
            children.noise[num] = log_exponential(row, children.token_ids[num])
            children.logprobs[num] = math.log(chance)
            children.shares[0, num] = math.exp(max(power, 1.0) * children.logprobs[num] - power * children.noise[num])
            listed += chance
            total += children.shares[0, num]
            num += 1
    part = 0.0
    if num > 0:
        part = min(listed, 1.0) * blend_trust(basis.trust, cell, match / (match + basis.rule.match_weight))
        scale_shares(children, 0, num, cell, part / total)
    return num, 1.0 - part


@inlined
def _context_with(memory: Int32Array, state: int, match: int, children: Children, i: int) -> tuple[int, int]:
    """State and length of the longest context that ends with a child's token, after a node with these."""
    if children.states[i] == NONE:
        return follow(memory, state, match, children.token_ids[i])
    return children.states[i], children.matches[i]


@inlined
def _blend_contexts(
    memory: Int32Array, state: int, match: int, basis: Basis, row: Row, negligible: float, children: Children
) -> tuple[int, int, float]:
    """Share the probability mass among contexts and their children; returns their numbers and the mass left.

    What follows a context also follows its suffixes, where its occurrences are not to count again. A token that is new
    in a suffix is listed if it is not negligible by itself.
    """
    rule, trust = basis.rule, basis.trust
    num, mass, before = 0, 1.0, 0
    if row.is_known:
        known, length = _find_distribution(memory, state, match)
        if known != ROOT:
            num, mass = _add_distribution(memory, known, length, basis, row, negligible, children)
    num_contexts = int(num > 0)
    for _ in range(rule.max_contexts):
        if state == ROOT or mass < negligible:
            break
        more, distinct = memory[state + STATE_TOTAL] - before, num_edges(memory, state)
        if more > 0:
            cell = cell_of(more, match, match == row.num_passed)
            part = more / (more + rule.distinct_weight * distinct) * (match / (match + rule.match_weight))
            part = mass * (blend_trust(trust, cell, part) if row.is_known else part)
            shares, listed, num_known, num_listed = children.shares[num_contexts], 0, num, 0
            for i in range(num):
                edge = find_edge(memory, state, children.token_ids[i])
                count = 0 if edge == NONE else memory[edge + COUNT]
                shares[i] = count - children.counts[i]
                listed += count - children.counts[i]
                children.counts[i] = count
                num_listed += edge != NONE
            if distinct > num_listed:
                for edge in range(memory[state + BLOCK], edges_end(memory, state), EDGE):
                    token, count = memory[edge], memory[edge + COUNT]
                    if token == EMPTY or part * count < negligible * more or num == MAX_CHILDREN:
                        continue
                    if find_child(children, num_known, token) == num_known:
                        add_child(children, num, token, memory[edge + TARGET], match + 1)
                        shares[num] = count
                        children.counts[num] = count
                        listed += count
                        num += 1
            if listed:
                share_out(children, num_contexts, num, row, trust, listed, cell, part * listed / more)
                num_contexts += 1
            mass -= part
            before += more
        state = memory[state + LINK]
        match = memory[state + LENGTH]
    return num, num_contexts, mass


@inlined
def _add_shared(
    memory: Int32Array,
    before_last: int,
    last: int,
    basis: Basis,
    row: Row,
    mass: float,
    negligible: float,
    children: Children,
    num: int,
    num_contexts: int,
) -> tuple[int, int]:
    """Spread `mass` over what the last two tokens, then the last one, were followed by in all prompts' texts."""
    shared, rule, trust = basis.shared, basis.rule, basis.trust
    for length in (2, 1):
        entries = find_context(shared, before_last if length == 2 else NO_TOKEN, last)
        if entries == NONE:
            continue
        total = shared[entries, TOTAL]
        distinct = 0
        for way in range(WAYS):
            distinct += shared[entries, ENTRIES + 2 * way + 1] > 0
        cell = NUM_CELLS - length
        part = total / (total + rule.distinct_weight * distinct * UNIT) * (length / (length + rule.match_weight))
        part = mass * (blend_trust(trust, cell, part) if row.is_known else part)
        shares, listed = children.shares[num_contexts], 0
        for i in range(num):
            shares[i] = 0.0
        for way in range(WAYS):
            token, count = shared[entries, ENTRIES + 2 * way], shared[entries, ENTRIES + 2 * way + 1]
            i = find_child(children, num, token)
            if count == 0 or (i == num and (part * count < negligible * total or num == MAX_CHILDREN)):
                continue
            if i == num:
                edge = find_edge(memory, ROOT, token)
                add_child(children, num, token, ROOT if edge == NONE else memory[edge + TARGET], edge != NONE)
                num += 1
            shares[i] = count
            listed += count
        if listed:
            share_out(children, num_contexts, num, row, trust, listed, cell, part * listed / total)
            num_contexts += 1
        mass -= part
    return num, num_contexts


@inlined
def _row_at(noise: Noise, cursor: Int32Array, slot: int, depth: int) -> Row:
    """The row of a slot's sample this many tokens after its next one."""
    num_passed = int(cursor[NUM_PASSED] + depth)
    if slot < len(noise.is_known) and noise.is_known[slot]:
        return Row(hash_row(noise.rng_keys[slot], noise.positions[slot] + depth), True, num_passed)
    return Row(np.uint64(0), False, num_passed)


@inner
def _grow(
    memory: Int32Array,
    cursor: Int32Array,
    slot: int,
    basis: Basis,
    min_score: float,
    children: Children,
    frontier: Frontier,
    nodes: Nodes,
) -> int:
    """Fill a tree with what may follow a cursor's match, best first; returns its number of nodes."""
    match = cursor[MATCH]
    state = locate(memory, cursor[STATE], match)
    before_last, last = cursor[BEFORE_LAST], cursor[LAST]
    score, depth, waiting = 1.0, 0, 0
    for node in range(len(nodes.token_ids)):
        row = _row_at(basis.noise, cursor, slot, depth)
        negligible = NEGLIGIBLE * min_score / score  # of the node's own mass
        num, num_contexts, mass = _blend_contexts(memory, state, match, basis, row, negligible, children)
        if len(basis.shared) > 0 and mass >= negligible:
            num, num_contexts = _add_shared(
                memory, before_last, last, basis, row, mass, negligible, children, num, num_contexts
            )
        for i in range(num):
            child_score = score * min(children.weights[i], 1.0)
            if child_score >= min_score:
                child, length = _context_with(memory, state, match, children, i)
                waiting = put_candidate(frontier, waiting, child_score, children.token_ids[i], node - 1, child, length)
        if waiting == 0:
            return node
        waiting -= 1
        score, numbers = frontier.scores[waiting], frontier.numbers
        last, parent = numbers[waiting, 0], numbers[waiting, 1]
        state, match = numbers[waiting, 2], numbers[waiting, 3]
        before_last = cursor[LAST] if parent == NONE else nodes.token_ids[parent]
        depth = 1 if parent == NONE else nodes.depths[parent] + 1
        nodes.token_ids[node], nodes.parents[node] = last, parent
        nodes.depths[node], nodes.scores[node] = depth, score
    return len(nodes.token_ids)


@numba.njit(parallel=True, cache=True, nogil=True)
def _draft_rows(
    cursors: Cursors,
    slots: Int64Array,
    rooms: Int64Array,
    rule: Rule,
    shared: Table,
    trust: Trust,
    noise: Noise,
    min_score: float,
    token_ids: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    sizes: Int64Array,
) -> None:
    """Draft for the cursors of some slots, in parallel; row b's tree has room from `rooms[b]` to `rooms[b + 1]`.

    A parallel loop can have no tuple of tuples from outside, such as `Basis`.
    """
    for row in numba.prange(len(slots)):
        slot, begin, end = slots[row], rooms[row], rooms[row + 1]
        memory = open_memory(cursors.addresses[slot], cursors.sizes[slot])
        children, frontier = make_children(), make_frontier(end - begin)
        nodes = Nodes(token_ids[begin:end], parents[begin:end], np.empty(end - begin, np.int32), scores[begin:end])
        basis = Basis(rule, shared, trust, noise)
        sizes[row] = _grow(memory, cursors.rows[slot], slot, basis, min_score, children, frontier, nodes)


def draft_trees(
    cursors: Cursors, slots: Int64Array, max_nodes: Int64Array, basis: Basis, min_score: float
) -> DraftTrees:
    """Draft what follows the matches of some cursors.

    Args:
        cursors: Of all slots.
        slots: [B].
        max_nodes: [B], the largest number of nodes of each tree.
        basis: What scores come from.
        min_score: Smallest score of a node.
    """
    if not len(slots):
        return DraftTrees.empty(0)
    use_kernel_threads(len(slots) * WORK_PER_ROW)
    rooms = np.concatenate([[0], max_nodes.cumsum()])
    (token_ids, parents), scores = np.empty((2, rooms[-1]), np.int32), np.empty(rooms[-1], np.float32)
    sizes = np.empty(len(slots), np.int64)
    min_score = max(min_score, SMALLEST_SCORE)
    _draft_rows(cursors, slots, rooms, *basis, min_score, token_ids, parents, scores, sizes)
    nodes, offsets = ranges(rooms[:-1], sizes), np.concatenate([[0], sizes.cumsum()])
    return DraftTrees(token_ids=token_ids[nodes], parents=parents[nodes], scores=scores[nodes], offsets=offsets)


@inlined
def _slope(trust: Trust, row: Row, children: Children, context: int, i: int) -> float:
    """Derivative of the log of a child's share, before it is scaled, by the exponent of a context."""
    gumbel, cell = -log_exponential(row, children.token_ids[i]), children.cells[context]
    return gumbel + children.logprobs[i] if is_distribution(cell) and trust[cell, POWER] >= 1 else gumbel


@inner
def _learn_token(trust: Trust, row: Row, children: Children, num_contexts: int, child: int) -> None:
    """Learn from the child that was sampled; one that is not among them was decided by none of the contexts."""
    left = 1.0
    for context in range(num_contexts):
        shares, end = children.shares[context], children.ends[context]
        decided = shares[child] / children.weights[child] if child < end else 0.0
        learn_trust(trust, children.cells[context], left, decided)
        left = max(left - decided, 0.0)  # a difference of roundings is no weight
        if decided > 0 and end > 1:
            total, mean, square = 0.0, 0.0, 0.0
            for i in range(end):
                slope = _slope(trust, row, children, context, i)
                total += shares[i]
                mean += shares[i] * slope
                square += shares[i] * slope * slope
            mean /= total
            gradient = _slope(trust, row, children, context, child) - mean
            information = decided * (square / total - mean * mean)
            learn_noise(trust, children.cells[context], decided * gradient, information)


@numba.njit(cache=True, nogil=True)
def learn_rows(
    cursors: Cursors,
    slots: Int64Array,
    teaches: npt.NDArray[np.bool_],
    token_ids: Int32Array,
    offsets: Int64Array,
    basis: Basis,
) -> None:
    """Learn trust from sampled tokens that the cursors have not passed yet: those of row b follow `slots[b]`.

    It follows the path that a draft would have had to take, in one row in `LEARN_EVERY` of those that are to teach: the
    noise of all of them is known.
    """
    children, noise = make_children(), basis.noise
    for b in range(len(slots)):
        slot = slots[b]
        chosen = (noise.rng_keys[slot] + np.uint64(noise.positions[slot])) % np.uint64(LEARN_EVERY) == 0
        if not teaches[b] or not chosen:
            continue
        memory, cursor = open_memory(cursors.addresses[slot], cursors.sizes[slot]), cursors.rows[slot]
        match = cursor[MATCH]
        state = locate(memory, cursor[STATE], match)
        before_last, last = cursor[BEFORE_LAST], cursor[LAST]
        for i in range(offsets[b], offsets[b + 1]):
            row = _row_at(noise, cursor, slot, i - offsets[b])
            num, num_contexts, mass = _blend_contexts(memory, state, match, basis, row, LEARNED_MASS, children)
            if len(basis.shared) > 0:
                num, num_contexts = _add_shared(
                    memory, before_last, last, basis, row, mass, LEARNED_MASS, children, num, num_contexts
                )
            child = find_child(children, num, token_ids[i])
            _learn_token(basis.trust, row, children, num_contexts, child)
            if child == num:
                break
            state, match = _context_with(memory, state, match, children, child)
            before_last, last = last, token_ids[i]
