"""The choice of draft nodes as Numba kernels: it is part of every step that asks for drafts. See `budget.py`."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import ROOT
from srtrl.engine.calibration import calibrate
from srtrl.engine.step_cost_kernel import read_curve

Array = npt.NDArray[Any]

MIN_GAIN = 0.02
"""Estimates are noisy: drafts must promise so much more than none."""
SLACK = 0.002
"""Of choices that are as good as the best up to this share, the one with the fewest nodes is taken."""
EXPECTED, WORTH, PLAIN, DRAFTED = range(4)
"""What `choose_nodes` says of its choice: see there."""
NUM_OUTCOMES = 4


@numba.njit(cache=True, nogil=True)
def choose_nodes(
    parents: Array,
    scores: Array,
    offsets: Array,
    weights: Array,
    corrections: Array,
    edges: Array,
    curve: Array,
    tail_slope: float,
    verify_seconds: float,
    asked_share: float,
    num_other_rows: int,
    draft_seconds: float,
    trust: float,
    keep: Array,
    outcome: Array,
) -> None:
    """Mark the nodes to verify.

    Args:
        parents: [num_nodes] int32, as in `DraftTrees`.
        scores: [num_nodes] float32, likewise.
        offsets: [B + 1] int64, likewise.
        weights: [B] float64, worth of a token.
        corrections: Of the scores; see `calibrate`.
        edges: [E] int64, as in `read_curve`.
        curve: [2, E] float64, likewise.
        tail_slope: Likewise.
        verify_seconds: What a step with nodes takes beside its rows.
        asked_share: Only so many of the sequences were asked for: each node stands for as many as that makes of it.
        num_other_rows: Rows of prompts.
        draft_seconds: See `_choose`.
        trust: Likewise.
        keep: [num_nodes] bool, written.
        outcome: [NUM_OUTCOMES] float64, written: the sum of the kept nodes' chances; the same, each times the weight of
            its sequence; seconds of the step without nodes; and with the kept ones.
    """
    num_nodes, num_trees = len(parents), len(offsets) - 1
    chances = np.empty(num_nodes, np.float32)
    calibrate(parents, scores, offsets, corrections, chances)
    rows = np.arange(num_nodes + 1) / asked_share + num_trees
    seconds = np.empty(num_nodes + 1)
    read_curve(edges, curve, tail_slope, rows, seconds)
    seconds[1:] += verify_seconds
    with_others = seconds
    if num_other_rows:
        with_others = np.empty(num_nodes + 1)
        read_curve(edges, curve, tail_slope, rows + num_other_rows, with_others)
        with_others[1:] += verify_seconds
    count = _choose(chances, offsets, weights, seconds, with_others, draft_seconds, trust / asked_share, keep)
    expected = worth = 0.0
    for b in range(num_trees):
        for node in range(offsets[b], offsets[b + 1]):
            if keep[node]:
                expected += chances[node]
                worth += weights[b] * chances[node]
    outcome[EXPECTED], outcome[WORTH], outcome[PLAIN], outcome[DRAFTED] = expected, worth, seconds[0], seconds[count]


@numba.njit(cache=True, nogil=True)
def keep_nodes(
    token_ids: Array, parents: Array, scores: Array, offsets: Array, keep: Array, new_offsets: Array
) -> tuple[Array, Array, Array]:
    """Return token ids, parents and scores of some of the nodes, and fill their offsets; parents of kept ones are kept.

    Args:
        token_ids: [num_nodes] int32, as in `DraftTrees`.
        parents: [num_nodes] int32, likewise.
        scores: [num_nodes] float32, likewise.
        offsets: [B + 1] int64, likewise.
        keep: [num_nodes] bool.
        new_offsets: [B + 1] int64, written.
    """
    num_kept = np.count_nonzero(keep)
    new_tokens, new_parents = np.empty(num_kept, np.int32), np.empty(num_kept, np.int32)
    new_scores = np.empty(num_kept, np.float32)
    places = np.empty(len(parents), np.int32)
    count = 0
    for b in range(len(offsets) - 1):
        new_offsets[b] = count
        first = offsets[b]
        for node in range(first, offsets[b + 1]):
            if keep[node]:
                parent = parents[node]
                places[node] = count - new_offsets[b]
                new_parents[count] = ROOT if parent == ROOT else places[first + parent]
                new_tokens[count], new_scores[count] = token_ids[node], scores[node]
                count += 1
    new_offsets[len(offsets) - 1] = count
    return new_tokens, new_parents, new_scores


@numba.njit(cache=True, nogil=True)
def _choose(
    chances: Array,
    offsets: Array,
    weights: Array,
    seconds: Array,
    with_others: Array,
    draft_seconds: float,
    trust: float,
    keep: Array,
) -> int:
    """Mark the nodes of the best step, that of most tokens per second, and return their number.

    Where prompt rows are in the step, their time is spent anyway, and more tokens to share it are no gain: there a node
    is worth it if its token costs less time than it would in a step of the same sequences without prompt rows.

    Args:
        chances: [num_nodes] float32, in [0, 1], of a node never more than of its parent.
        offsets: [B + 1] int64.
        weights: [B] float64, worth of a token.
        seconds: [num_nodes + 1] float64, of a step with so many nodes and no other rows.
        with_others: [num_nodes + 1] float64, with the other rows of this step; `seconds` itself if there are none.
        draft_seconds: What asking takes in each step that verifies drafts. It is spent by now, and still lowers the
            rate that such steps reach: a second is worth fewer tokens, and nodes pay that else would not.
        trust: Factor of the chances.
        keep: [num_nodes] bool, written.
    """
    worths = np.empty(len(chances), np.float32)
    total = 0.0
    for b in range(len(offsets) - 1):
        total += weights[b]
        for node in range(offsets[b], offsets[b + 1]):
            worths[node] = weights[b] * chances[node]
    # Stable: of equals the first comes first, and parents come before their children.
    order = descending_order(worths)
    plain_rate = total / seconds[0]
    best_rate = verified_rate = plain_rate
    worth = total
    for i in range(len(order)):
        worth += trust * worths[order[i]]
        verified_rate = max(verified_rate, worth / seconds[i + 1])
        best_rate = max(best_rate, worth / (seconds[i + 1] + draft_seconds))
    count = 0
    if verified_rate > (1.0 + MIN_GAIN) * plain_rate:
        # Of all counts the best rate's has the largest worth - best_rate x seconds (Dinkelbach 1967).
        values = np.empty(len(order) + 1, np.float64)
        values[0] = worth = total - best_rate * with_others[0]
        for i in range(len(order)):
            worth += trust * worths[order[i]] - best_rate * (with_others[i + 1] - with_others[i])
            values[i + 1] = worth
        if values.max() > values[0] + MIN_GAIN * total:
            while values[count] < values.max() - SLACK * total:
                count += 1
    keep[:] = False
    for i in range(count):
        keep[order[i]] = True
    return count


@numba.njit(cache=True, nogil=True)
def descending_order(values: Array) -> Array:
    """Return the indices that sort `values` [n] float32, at least 0, from the largest; equals keep their order.

    A radix sort of the bits, which are ordered as the values: three passes of 11 bits.
    """
    num_values = len(values)
    keys = ~values.view(np.uint32)
    order = np.arange(num_values).astype(np.int32)
    other = np.empty(num_values, np.int32)
    for shift in (0, 11, 22):
        starts = np.zeros(2049, np.int64)
        for i in range(num_values):
            starts[((keys[i] >> shift) & 2047) + 1] += 1
        for digit in range(2048):
            starts[digit + 1] += starts[digit]
        for i in range(num_values):
            digit = (keys[order[i]] >> shift) & 2047
            other[starts[digit]] = order[i]
            starts[digit] += 1
        order, other = other, order
    return order
