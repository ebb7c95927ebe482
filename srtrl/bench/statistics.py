"""How many times as fast, from pairs of runs: the mean log ratio, its interval, and how many runs make that narrow."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

# fmt: off
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)
# fmt: on
"""97.5% points of Student's t with 1 to 30 degrees of freedom; beyond, the last serves (at most 4% too wide)."""

NARROW = 0.1
"""Intervals of less width are shown with three decimals."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """How many times as fast, with a 95% interval where there are two pairs or more."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        if self.low is None or self.high is None:
            return f"{self.value:.2f}x as fast"
        decimals = 3 if self.high - self.low < NARROW else 2
        return f"{self.value:.{decimals}f}x as fast ({self.low:.{decimals}f} to {self.high:.{decimals}f})"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float], *, num_pilot: int | None = None) -> Ratio:
    """Ratio of the times of two contenders, run i of one having been next to run i of the other.

    The geometric mean of the ratios of the pairs; the interval is Student's t of their logarithms. What slows the
    machine down for a while slows both of a pair and cancels.

    Args:
        numerators: Seconds of one contender's runs.
        denominators: Those of the other's.
        num_pilot: Where the number of runs was decided by the spread of the first so many, the interval must be made
            from that spread (see `runs_needed`); None: the number was fixed beforehand, and all tell the spread.
    """
    logs = _log_ratios(numerators, denominators)
    mean = statistics.fmean(logs)
    pilot = logs[:num_pilot]
    if len(pilot) == 1:
        return Ratio(value=math.exp(mean), low=None, high=None)
    margin = _quantile(len(pilot)) * statistics.stdev(pilot) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - margin), high=math.exp(mean + margin))


def runs_needed(numerators: Sequence[float], denominators: Sequence[float], *, precision: float) -> int:
    """Runs after which the 95% interval reaches at most `precision` (a share of the ratio) to either side.

    The two-stage rule of Stein (1945, Annals of Mathematical Statistics 16:243): the pilot runs given here say how many
    there will be, once, and the interval is then t x s / sqrt(n) with the *pilot's* s and degrees of freedom. The mean
    of normal values does not depend on their spread, so that the interval covers as often as it says, which it would
    not if one looked after each run and stopped where it has just become narrow enough.
    """
    logs = _log_ratios(numerators, denominators)
    assert len(logs) >= 2, "one run has no spread"
    margin = math.log1p(precision)
    return max(len(logs), math.ceil((_quantile(len(logs)) * statistics.stdev(logs) / margin) ** 2))


def _log_ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    return [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]


def _quantile(num_values: int) -> float:
    """97.5% point of Student's t for the mean of so many values."""
    return _T_975[min(num_values - 1, len(_T_975)) - 1]
