"""Comparing by turns: rollouts of our engine step by step, and the ratios of what they took."""

import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from srtrl.engine.engine import Engine
from srtrl.engine.options import EngineOptions
from srtrl.model.transformer import Transformer
from srtrl.types import Completion, Request


@dataclass(kw_only=True, slots=True, frozen=True)
class RunTime:
    """One rollout, from the prompts to all tokens on the host."""

    seconds: float
    num_tokens: int
    """Generated tokens."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """What our engine counted; nothing of other decoders."""


class EngineRun:
    """One rollout of an engine, which takes a step when it is told to; only what that takes is its time."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Queue the requests, as `Engine.generate` does.

        Raises:
            ValueError: A request that the engine can never serve.
        """
        self._engine = engine
        self._completions: list[Completion] = []
        engine.take_metrics()
        started = time.perf_counter()
        engine.begin_rollout(requests[0].purpose)
        for request in requests:
            engine.add(request)
        self._seconds = time.perf_counter() - started

    @property
    def num_tokens(self) -> int:
        """Tokens of all steps but the last one, which the engine counts during the next."""
        return self._engine.stats.num_tokens

    @property
    def is_done(self) -> bool:
        """Whether all samples have ended."""
        return not self._engine.has_work

    def step(self) -> None:
        """One decode step."""
        started = time.perf_counter()
        self._completions += self._engine.step()
        self._seconds += time.perf_counter() - started

    def finish(self) -> tuple[RunTime, list[Completion]]:
        """What it took. Where the engine's options state a cost, the seconds are priced by it."""
        assert self.is_done
        started = time.perf_counter()
        self._engine.end_rollout()
        seconds = self._seconds + time.perf_counter() - started
        metrics = self._engine.take_metrics()
        self._engine.take_timeline()
        num_tokens = sum(len(completion.token_ids) for completion in self._completions)
        seconds = metrics.get("engine/priced_seconds", seconds)
        return RunTime(seconds=seconds, num_tokens=num_tokens, metrics=metrics), self._completions


def make_engine(policy: Transformer, options: EngineOptions, requests: Sequence[Request], num_slots: int) -> Engine:
    """An engine for these requests."""
    longest = max(len(request.prompt_token_ids) + request.sampling.max_new_tokens for request in requests)
    return Engine(policy, replace(options, slots=num_slots, max_sequence_tokens=longest))


def take_turns(runs: Sequence[EngineRun]) -> list[tuple[RunTime, list[Completion]]]:
    """Carry all runs to their end: the one with the fewest tokens takes the next decode step.

    All are runs of the same samples, so that each is always at the same part of the work: what slows the machine down
    for a second slows the same share of every run down, and cancels in their ratios.
    """
    waiting = list(runs)
    while waiting:
        last = min(waiting, key=lambda run: run.num_tokens)  # of equals the first
        last.step()
        if last.is_done:
            waiting.remove(last)
    return [run.finish() for run in runs]


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """How many times as fast, with an interval."""

    value: float
    """Median over pairs of runs."""
    low: float
    high: float

    def __str__(self) -> str:
        if self.low == self.high:
            return f"{self.value:.2f}x as fast"
        decimals = 3 if self.high - self.low < 0.1 else 2
        return f"{self.value:.{decimals}f}x as fast ({self.low:.{decimals}f} to {self.high:.{decimals}f})"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Median ratio of the seconds of two candidates, run i of one having been next to run i of the other.

    The interval is between two of the sorted ratios, equally far from both ends: the narrowest that covers the median
    of all runs there could be at least 95% of the time (as a sign test has it), or all of them where they are few.
    """
    ratios = sorted(a / b for a, b in zip(numerators, denominators, strict=True))
    n, num_outside, tail = len(ratios), 0, 0.0
    while 2 * num_outside < n - 1:
        tail += math.comb(n, num_outside) / 2**n  # chance that so few of the runs lie below the median
        if tail > 0.025:
            break
        num_outside += 1
    first = max(0, num_outside - 1)
    return Ratio(value=statistics.median(ratios), low=ratios[first], high=ratios[n - 1 - first])


@dataclass(kw_only=True, slots=True, frozen=True)
class Comparison:
    """What the candidates took of the same work."""

    labels: dict[str, str]
    """What tells this comparison from the others: column of a table -> cell."""
    num_tokens: int
    """Generated tokens of one run, the same for every candidate."""
    runs: dict[str, list[RunTime]]
    """Candidate -> its runs; the i-th runs of all were made side by side."""

    def seconds(self, name: str) -> list[float]:
        """Of each run of a candidate."""
        return [run.seconds for run in self.runs[name]]

    def ratio(self, name: str, to: str) -> Ratio:
        """How many times as fast as `to` the candidate is."""
        return paired_ratio(self.seconds(to), self.seconds(name))

    def mean(self, name: str, metric: str) -> float:
        """Of a candidate's runs that have this metric; NaN where none has."""
        values = [run.metrics[metric] for run in self.runs[name] if metric in run.metrics]
        return statistics.fmean(values) if values else float("nan")

    def to_values(self) -> dict[str, Any]:
        """For programs; ratios are to the first candidate."""
        first, *others = self.runs
        return {
            "labels": self.labels,
            "num_tokens": self.num_tokens,
            "seconds": {name: self.seconds(name) for name in self.runs},
            "metrics": {name: [dict(run.metrics) for run in runs] for name, runs in self.runs.items()},
            "ratios": {name: asdict(self.ratio(name, to=first)) for name in others},
        }


def tell(text: str) -> None:
    """Progress of a benchmark, on standard error."""
    print(text, file=sys.stderr, flush=True)
