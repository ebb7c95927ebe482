"""Comparing by turns: what slows the machine down for a while slows all candidates down, and cancels in ratios."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")


def alternate(candidates: Mapping[Key, Callable[[], Result]], repeats: int) -> dict[Key, list[Result]]:
    """Run each candidate once to warm up, then `repeats` times, one after the other; each turn in reversed order."""
    results: dict[Key, list[Result]] = {name: [] for name in candidates}
    for turn in range(repeats + 1):
        for name in list(candidates)[:: 1 if turn % 2 == 0 else -1]:
            started = time.perf_counter()
            result = candidates[name]()
            label = f"{name}, {f'run {turn} of {repeats}' if turn else 'warm-up'}"
            print(f"{label}: {time.perf_counter() - started:.3f} s", file=sys.stderr, flush=True)
            results[name] += [result] if turn else []
    return results


def median_of(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Median of each number of the runs, within mappings too."""
    return {
        name: median_of([run[name] for run in runs])
        if isinstance(value, Mapping)
        else statistics.median(run[name] for run in runs)
        for name, value in runs[0].items()
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """How many times as fast, with an interval."""

    value: float
    """Median over pairs of runs."""
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def paired_ratio(numerators: Iterable[float], denominators: Iterable[float]) -> Ratio:
    """Median ratio of the seconds of two candidates whose i-th runs were of the same turn.

    The interval covers the median of all runs there could be about 95% of the time: it is between the sorted ratios
    at 0.98 sqrt(n) places (1.96 standard deviations of a binomial count) before and after the middle, or between the
    lowest and the highest where there are few.
    """
    ratios = sorted(float(a / b) for a, b in zip(numerators, denominators, strict=True))
    middle, reach = (len(ratios) - 1) / 2, 0.98 * math.sqrt(len(ratios))
    first = max(0, math.floor(middle - reach))
    return Ratio(value=statistics.median(ratios), low=ratios[first], high=ratios[len(ratios) - 1 - first])
