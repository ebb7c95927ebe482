"""What drafts save: the decode steps that the same samples take without drafts, and the time of a step by its rows."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

import numpy as np

from srtrl.engine.batch import Sample
from srtrl.engine.rows import Int64Array

KEPT_WEIGHT = 0.9
"""Weight of the measured steps of a rollout in the next one: enough steps to see a row's price in their noise."""


@dataclass(slots=True)
class _Stay:
    """What a sample does in a slot: all of it, or a turn, or the part before or after it was preempted."""

    rng_key: int
    begin: int
    """Steps before it, with drafts."""
    num_steps: int = 0
    """Without drafts: the steps in which its prompt was computed, and one for each sampled token."""


class PlainSteps:
    """Counts the decode steps of one rollout as they are without drafts, where a sample gets one token from each.

    Stays begin in the order in which they began with drafts and not before that time, each in the slot that is free
    first, the stays of a sample one after the other. Where each sample has a slot and is there from the start, this is
    what a rollout without drafts does, step for step. Else it is an estimate: without drafts samples may wait longer or
    shorter for pages, tools, prompts of others that are computed first, and grades that decide what is drawn. The
    background has no stays, for without drafts there is none: its rows beside others are a price of drafts. Its steps
    alone fill a wait, and do not count.
    """

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._stays: list[_Stay] = []
        self._open: dict[int, _Stay] = {}
        """By slot."""
        self._num_more = np.zeros(num_slots, np.int64)
        """[slots], tokens of the open stay beyond one for each of its decode steps."""
        self._num_rows: list[int] = []
        """Of each step with drafts, those of the prompts left out: they are the same without."""
        self._products, self._sums = np.zeros((3, 3)), np.zeros(3)
        """Least squares of the measured seconds: sums of x x^T and of x seconds, x being (1, rows, rows of prompts)."""

    def start(self, samples: Iterable[Sample]) -> None:
        """These took their slots."""
        for sample in samples:
            if not sample.is_background:
                self._open[sample.slot] = _Stay(sample.request.rng_key, len(self._num_rows))
                self._stays.append(self._open[sample.slot])
                self._num_more[sample.slot] = 0

    def add_step(self, slots: Int64Array, num_new: Int64Array, num_more_rows: int) -> None:
        """The primaries in `slots` got `num_new` tokens each; `num_more_rows`: of drafts and the background."""
        if self._open:
            self._num_rows.append(len(self._open) + num_more_rows)
            self._num_more[slots] += num_new - 1

    def end(self, slots: Sequence[int]) -> None:
        """Samples, or those of the background, left these slots."""
        for slot in self._open.keys() & set(slots):
            stay = self._open.pop(slot)
            stay.num_steps = len(self._num_rows) - stay.begin + int(self._num_more[slot])

    def add_seconds(self, num_rows: int, num_prompt_rows: int, seconds: float) -> None:
        """A step of these rows took this long, without what it spent on drafts."""
        x = np.array([1.0, num_rows, num_prompt_rows])
        self._products += np.outer(x, x)
        self._sums += seconds * x

    def take(self) -> tuple[int, float]:
        """At the end of a rollout: its steps without drafts, and the seconds by which its own steps took less.

        A step takes a + b x rows + c x rows of prompts, with drafts and without: least squares of the measured steps
        give a, b and c, the older the less their weight. NaN while none was measured.
        """
        free, ready = [0] * self._num_slots, Counter[int]()
        changes = Counter[int]()
        for stay in self._stays:
            start = max(heappop(free), ready[stay.rng_key], stay.begin)
            ready[stay.rng_key] = end = start + stay.num_steps
            heappush(free, end)
            changes[start] += 1
            changes[end] -= 1
        num_rows = np.cumsum([changes[step] for step in range(max(free))])
        saved = float("nan")
        if self._products[0, 0]:
            fit = np.linalg.lstsq(self._products, self._sums, rcond=None)[0]
            of_step, of_row = np.maximum(fit[:2], 0.0).tolist()
            saved = of_step * (len(num_rows) - len(self._num_rows)) + of_row * (
                int(num_rows.sum()) - sum(self._num_rows)
            )
            self._products *= KEPT_WEIGHT
            self._sums *= KEPT_WEIGHT
        self._stays, self._num_rows = [], []
        return len(num_rows), saved
