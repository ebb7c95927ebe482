"""The arithmetic of `step_cost.py` as Numba kernels: it is part of every step with drafts, and of some without."""

from typing import Any

import numba
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LEAST_SECONDS = 1e-9
"""No step costs less."""


@numba.njit(cache=True, nogil=True)
def learn_cost(
    edges: Array,
    probed: Array,
    is_stair: Array,
    rests: Array,
    seen: Array,
    weights: Array,
    covariance: Array,
    drifts: Array,
    bounds: Array,
    num_rows: int,
    context_tokens: float,
    has_drafts: bool,
    seconds: float,
    clip: float,
    noise: float,
    prior_steps: float,
    most_steps: float,
) -> None:
    """Learn from a step: the coefficients, and what they leave of its bucket's cost. See `StepCost` for the model.

    Args:
        edges: [E] int64, ascending.
        probed: [E] float64, timed seconds.
        is_stair: [E] bool, whether a bucket costs about the same at all of its rows.
        rests: [E] float64, mean rest of the steps seen, as a share of the cost; updated.
        seen: [E] float64, steps; updated.
        weights: [5] float64: scale, fixed, per row, per token, and what draft nodes add; updated.
        covariance: [5, 5] of them; updated.
        drifts: See `follow_cost`.
        bounds: Likewise.
        num_rows: Of the step.
        context_tokens: Tokens that its rows read.
        has_drafts: Whether draft nodes are among them.
        seconds: What it took.
        clip: It counts as at most so many times the estimate, or so many times less.
        noise: Standard deviation of a step's seconds, as a share of them.
        prior_steps: Steps without any rest that are counted with those seen.
        most_steps: A bucket's rest is averaged over so many.
    """
    bucket = min(int(np.searchsorted(edges, num_rows)), len(edges) - 1)
    timed = probed[bucket]
    if not is_stair[bucket]:
        timed = np.interp(float(num_rows), edges, probed) * max(1.0, num_rows / edges[-1])
    features = np.empty(5)
    features[0], features[1], features[2], features[3], features[4] = timed, 1.0, num_rows, context_tokens, has_drafts
    # By the model itself: the whole curve, made monotone, is for those who choose; this is every step's work.
    verify = weights[4] * has_drafts
    rest = _shrunk(rests[bucket], seen[bucket], prior_steps)
    estimate = max((features @ weights - verify) * (1.0 + rest) + verify, LEAST_SECONDS)
    seconds = min(max(seconds, estimate / clip), estimate * clip)
    follow_cost(weights, covariance, drifts, bounds, features, seconds, (noise * estimate) ** 2)
    verify = weights[4] * has_drafts
    model = max(features @ weights - verify, LEAST_SECONDS)
    seen[bucket] = min(seen[bucket] + 1.0, most_steps)
    rests[bucket] += ((seconds - verify) / model - 1.0 - rests[bucket]) / seen[bucket]


@numba.njit(cache=True, nogil=True, forceinline=True)
def _shrunk(rest: float, seen: float, prior_steps: float) -> float:
    """A mean rest of so many steps, and of others beside them without any."""
    return rest * seen / (seen + prior_steps)


@numba.njit(cache=True, nogil=True, forceinline=True)
def follow_cost(
    weights: Array, covariance: Array, drifts: Array, bounds: Array, features: Array, seconds: float, variance: float
) -> None:
    """One step of a Kalman filter for coefficients that wander (Kalman 1960, with the identity as transition).

    Args:
        weights: [F] float64, the coefficients; updated.
        covariance: [F, F] of them; updated.
        drifts: [F], variance that each gains from step to step.
        bounds: [F], least value of each.
        features: [F]; weights times features is the estimate of `seconds`.
        seconds: What was measured.
        variance: Of the measurement.
    """
    size = len(weights)
    for i in range(size):
        covariance[i, i] += drifts[i]
    spread = covariance @ features
    gain = spread / (features @ spread + variance)
    error = seconds - features @ weights
    for i in range(size):
        weights[i] += gain[i] * error
        for j in range(size):
            covariance[i, j] -= gain[i] * spread[j]
    # To the nearest coefficients within the bounds as the covariance measures it: the estimate of this step stays.
    for i in range(size):
        if weights[i] < bounds[i]:
            excess = (bounds[i] - weights[i]) / covariance[i, i]
            for j in range(size):
                weights[j] += covariance[i, j] * excess
    for i in range(size):
        weights[i] = max(weights[i], bounds[i])


@numba.njit(cache=True, nogil=True)
def fill_rests(rests: Array, seen: Array, log_edges: Array, prior_steps: float, filled: Array) -> None:
    """What the model leaves of each bucket's cost, shrunk by the steps seen, interpolated where there were none.

    Args:
        rests: [E] float64, mean rest of the steps seen, as a share of the cost.
        seen: [E] float64, steps; at least one bucket has some.
        log_edges: [E] float64, what is interpolated over.
        prior_steps: Steps without any rest that are counted with those seen.
        filled: [E] float64, written.
    """
    before = -1
    for i in range(len(seen)):
        if seen[i] == 0:
            continue
        filled[i] = _shrunk(rests[i], seen[i], prior_steps)
        for between in range(before + 1, i):
            if before < 0:
                filled[between] = filled[i]
            else:
                share = (log_edges[between] - log_edges[before]) / (log_edges[i] - log_edges[before])
                filled[between] = filled[before] + share * (filled[i] - filled[before])
        before = i
    for beyond in range(before + 1, len(seen)):
        filled[beyond] = filled[before]


@numba.njit(cache=True, nogil=True)
def fill_curve(
    edges: Array, probed: Array, rests: Array, is_stair: Array, weights: Array, context: float, curve: Array
) -> float:
    """Seconds at each edge and seconds a row before it; see `StepCost` for the model and `CostCurve`.

    Args:
        edges: [E] int64, ascending.
        probed: [E] float64, timed seconds.
        rests: [E] float64, as `fill_rests` gives them.
        is_stair: [E] bool, whether rows within the bucket differ by what rows and context cost alone.
        weights: [5] float64: scale, fixed, per row, per token, and what is not the rows' cost.
        context: Tokens that each row reads.
        curve: [2, E] float64, written: seconds, slopes.

    Returns:
        Seconds a row beyond the last edge.
    """
    slope = weights[2] + weights[3] * context
    last = len(edges) - 1
    highest = before = secant = 0.0
    for i in range(last + 1):
        seconds = (weights[0] * probed[i] + weights[1] + slope * edges[i]) * (1.0 + rests[i])
        highest = max(highest, seconds, LEAST_SECONDS)  # a model below 0 would make slopes that fall
        secant = (highest - before) / (edges[i] - (edges[i - 1] if i else 0))
        before = highest
        curve[0, i] = max(highest, LEAST_SECONDS)
        curve[1, i] = min(slope * (1.0 + rests[i]), secant) if is_stair[i] else secant
    if not is_stair[0]:  # below the first edge nothing was timed
        curve[1, 0] = slope
    tail_slope = (curve[0, last] - curve[0, 0]) / max(edges[last] - edges[0], 1)
    return float(max(secant, tail_slope))


@numba.njit(cache=True, nogil=True)
def read_curve(edges: Array, curve: Array, tail_slope: float, num_rows: Array, seconds: Array) -> None:
    """Seconds of steps of so many rows: `num_rows` [n] float64, `seconds` [n] float64 written."""
    last = len(edges) - 1
    bucket = 0
    for i in range(len(num_rows)):
        if i and num_rows[i] < num_rows[i - 1]:
            bucket = 0
        while bucket < last and edges[bucket] < num_rows[i]:
            bucket += 1
        below = edges[bucket] - num_rows[i]
        slope = tail_slope if below < 0 else curve[1, bucket]
        seconds[i] = max(curve[0, bucket] - below * slope, LEAST_SECONDS)


@numba.njit(cache=True, nogil=True)
def rows_within(
    edges: Array, curve: Array, tail_slope: float, num_rows: int, slowdown: float, row_seconds: float, more_rows: Array
) -> int:
    """How many rows more a step may have: the last of some numbers for which no limit is exceeded.

    Args:
        edges: [E] int64, as in `read_curve`.
        curve: [2, E] float64, likewise.
        tail_slope: Likewise.
        num_rows: Of the step without them.
        slowdown: Most that they may take, as a share of the step.
        row_seconds: Most that each may take.
        more_rows: [n] float64, the numbers that are tried, ascending from 0, which is within any limit.
    """
    seconds = np.empty(len(more_rows))
    read_curve(edges, curve, tail_slope, more_rows + num_rows, seconds)
    found = 0.0
    for i in range(1, len(more_rows)):
        if seconds[i] - seconds[0] <= min(slowdown * seconds[0], row_seconds * more_rows[i]):
            found = more_rows[i]
    return int(found)
