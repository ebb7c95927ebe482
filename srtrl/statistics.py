"""Means over problems with 95% confidence intervals, and pass@k."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Z_95 = 1.959963984540054
"""The 97.5% quantile of the normal distribution."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Estimate:
    """A share, with its 95% confidence interval."""

    value: float
    low: float
    high: float


def estimate(scores: Sequence[float]) -> Estimate:
    """The mean of one score in [0, 1] for each problem; problems are the independent units (`confidence_interval`)."""
    low, high = confidence_interval(scores)
    return Estimate(value=fmean(scores), low=low, high=high)


def confidence_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of the problems' scores.

    Where every score is 0 or 1 (one sample a problem, pass@N of N samples): the Wilson score interval (Wilson 1927;
    Brown, Cai and DasGupta 2001, section 3.1.1). Else mean +- z s / sqrt(n) over the n problems' scores, the standard
    error clustered by problem of Miller 2024, "Adding Error Bars to Evals" (arXiv 2411.00640), section 2.2,
    clipped to [0, 1]. Where the scores do not vary (or there is one problem) s does not estimate the error, and
    Wilson's interval for n problems is used, which is wider.
    """
    mean, n = fmean(scores), len(scores)
    spread = stdev(scores) if n > 1 else 0.0
    if spread == 0.0 or all(score in (0.0, 1.0) for score in scores):
        return wilson_interval(mean, n)
    low, high = mean_interval(scores)
    return max(0.0, low), min(1.0, high)


def mean_interval(scores: Sequence[float]) -> tuple[float, float]:
    """95% confidence interval of the mean of any numbers, one for each problem: mean +- z s / sqrt(n).

    Without spread, or for one problem, it is the mean alone, which does not say that there is no error.
    """
    mean, n = fmean(scores), len(scores)
    half = Z_95 * (stdev(scores) if n > 1 else 0.0) / math.sqrt(n)
    return mean - half, mean + half


def wilson_interval(share: float, n: int) -> tuple[float, float]:
    """Wilson's 95% score interval of a proportion `share` seen in `n` independent trials."""
    z2 = Z_95 * Z_95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Chance that at least one of k of a problem's samples is right, estimated without bias from `num_samples` of them.

    1 - C(n - c, k) / C(n, k): Chen et al. 2021, "Evaluating Large Language Models Trained on Code" (arXiv 2107.03374),
    equation 1; with whole numbers, so exact but for the last division.
    """
    assert 1 <= k <= num_samples
    assert 0 <= num_correct <= num_samples
    return 1 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def pass_at_ks(num_samples: int) -> list[int]:
    """The k that are reported for N > 1 samples: 2, 4, ... and N itself (pass@1 is the accuracy)."""
    return sorted({2**power for power in range(1, num_samples.bit_length())} | {num_samples} - {1})


def macro_average(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over benchmarks, each of the same weight, of any size.

    The benchmarks are fixed and their problems independent, so squared errors add. The two arms of each benchmark's
    interval stand for its error below and above, which differ near 0% and 100% (MOVER: Zou and Donner 2008,
    "Construction of confidence limits about effect measures", section 2); for symmetric intervals this is the standard
    error sqrt(sum of se^2) / number of benchmarks.
    """
    value = fmean(estimate.value for estimate in estimates)
    below = math.hypot(*(estimate.value - estimate.low for estimate in estimates)) / len(estimates)
    above = math.hypot(*(estimate.high - estimate.value for estimate in estimates)) / len(estimates)
    return Estimate(value=value, low=max(0.0, value - below), high=min(1.0, value + above))
