"""Rollouts of our engine that go on step by step, so that several engines can take turns at every decode step."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from srtrl.engine.engine import Engine
from srtrl.types import Completion, Request


@dataclass(kw_only=True, slots=True, frozen=True)
class RunTime:
    """One rollout of a workload, from the prompts to all tokens on the host."""

    seconds: float
    num_tokens: int
    """Generated tokens, padding apart."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What our engine counted; nothing of other decoders."""


class EngineRun:
    """One rollout of an engine that has nothing else to do; only what `step` and the two ends take is its time."""

    def __init__(self, engine: Engine, requests: Sequence[Request], run_ahead: Sequence[Request] = ()) -> None:
        """Queue the requests, as `Engine.generate` does.

        Raises:
            ValueError: A request that the engine can never serve.
        """
        assert not engine.has_work, "the engine is at work on another rollout"
        self._engine = engine
        self._completions: list[Completion] = []
        engine.take_metrics()
        started = time.perf_counter()
        for request in [*requests, *run_ahead]:
            engine.add(request)
        self._seconds = time.perf_counter() - started

    @property
    def is_done(self) -> bool:
        """Whether all samples have ended."""
        return not self._engine.has_work

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._engine.stats.num_tokens

    def step(self) -> None:
        """One decode step."""
        started = time.perf_counter()
        self._completions += self._engine.step()
        self._seconds += time.perf_counter() - started

    def finish(self) -> tuple[RunTime, list[Completion]]:
        """Drop what idle slots still decode. Where the engine's options state a cost, the seconds are priced by it."""
        assert self.is_done
        started = time.perf_counter()
        self._engine.end_rollout()
        seconds = self._seconds + time.perf_counter() - started
        metrics = self._engine.take_metrics()
        self._engine.take_timeline()
        if self._engine.options.cost_points is not None:
            seconds = metrics["engine/priced_seconds"]
        num_tokens = sum(len(completion.token_ids) for completion in self._completions)
        return RunTime(seconds=seconds, num_tokens=num_tokens, metrics=metrics), self._completions


def take_turns(runs: Sequence[EngineRun]) -> list[tuple[RunTime, list[Completion]]]:
    """Carry all runs to their end: whoever has the fewest tokens takes the next decode step.

    All are runs of the same samples, so that each is at the same place all the time: what slows the machine down for a
    second slows the same share of every run down, and cancels in their ratios. Who is next depends on tokens alone,
    never on the clock.
    """
    waiting = list(runs)
    while waiting:
        behind = min(waiting, key=lambda run: run.num_tokens)  # of equals the first
        behind.step()
        if behind.is_done:
            waiting.remove(behind)
    return [run.finish() for run in runs]
