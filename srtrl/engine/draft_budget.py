"""Draft control: what a decode step costs, and which draft nodes it verifies.

`StepCost` is the measured time of a step by its number of rows, the drafting that each step does included.
`choose_nodes` takes, of all draft nodes of all sequences, the best ones up to the number at which expected tokens per
second are highest; that may be none.

None of this changes a token, only the time it takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.step_inputs import Int64Array

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

MAX_ROWS = 2048
"""Largest step whose cost is followed; a larger one is never drafted for."""
FLOOR_SHARE = 0.65
"""The drafter need not make nodes whose score is below this share of the lowest verified one. 0.5: drafting for 256
sequences took 0.85 ms instead of 0.25. 0.8 lost 7% at 8 sequences: nodes beyond the next bucket were never proposed."""


class StepCost:
    """Seconds of a decode step by its number of rows."""

    def __init__(self, edges: Sequence[int] = (), *, points: Sequence[tuple[int, float]] = ()) -> None:
        """A cost that is unknown until `probe`; or fixed, if `points` (rows, seconds) state that of another machine.

        `edges`: ascending row counts at which a step's padding ends; steps of one bucket cost the same.
        """
        self.is_fixed = bool(points)
        self._edges = np.array([rows for rows, _ in points] if points else edges, np.int64)
        self._seconds = np.array([seconds for _, seconds in points] if points else [np.nan] * len(edges))
        self._scale = 1.0
        self._num_records = 0
        self.table: Float64Array = np.empty(0)
        """[MAX_ROWS + 1], seconds of a step by its rows, never falling; empty while nothing is known."""
        if points:
            self._make_table()

    @property
    def is_known(self) -> bool:
        """Whether anything was measured or stated."""
        return len(self.table) > 0

    def probe(self, time_step: Callable[[int], float], *, num_slots: int, max_rows: int = MAX_ROWS) -> None:
        """Time steps of doubling row counts, each twice, from 1 row up to where rows cost their full price.

        `time_step`: seconds of a step of this many rows, at most `max_rows`.
        """
        rows, before = 1, np.inf
        while rows <= min(MAX_ROWS, max_rows):
            seconds = min(time_step(rows), time_step(rows))
            self._seconds[self._bucket(rows)] = seconds
            if rows > 2 * num_slots and seconds > 1.8 * before:
                break  # proportional from here on
            rows, before = 2 * rows, seconds
        self._make_table()

    def record(self, num_rows: int, seconds: float) -> None:
        """A step of this many rows took this long."""
        if self.is_fixed or not self.is_known or num_rows > MAX_ROWS:
            return
        bucket = self._bucket(num_rows)
        known = self._seconds[bucket]
        # The table is some steps old: comparing with it would apply a change of the scale again in each step.
        expected = self.table[num_rows] if np.isnan(known) else self._scale * known
        ratio = min(max(seconds / expected, 0.5), 2.0)  # one disturbed step must not spoil a bucket
        self._scale *= ratio**0.1  # all steps: the machine is busy, contexts are long
        value = ratio * expected / self._scale
        self._seconds[bucket] = value if np.isnan(known) else known + 0.05 * (value - known)
        self._num_records += 1
        if self._num_records % 16 == 0:
            self._make_table()

    def seconds(self, num_rows: int) -> float:
        """Seconds of a step; beyond `MAX_ROWS` in proportion."""
        if num_rows > MAX_ROWS:
            return float(self.table[-1]) * num_rows / MAX_ROWS
        return float(self.table[num_rows])

    def rows_within(self, num_rows: int, slowdown: float) -> int:
        """Largest number of rows by which a step of `num_rows` becomes slower by at most this share."""
        if num_rows >= MAX_ROWS:
            return 0
        limit = (1 + slowdown) * self.table[num_rows]
        return int(np.searchsorted(self.table, limit, side="right")) - 1 - num_rows

    def _bucket(self, num_rows: int) -> int:
        return min(int(np.searchsorted(self._edges, num_rows)), len(self._edges) - 1)

    def _make_table(self) -> None:
        known = ~np.isnan(self._seconds)
        # What disturbs a step makes it slower: no step takes longer than one with more rows.
        rows, seconds = self._edges[known], np.minimum.accumulate(self._seconds[known][::-1])[::-1]
        if rows[-1] < MAX_ROWS:  # beyond the last known bucket as steeply as before it
            slope = seconds[-1] / rows[-1]
            if len(rows) > 1:
                slope = (seconds[-1] - seconds[-2]) / (rows[-1] - rows[-2])
            rows = np.append(rows, MAX_ROWS)
            seconds = np.append(seconds, seconds[-1] + slope * (MAX_ROWS - rows[-2]))
        every = np.arange(MAX_ROWS + 1)
        if self.is_fixed:
            self.table = np.interp(every, rows, seconds)
        else:  # rows are padded to the end of their bucket
            at_edges = self._scale * np.interp(self._edges, rows, seconds)
            self.table = at_edges[np.minimum(np.searchsorted(self._edges, every), len(at_edges) - 1)]


def choose_nodes(trees: DraftTrees, table: Float64Array, *, num_other_rows: int) -> tuple[Int64Array, float]:
    """Choose the best nodes of all trees, as many as give the most expected tokens per second.

    Of all nodes, by falling score, as many as maximise

        (B + expected accepted tokens) / T(B + other rows + n).

    Args:
        trees: One for each of B sequences, nodes in order of falling score.
        table: T, see `StepCost.table`.
        num_other_rows: Rows of the step that are neither roots of these trees nor their nodes.

    Returns:
        [B], the number of nodes of each tree, its first ones; and their lowest score, 1 without any.
    """
    num_rows = len(trees) + num_other_rows
    sizes = np.zeros(len(trees), np.int64)
    max_nodes = min(trees.num_nodes, MAX_ROWS - num_rows)
    if max_nodes <= 0:
        return sizes, 1.0
    costs = table[num_rows : num_rows + max_nodes + 1]
    order = np.argsort(-trees.scores, kind="stable")  # here: Numba takes two seconds to compile a sort
    return sizes, _choose(trees.scores, order, trees.offsets, costs, sizes)


@numba.njit(cache=True, nogil=True)
def _choose(scores: Array, order: Array, offsets: Array, costs: Array, sizes: Array) -> float:
    """Fill `sizes`, see `choose_nodes`; returns the lowest score of the chosen nodes.

    Scores fall within a tree, so that of the nodes in the `order` of falling scores the best ones are its first.
    """
    owners = np.empty(len(scores), np.int64)
    for b in range(len(sizes)):
        for node in range(offsets[b], offsets[b + 1]):
            owners[node] = b
    tokens = float(len(sizes))
    best, best_rate = 0, tokens / costs[0]
    for number in range(1, len(costs)):
        tokens += scores[order[number - 1]]
        if tokens / costs[number] > best_rate:
            best, best_rate = number, tokens / costs[number]
    lowest = 1.0
    for node in order[:best]:
        sizes[owners[node]] += 1
        lowest = min(lowest, scores[node])
    return lowest


class DraftControl:
    """How many nodes each tree of one engine may have, and which of them are verified."""

    def __init__(self, cost: StepCost, *, fixed: int | None) -> None:
        """The control of an engine that has decoded nothing yet.

        Args:
            cost: Seconds of the engine's steps, known before the first step where `fixed` is None.
            fixed: Draft nodes of a sequence in every step; None: as many as pay.
        """
        self.cost = cost
        self.fixed = fixed
        self.score_floor = 0.0
        """Nodes of a lower score are not worth a row of the coming step: they were too far from it in the last one."""

    def max_nodes(self, limit: int) -> int:
        """Largest number of draft nodes of a sequence in the coming step."""
        return limit if self.fixed is None else min(self.fixed, limit)

    def choose(self, trees: DraftTrees, num_other_rows: int) -> Int64Array:
        """Choose the number of nodes of each tree that are verified; sets the score floor of the next step."""
        if self.fixed is not None:
            return trees.sizes
        sizes, lowest = choose_nodes(trees, self.cost.table, num_other_rows=num_other_rows)
        num_chosen = int(sizes.sum())
        if num_chosen == trees.num_nodes:  # the floor may hide nodes that are worth a row
            self.score_floor /= 2
        elif num_chosen:
            self.score_floor = FLOOR_SHARE * lowest
        return sizes


def cut_trees(trees: DraftTrees, sizes: Int64Array, num_trees: int) -> DraftTrees:
    """The first sizes[b] nodes of each tree (trees again: parents come first), then empty ones, `num_trees` in all."""
    offsets = np.zeros(num_trees + 1, np.int64)
    sizes.cumsum(out=offsets[1 : len(sizes) + 1])
    offsets[len(sizes) + 1 :] = offsets[len(sizes)]
    chosen = trees if offsets[-1] == trees.num_nodes else trees.pick(trees.offsets[:-1], sizes)
    return replace(chosen, offsets=offsets)
