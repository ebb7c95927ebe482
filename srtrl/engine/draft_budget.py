"""Draft control: what a decode step costs, which draft nodes it verifies, and whether drafts pay at all.

Three small parts. `StepCost` is the measured time of a step by its number of rows. `choose_nodes` takes, of all draft
nodes of all sequences, the best ones up to the number at which expected tokens per second are highest. `DraftGate`
compares wall-clock tokens per second with and without drafts. Gates are kept apart by class: purpose (training never
mixes with evaluation), whether the prompts have history, and the power of two of the number of sequences.

None of this changes a token, only the time it takes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numba
import numpy as np
import numpy.typing as npt

from srtrl.drafters.draft_tree import DraftTrees
from srtrl.engine.step_inputs import Int64Array
from srtrl.types import Purpose

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

MAX_ROWS = 2048
"""Largest step whose cost is followed; a larger one is never drafted for."""
MIN_GAIN = 1.05
"""Drafting continues while it gives this many times the tokens per second."""
TRIAL_STEPS = 4
FIRST_PAUSE, LAST_PAUSE = 16, 1024
"""Steps between two trials: doubling while trials fail."""
CHECK_EVERY = 64
"""While drafting is worth it, one step in this many has no drafts, so that the comparison stays current."""
FLOOR_SHARE = 0.65
"""The drafter need not make nodes whose score is below this share of the lowest verified one. 0.5: drafting for 256
sequences took 0.85 ms instead of 0.25. 0.8 lost 7% at 8 sequences: nodes beyond the next bucket were never proposed."""

RateClass = tuple[Purpose, int, int]
"""Purpose, share of the samples with history in quarters, and power of two of the number of sequences."""


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
        rows, seconds = self._edges[known], np.maximum.accumulate(self._seconds[known])
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


def choose_nodes(
    trees: DraftTrees, table: Float64Array, *, num_other_rows: int, draft_seconds: float
) -> tuple[Int64Array, float]:
    """Choose the best nodes of all trees, as many as give the most expected tokens per second.

    Of all nodes, by falling score, as many as maximise

        (B + expected accepted tokens) / (T(B + other rows + n) + seconds spent on drafting).

    Args:
        trees: One for each of B sequences, nodes in order of falling score.
        table: T, see `StepCost.table`.
        num_other_rows: Rows of the step that are neither roots of these trees nor their nodes.
        draft_seconds: What drafting takes of such a step.

    Returns:
        [B], the number of nodes of each tree, its first ones; and their lowest score, 1 without any.
    """
    num_rows = len(trees) + num_other_rows
    sizes = np.zeros(len(trees), np.int64)
    max_nodes = min(trees.num_nodes, MAX_ROWS - num_rows)
    if max_nodes <= 0:
        return sizes, 1.0
    costs = table[num_rows : num_rows + max_nodes + 1] + draft_seconds
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


@dataclass(slots=True)
class _Rate:
    """Sequences, accepted draft nodes and seconds of steps of one kind; old steps fade."""

    sequences: float = 0.0
    accepted: float = 0.0
    seconds: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return (self.sequences + self.accepted) / self.seconds if self.seconds else 0.0

    def add(self, num_sequences: int, num_accepted: int, seconds: float) -> None:
        self.sequences = 0.9 * self.sequences + num_sequences
        self.accepted = 0.9 * self.accepted + num_accepted
        self.seconds = 0.9 * self.seconds + seconds


class DraftGate:
    """Whether to draft, for steps of one class: tokens per second with and without drafts, by the wall clock.

    A drafted step that gives less than `MIN_GAIN` tokens per sequence cannot be worth it. So it is not, even if the
    clock of a busy machine shows a gain.
    """

    def __init__(self) -> None:
        self._with, self._without = _Rate(), _Rate()
        self._is_on = False
        self._num_on = 0
        """Steps recorded while drafting pays."""
        self._num_trial = 0
        """Steps recorded of the current trial."""
        self._cooldown_steps = 2
        """Steps without drafts until the next trial; at first there is nothing to compare with."""
        self._pause = FIRST_PAUSE

    @property
    def wants_drafts(self) -> bool:
        """Whether the coming step is drafted for."""
        return (self._num_on + 1) % CHECK_EVERY != 0 if self._is_on else self._cooldown_steps <= 0

    def record(self, *, drafted: bool, num_sequences: int, num_accepted: int, seconds: float) -> None:
        """A step of such a class took this time, for this many sequences and accepted draft nodes."""
        (self._with if drafted else self._without).add(num_sequences, num_accepted, seconds)
        accepts = self._with.accepted > (MIN_GAIN - 1) * self._with.sequences
        pays = accepts and self._with.tokens_per_second > MIN_GAIN * self._without.tokens_per_second
        if self._is_on:
            self._num_on += 1
            if drafted and not pays:
                self._stop()
        elif not drafted:
            self._cooldown_steps -= 1
        else:
            self._num_trial += 1
            if self._num_trial == TRIAL_STEPS:
                self._num_trial = 0
                if pays:
                    self._is_on, self._pause = True, FIRST_PAUSE
                else:
                    self._stop()
                    self._pause = min(2 * self._pause, LAST_PAUSE)

    def _stop(self) -> None:
        """Decode without drafts for a while; the next trial is compared anew."""
        self._is_on, self._cooldown_steps, self._with = False, self._pause, _Rate()


@dataclass(slots=True)
class _Learned:
    """State learned from the steps of one class; old steps fade."""

    gate: DraftGate = field(default_factory=DraftGate)
    score_floor: float = 0.0
    """Nodes of a lower score were too far from being verified in the last step."""


class DraftControl:
    """The three parts for one engine."""

    def __init__(self, cost: StepCost, *, fixed: int | None) -> None:
        """The control of an engine that has decoded nothing yet.

        Args:
            cost: Seconds of the engine's steps.
            fixed: Draft nodes of a sequence in every step; None: as many as pay.
        """
        self.cost = cost
        self.fixed = fixed
        self._learned: dict[RateClass, _Learned] = {}
        self._purpose: Purpose = "generate"
        self._num_requests = self._num_known = 0
        self._draft_seconds = 0.0
        """Time of drafting in a drafted step, per sequence."""

    def begin_rollout(self, purpose: Purpose) -> None:
        """The next steps are of a new rollout; its requests follow."""
        self._purpose = purpose
        self._num_requests = self._num_known = 0

    def add_request(self, *, has_history: bool) -> None:
        """One more sample, whose prompt has rollouts to draft from or not."""
        self._num_requests += 1
        self._num_known += has_history

    def max_nodes(self, num_sequences: int, limit: int) -> int:
        """Largest number of draft nodes of a sequence in the coming step: 0 if it is not drafted for."""
        if not num_sequences:
            return 0
        if self.fixed is not None:
            return min(self.fixed, limit)
        return limit if self.cost.is_known and self._of_class(num_sequences).gate.wants_drafts else 0

    def score_floor(self, num_sequences: int) -> float:
        """Nodes of a lower score are not worth a row of the coming step."""
        return 0.0 if self.fixed is not None else self._of_class(num_sequences).score_floor

    def choose(self, trees: DraftTrees, num_sequences: int, num_other_rows: int) -> Int64Array:
        """Choose the number of nodes of each tree that are verified; sets the score floor of the next step.

        `num_sequences`: the first trees; the others are empty.
        """
        if self.fixed is not None:
            return trees.sizes
        learned = self._of_class(num_sequences)
        sizes, lowest = choose_nodes(
            trees,
            self.cost.table,
            num_other_rows=num_other_rows,
            draft_seconds=self._draft_seconds * num_sequences,
        )
        num_chosen = int(sizes.sum())
        if num_chosen == trees.num_nodes:  # the floor may hide nodes that are worth a row
            learned.score_floor /= 2
        elif num_chosen:
            learned.score_floor = FLOOR_SHARE * lowest
        return sizes

    def record(
        self,
        *,
        trees: DraftTrees,
        num_accepted: Int64Array,
        num_sequences: int,
        num_rows: int,
        drafted: bool,
        draft_seconds: float,
        seconds: float,
    ) -> None:
        """Learn from a step with few rows of prompts, or none.

        Args:
            trees: As verified.
            num_accepted: [B], accepted nodes of each.
            num_sequences: Primaries, the first trees.
            num_rows: Of the whole step.
            drafted: Whether `propose` was called.
            draft_seconds: What proposing and choosing took.
            seconds: Of the whole step, these included; if a cost is stated, by that cost.
        """
        self.cost.record(num_rows, seconds - draft_seconds)
        if self.fixed is not None or not num_sequences:
            return
        learned, num_accepted = self._of_class(num_sequences), num_accepted[:num_sequences]
        if drafted:
            self._draft_seconds += 0.1 * (draft_seconds / num_sequences - self._draft_seconds)
        accepted = int(num_accepted.sum())
        learned.gate.record(drafted=drafted, num_sequences=num_sequences, num_accepted=accepted, seconds=seconds)

    def _of_class(self, num_sequences: int) -> _Learned:
        history = round(4 * self._num_known / max(1, self._num_requests))
        return self._learned.setdefault((self._purpose, history, num_sequences.bit_length()), _Learned())


def cut_trees(trees: DraftTrees, sizes: Int64Array, num_trees: int) -> DraftTrees:
    """The first sizes[b] nodes of each tree (trees again: parents come first), then empty ones, `num_trees` in all."""
    offsets = np.zeros(num_trees + 1, np.int64)
    sizes.cumsum(out=offsets[1 : len(sizes) + 1])
    offsets[len(sizes) + 1 :] = offsets[len(sizes)]
    chosen = trees if offsets[-1] == trees.num_nodes else trees.pick(trees.offsets[:-1], sizes)
    return replace(chosen, offsets=offsets)
