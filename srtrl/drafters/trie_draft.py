"""Draft trees from texts, best first: a node's score is the estimated chance that it is accepted.

The places that follow the text before a node are taken together by their match: these are its contexts. The rule is
Witten-Bell back-off: the longest context first, each takes the share
places / (places + DISTINCT_WEIGHT x distinct) x match / (match + MATCH_WEIGHT) of the probability mass that is left and
spreads it over the tokens of its places, by count; distinct: different tokens of these and of longer contexts. What the
last two tokens, then the last one, are followed by in texts of other prompts (`shared_ngrams`) counts as contexts of
length 2 and 1. The longest context with a known distribution of the policy, at its newest place, comes before all
others, with probabilities in place of counts. What can change no score by `NEGLIGIBLE` times `min_score` is left out.
"""

import math
from typing import NamedTuple

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.children import (
    Children,
    Row,
    add_child,
    find_child,
    gumbel_of,
    make_children,
    scale_shares,
    share_out,
)
from srtrl.drafters.distributions import NUM_TOP, UNKNOWN, probability
from srtrl.drafters.draft_tree import DraftTrees
from srtrl.drafters.frontier import Frontier, make_frontier, put_candidate
from srtrl.drafters.shared_ngrams import ENTRIES, NO_TOKEN, TOTAL, UNIT, WAYS, Table, find_context
from srtrl.drafters.texts import (
    NO_PENDING,
    NONE,
    START_TOKEN,
    Found,
    Int32Array,
    Int64Array,
    Pending,
    Sought,
    Texts,
    find_places,
    make_found,
    seek,
)
from srtrl.drafters.trust import (
    DISTRIBUTION,
    NUM_CELLS,
    Trust,
    blend_trust,
    cell_of,
    column_of,
    learn_trust,
)
from srtrl.model.cpu_threads import use_kernel_threads
from srtrl.model.kernels import inlined, inner
from srtrl.model.noise import hash_row

Float32Array = npt.NDArray[np.float32]

MAX_BLENDED = 4
"""Maximum number of contexts of the prompt's texts that are blended for a node."""
DISTINCT_WEIGHT = 0.5
"""Reduction of the trust in a context for each distinct token that followed it."""
MATCH_WEIGHT = 2.0
"""Length of a match that is trusted by half."""
NEGLIGIBLE = 0.25
"""Share of `min_score`: in replays the nodes that a smaller one brought cost as much as they gave."""
SMALLEST_SCORE = 1e-6
LIFT = 0.125
"""Share of a negligible score that a token of a distribution needs: the noise may lift it."""
LEARNED_MASS = 0.002
"""Children with less are not listed where trust is learned."""
LEARN_EVERY = 4
"""One draft in this many teaches trust: each costs about as much as growing the accepted nodes."""
WORK_PER_ROW = 5_000
"""Cost of a row's draft, in the unit of `use_kernel_threads`: about 3 microseconds."""


class Noise(NamedTuple):
    """The noise that decides the next tokens beside the policy, known before it has run: see `srtrl.model.noise`."""

    rng_keys: npt.NDArray[np.uint64]
    """[slots]."""
    positions: Int64Array
    """[slots], index of the next token in the response."""
    is_known: npt.NDArray[np.bool_]
    """[slots]; where it is not, counts and the formula alone decide."""


NO_NOISE = Noise(np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.bool_))
"""Noise of no slot."""


class Basis(NamedTuple):
    """The sources of scores, beside the texts."""

    shared: Table
    """See `shared_ngrams`; without rows where nothing is known."""
    trust: Trust
    """See `srtrl.drafters.trust`; for slots whose noise is known."""
    noise: Noise
    """The noise of all slots."""


class Nodes(NamedTuple):
    """Nodes of trees, in the order in which they were drafted."""

    token_ids: Int32Array
    parents: Int32Array
    depths: Int32Array
    scores: Float32Array


@inlined
def _add_distribution(
    texts: Texts, found: Found, node: int, basis: Basis, row: Row, negligible: float, children: Children
) -> tuple[int, float]:
    """Share mass by the first known distribution, and the noise; returns the number of children and the mass left."""
    first = 0
    while first < found.nums[node] and texts.known[found.places[node, first], 0] == UNKNOWN:
        first += 1
    if first == found.nums[node]:
        return 0, 1.0
    known, match = texts.known[found.places[node, first]], found.matches[node, first]
    cell = DISTRIBUTION + column_of(match, match == row.num_passed)
    num, listed, total = 0, 0.0, 0.0
    for number in range(NUM_TOP):
        chance = probability(known, 0, number)
        if chance > 0 and chance >= LIFT * negligible:
            add_child(children, num, known[number])
            children.noise[num] = gumbel_of(row, children.token_ids[num])
            children.shares[0, num] = chance * math.exp(children.noise[num])
            listed += chance
            total += children.shares[0, num]
            num += 1
    part = 0.0
    if num > 0:
        part = min(listed, 1.0) * blend_trust(basis.trust, cell, match / (match + MATCH_WEIGHT))
        scale_shares(children, 0, num, cell, part / total)
    return num, 1.0 - part


@inlined
def _blend_contexts(
    texts: Texts, found: Found, node: int, basis: Basis, row: Row, negligible: float, children: Children
) -> tuple[int, int, float]:
    """Share the probability mass among contexts and their children; returns their numbers and the mass left."""
    num, mass, distinct, i = 0, 1.0, 0, 0
    if row.is_known:
        num, mass = _add_distribution(texts, found, node, basis, row, negligible, children)
    num_contexts = int(num > 0)
    for _ in range(MAX_BLENDED):
        if i == found.nums[node] or mass < negligible:
            break
        match, begin, shares = found.matches[node, i], i, children.shares[num_contexts]
        for child in range(num):
            shares[child] = 0.0
        while i < found.nums[node] and found.matches[node, i] == match:
            child = find_child(children, num, found.tokens[node, i])
            if child == num:
                add_child(children, num, found.tokens[node, i])
                shares[num] = 0.0
                num += 1
            distinct += children.counts[child] == 0
            children.counts[child] += 1
            shares[child] += 1.0
            i += 1
        more = i - begin
        cell = cell_of(more, match, match == row.num_passed)
        part = more / (more + DISTINCT_WEIGHT * distinct) * (match / (match + MATCH_WEIGHT))
        part = mass * (blend_trust(basis.trust, cell, part) if row.is_known else part)
        share_out(children, num_contexts, num, row, more, cell, part)
        num_contexts += 1
        mass -= part
    return num, num_contexts, mass


@inlined
def _add_shared(
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
    shared, trust = basis.shared, basis.trust
    for length in (2, 1):
        entries = find_context(shared, before_last if length == 2 else NO_TOKEN, last)
        if entries == NONE:
            continue
        total = shared[entries, TOTAL]
        distinct = 0
        for way in range(WAYS):
            distinct += shared[entries, ENTRIES + 2 * way + 1] > 0
        cell = NUM_CELLS - length
        part = total / (total + DISTINCT_WEIGHT * distinct * UNIT) * (length / (length + MATCH_WEIGHT))
        part = mass * (blend_trust(trust, cell, part) if row.is_known else part)
        shares, listed = children.shares[num_contexts], 0
        for i in range(num):
            shares[i] = 0.0
        for way in range(WAYS):
            token, count = shared[entries, ENTRIES + 2 * way], shared[entries, ENTRIES + 2 * way + 1]
            i = find_child(children, num, token)
            if count == 0 or (i == num and part * count < negligible * total):
                continue
            if i == num:
                add_child(children, num, token)
                num += 1
            shares[i] = count
            listed += count
        if listed:
            share_out(children, num_contexts, num, row, listed, cell, part * listed / total)
            num_contexts += 1
        mass -= part
    return num, num_contexts


@inlined
def _row_at(noise: Noise, slot: int, num_passed: int, depth: int) -> Row:
    """The row of a slot's sample this many tokens after its next one, of which `num_passed` are before that."""
    num_passed += depth
    if slot < len(noise.is_known) and noise.is_known[slot]:
        return Row(hash_row(noise.rng_keys[slot], noise.positions[slot] + depth), True, num_passed)
    return Row(np.uint64(0), False, num_passed)


@inlined
def _find_children(
    texts: Texts,
    sought: Sought,
    found: Found,
    depth: int,
    above: int,
    node: int,
    basis: Basis,
    row: Row,
    negligible: float,
    children: Children,
) -> tuple[int, int]:
    """Find the children of a node, see `find_places`; returns the numbers of children and contexts."""
    find_places(texts, sought, found, depth, above, node)
    num, num_contexts, mass = _blend_contexts(texts, found, node, basis, row, negligible, children)
    if len(basis.shared) > 0 and mass >= negligible:
        begin = len(found.nums) - 1 - depth
        before_last = found.window[begin + 1] if sought.size + depth > 1 else START_TOKEN
        return _add_shared(before_last, found.window[begin], basis, row, mass, negligible, children, num, num_contexts)
    return num, num_contexts


@inner
def _grow(
    texts: Texts,
    pending: Pending,
    slot: int,
    basis: Basis,
    min_score: float,
    children: Children,
    frontier: Frontier,
    found: Found,
    nodes: Nodes,
) -> int:
    """Fill a tree with what may follow a slot's text, best first; returns its number of nodes."""
    sought, room = seek(texts, pending, slot, found), len(nodes.token_ids)
    score, depth, parent, waiting = 1.0, 0, NONE, 0
    for node in range(room):
        ancestor = node - 1
        for i in range(room - depth, room):
            found.window[i] = nodes.token_ids[ancestor]
            ancestor = nodes.parents[ancestor]
        row, above = _row_at(basis.noise, slot, sought.num_passed, depth), parent + 1 if depth > 0 else NONE
        negligible = NEGLIGIBLE * min_score / score  # of the node's own mass
        num, _ = _find_children(texts, sought, found, depth, above, node, basis, row, negligible, children)
        for i in range(num):
            child_score = score * min(children.weights[i], 1.0)
            if child_score >= min_score:
                waiting = put_candidate(frontier, waiting, child_score, children.token_ids[i], node - 1)
        if waiting == 0:
            return node
        waiting -= 1
        score, parent = frontier.scores[waiting], frontier.numbers[waiting, 1]
        depth = 1 if parent == NONE else nodes.depths[parent] + 1
        nodes.token_ids[node], nodes.parents[node] = frontier.numbers[waiting, 0], parent
        nodes.depths[node], nodes.scores[node] = depth, score
    return room


@numba.njit(parallel=True, cache=True, nogil=True)
def _draft_rows(
    texts: Texts,
    pending: Pending,
    slots: Int64Array,
    rooms: Int64Array,
    shared: Table,
    trust: Trust,
    noise: Noise,
    min_score: float,
    token_ids: Int32Array,
    parents: Int32Array,
    scores: Float32Array,
    sizes: Int64Array,
) -> None:
    """Draft for the texts of some slots, in parallel; row b's tree has room from `rooms[b]` to `rooms[b + 1]`.

    A parallel loop can have no tuple of tuples from outside, such as `Basis`.
    """
    for row in numba.prange(len(slots)):
        begin, end = rooms[row], rooms[row + 1]
        sizes[row] = 0
        if begin == end:
            continue
        children, frontier, found = make_children(), make_frontier(end - begin), make_found(end - begin)
        nodes = Nodes(token_ids[begin:end], parents[begin:end], np.empty(end - begin, np.int32), scores[begin:end])
        basis = Basis(shared, trust, noise)
        sizes[row] = _grow(texts, pending, slots[row], basis, min_score, children, frontier, found, nodes)


def draft_trees(
    texts: Texts,
    slots: Int64Array,
    max_nodes: Int64Array,
    basis: Basis,
    min_score: float,
    pending: Pending = NO_PENDING,
) -> DraftTrees:
    """Draft continuations of the texts of some slots.

    Args:
        texts: With those of all slots.
        slots: [B].
        max_nodes: [B], the largest number of nodes of each tree.
        basis: What scores come from.
        min_score: Smallest score of a node.
        pending: What follows the texts.
    """
    if not len(slots):
        return DraftTrees.empty(0)
    use_kernel_threads(len(slots) * WORK_PER_ROW)
    rooms = np.concatenate([[0], max_nodes.cumsum()])
    (token_ids, parents), scores = np.empty((2, rooms[-1]), np.int32), np.empty(rooms[-1], np.float32)
    sizes = np.empty(len(slots), np.int64)
    min_score = max(min_score, SMALLEST_SCORE)
    _draft_rows(texts, pending, slots, rooms, *basis, min_score, token_ids, parents, scores, sizes)
    return DraftTrees(token_ids=token_ids, parents=parents, scores=scores, offsets=rooms).pick(rooms[:-1], sizes)


@inner
def _learn_token(trust: Trust, children: Children, num_contexts: int, child: int) -> None:
    """Learn from the child that was sampled; one that is not among them was decided by none of the contexts."""
    left = 1.0
    for context in range(num_contexts):
        is_listed = child < children.ends[context]
        decided = children.shares[context, child] / children.weights[child] if is_listed else 0.0
        learn_trust(trust, children.cells[context], left, decided)
        left = max(left - decided, 0.0)  # a difference of roundings is no weight


@numba.njit(cache=True, nogil=True)
def learn_rows(
    texts: Texts,
    slots: Int64Array,
    teaches: npt.NDArray[np.bool_],
    token_ids: Int32Array,
    offsets: Int64Array,
    basis: Basis,
) -> None:
    """Learn trust from sampled tokens that are to be appended: those of row b to the text of `slots[b]`.

    It follows the path that a draft would have had to take, in one row in `LEARN_EVERY` of those that are to teach: the
    noise of all of them is known.
    """
    noise, room = basis.noise, np.max(offsets[1:] - offsets[:-1])
    children, found = make_children(), make_found(room)
    for b in range(len(slots)):
        slot = slots[b]
        chosen = (noise.rng_keys[slot] + np.uint64(noise.positions[slot])) % np.uint64(LEARN_EVERY) == 0
        if not teaches[b] or not chosen:
            continue
        sought = seek(texts, NO_PENDING, slot, found)
        for depth in range(offsets[b + 1] - offsets[b]):
            token, row = token_ids[offsets[b] + depth], _row_at(noise, slot, sought.num_passed, depth)
            num, num_contexts = _find_children(
                texts, sought, found, depth, depth - 1, depth, basis, row, LEARNED_MASS, children
            )
            child = find_child(children, num, token)
            _learn_token(basis.trust, children, num_contexts, child)
            if child == num:
                break
            found.window[room - 1 - depth] = token
