"""Trees that are drafted ahead, while a device computes: for the case that what a draft thinks most likely is sampled.

Of each tree that is being verified the most likely path is followed to its end, and one token further, which a draft
from there thinks most likely. The next tree is drafted after these tokens. If they are sampled, it is ready; if others
are, what the drafter needs to read is at least in the processor's cache.
"""

from typing import NamedTuple

import numba
import numpy as np

from srtrl.drafters.draft_tree import ROOT, DraftTrees
from srtrl.drafters.texts import NO_PENDING, NONE, Int32Array, Int64Array, Pending, Texts
from srtrl.drafters.trie_draft import Basis, draft_trees


class Foreseen(NamedTuple):
    """Trees, and the tokens after which each was drafted."""

    slots: Int64Array
    """[F]."""
    trees: DraftTrees
    """F of them."""
    after: Pending
    """By slot."""


NOTHING = Foreseen(np.zeros(0, np.int64), DraftTrees.empty(0), NO_PENDING)
"""No tree."""


@numba.njit(cache=True, nogil=True)
def _best_paths(token_ids: Int32Array, parents: Int32Array, offsets: Int64Array, paths: Int32Array) -> Int64Array:
    """Write the most likely path of each tree, one after the other; returns their offsets, [B + 1]."""
    ends = np.zeros(len(offsets), np.int64)
    num = 0
    for b in range(len(offsets) - 1):
        last = ROOT
        for node in range(offsets[b], offsets[b + 1]):  # of the children of a node the first is the most likely one
            if parents[node] == last:
                paths[num], last = token_ids[node], node - offsets[b]
                num += 1
        ends[b + 1] = num
    return ends


def foresee(
    texts: Texts, slots: Int64Array, trees: DraftTrees, max_nodes: Int64Array, basis: Basis, min_score: float
) -> Foreseen:
    """Draft after the most likely path of each tree that is being verified, and the token after it.

    Args:
        texts: With those of all slots, and all tokens that were sampled so far.
        slots: [B].
        trees: B of them.
        max_nodes: [B].
        basis: What scores come from.
        min_score: Smallest score of a node.
    """
    paths = np.empty(trees.num_nodes, np.int32)
    offsets = _best_paths(trees.token_ids, trees.parents, trees.offsets, paths)
    after = _pending(paths, offsets, slots, len(texts.slots))
    nexts = draft_trees(texts, slots, np.minimum(max_nodes, 1), _later(basis, after), 0.0, after)
    is_known = nexts.sizes > 0
    after = _pending(
        np.insert(paths, offsets[1:][is_known], nexts.token_ids),
        offsets + np.concatenate([[0], is_known.cumsum()]),
        slots,
        len(texts.slots),
    )
    trees = draft_trees(texts, slots, max_nodes * is_known, _later(basis, after), min_score, after)
    return Foreseen(slots, trees, after)


def _pending(token_ids: Int32Array, offsets: Int64Array, slots: Int64Array, num_slots: int) -> Pending:
    """As if the paths of some slots had been sampled."""
    spans = np.zeros((num_slots, 2), np.int64)
    spans[slots, 0], spans[slots, 1] = offsets[:-1], offsets[1:]
    return Pending(token_ids, spans)


def _later(basis: Basis, after: Pending) -> Basis:
    """The noise where a path has ended."""
    num = len(basis.noise.positions)
    positions = basis.noise.positions + (after.spans[:num, 1] - after.spans[:num, 0])
    return basis._replace(noise=basis.noise._replace(positions=positions))


@numba.njit(cache=True, nogil=True)
def find_taken(foreseen_slots: Int64Array, after: Pending, slots: Int64Array, sampled: Pending) -> Int64Array:
    """[B], the number of the tree that was drafted after what was sampled last for a slot; `NONE` where there is none.

    Args:
        foreseen_slots: [F].
        after: See `Foreseen`.
        slots: [B].
        sampled: By slot, not empty for those that were drafted for.
    """
    numbers, taken = np.full(len(sampled.spans), NONE), np.full(len(slots), NONE)
    for number in range(len(foreseen_slots)):
        numbers[foreseen_slots[number]] = number
    for b in range(len(slots)):
        slot = slots[b]
        if numbers[slot] == NONE:
            continue
        begin, end = sampled.spans[slot]
        other_begin, other_end = after.spans[slot]
        if other_end - other_begin == end - begin:
            same = 0
            while same < end - begin and sampled.token_ids[begin + same] == after.token_ids[other_begin + same]:
                same += 1
            if same == end - begin:
                taken[b] = numbers[slot]
    return taken


def combine(drafted: DraftTrees, foreseen: DraftTrees, taken: Int64Array, max_nodes: Int64Array) -> DraftTrees:
    """The trees of B slots: the foreseen ones that are `taken`, cut to `max_nodes`, and the others as drafted."""
    both = DraftTrees(
        token_ids=np.concatenate([drafted.token_ids, foreseen.token_ids]),
        parents=np.concatenate([drafted.parents, foreseen.parents]),
        scores=np.concatenate([drafted.scores, foreseen.scores]),
        offsets=np.concatenate([drafted.offsets, drafted.num_nodes + foreseen.offsets[1:]]),
    )
    numbers = np.where(taken == NONE, np.arange(len(taken)), len(drafted) + taken)
    return both.pick(both.offsets[numbers], np.minimum(both.sizes[numbers], max_nodes))
