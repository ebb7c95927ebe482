"""How many times as fast, from runs that alternate: the mean log ratio of the pairs and its interval."""

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


@dataclass(kw_only=True, slots=True, frozen=True)
class Ratio:
    """How many times as fast, with a 95% interval where there are two pairs or more."""

    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        interval = "" if self.low is None or self.high is None else f" ({self.low:.2f} to {self.high:.2f})"
        return f"{self.value:.2f}x as fast{interval}"


def paired_ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Ratio of the times of two contenders, run i of one having been next to run i of the other.

    The geometric mean of the ratios of the pairs; the interval is Student's t of their logarithms. What slows the
    machine down for a while slows both of a pair and cancels.
    """
    logs = [math.log(a / b) for a, b in zip(numerators, denominators, strict=True)]
    mean = statistics.fmean(logs)
    if len(logs) == 1:
        return Ratio(value=math.exp(mean), low=None, high=None)
    quantile = _T_975[min(len(logs) - 1, len(_T_975)) - 1]
    margin = quantile * statistics.stdev(logs) / math.sqrt(len(logs))
    return Ratio(value=math.exp(mean), low=math.exp(mean - margin), high=math.exp(mean + margin))
