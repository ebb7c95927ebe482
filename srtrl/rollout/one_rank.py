"""The part of each rollout that this process decodes: with one rank all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from srtrl.types import Prompt, Request, Rollout

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine

RequestsOf = Callable[[Sequence[tuple[int, Prompt]]], list[Request]]
"""The requests of draws, see `Collector.requests`."""


class OneRank:
    """Decodes all samples of each rollout, and counts. A subclass decodes a part; its ranks share the counters."""

    def __init__(self) -> None:
        self._counts = Counter[str]()

    def rollout(self) -> AbstractContextManager[None]:
        """Begin a rollout, with all counters at zero, and end it."""
        self._counts.clear()
        return nullcontext()

    def add(self, name: str, amount: int = 1) -> int:
        """Count; returns the value before that."""
        self._counts[name] += amount
        return self._counts[name] - amount

    def read(self, name: str) -> int:
        """The value of a counter; with several ranks it may be slightly old."""
        return self._counts[name]

    def deal(self, engine: Engine, requests: Sequence[Request]) -> Sequence[Request]:
        """Those of all samples with which this process begins."""
        return requests

    def claim(self, count: int) -> Sequence[Request]:
        """At most `count` more of the samples that `deal` has left: fewer only where no rank has one left."""
        return ()

    def report_progress(self, busy_seconds: float = 0.0) -> None:
        """This process decodes samples (then with the seconds that took), or waits for its own tools and graders."""

    def wait_for_others(self, *, sleeps: bool) -> bool:
        """There is no sample until others are further: wait a moment, or not at all if it does not sleep.

        Returns:
            Whether to go on: no other rank has failed.
        """
        raise AssertionError("one process waits for others")

    def exchange(self, engine: Engine, rollouts: Sequence[Rollout], requests_of: RequestsOf) -> Sequence[Rollout]:
        """The rollouts of other ranks, after all are decoded; the engine's drafter has learned from them."""
        return ()

    def take_metrics(self) -> dict[str, float]:
        """How rollouts were shared since the last call, under `engine/`; called on all ranks."""
        return {}
