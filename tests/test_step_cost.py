"""The cost of a step: what is timed, what is learned from real steps, and what disturbs it."""

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from srtrl.engine.step_cost import StepCost, row_edges
from srtrl.engine.step_cost_kernel import fill_curve, fill_rests, follow_cost, read_curve

TimeForward = Callable[[int, int, int], float]


class Clock:
    """Forward passes of a known cost; counts them."""

    def __init__(self, seconds: Callable[[int, int], float], warm_up: float = 0.0) -> None:
        self.calls: list[tuple[int, int, int]] = []
        self.total = 0.0
        self._seconds = seconds
        self._warm_up = warm_up

    def __call__(self, rows: int, context: int, num_logits: int) -> float:
        is_first = (rows, context, num_logits) not in self.calls
        self.calls.append((rows, context, num_logits))
        seconds = self._seconds(rows, context) + (self._warm_up if is_first else 0.0)
        self.total += seconds
        return seconds


def padded(rows: int) -> int:
    return -(-rows // 8) * 8


def probed(seconds: Callable[[int, int], float], *, multiple: int = 8, max_rows: int = 512) -> StepCost:
    cost = StepCost.padded_to(multiple, max_rows)
    cost.probe(Clock(seconds))
    return cost


def test_edges_are_multiples_and_then_coarser() -> None:
    edges = row_edges(8, 2048)
    assert edges[:32] == [8 * i for i in range(1, 33)]
    assert all(edge % 8 == 0 for edge in edges)
    assert edges[-2] < 2048 <= edges[-1]
    ratios = [after / before for before, after in pairwise(edges[32:])]
    assert all(1.2 < ratio < 1.3 for ratio in ratios)
    assert row_edges(1, 3) == [1, 2, 3]


def test_a_probe_finds_the_staircase_with_and_without_padding() -> None:
    cost = probed(lambda rows, _: 1e-3 + 1e-5 * padded(rows))
    for rows in (1, 8, 9, 64, 65, 200, 500):
        assert cost.seconds(rows) == pytest.approx(1e-3 + 1e-5 * padded(rows), rel=0.01)
    plain = probed(lambda rows, _: 1e-3 + 1e-5 * rows, multiple=1)
    for rows in (1, 3, 20, 77, 500, 700):
        assert plain.seconds(rows) == pytest.approx(1e-3 + 1e-5 * rows, rel=0.01)


def test_warm_up_passes_do_not_count_and_one_slow_pass_is_no_matter() -> None:
    cost = StepCost.padded_to(8, 64)
    cost.probe(Clock(lambda rows, _: 1e-4 * padded(rows), warm_up=0.1))
    assert cost.seconds(8) == pytest.approx(8e-4, rel=0.01)
    slow = iter([1.0, 1.0, 50.0, *([1.0] * 100)])
    cost = StepCost.padded_to(8, 64)
    cost.probe(lambda rows, _, __: 1e-4 * rows * next(slow))
    assert cost.seconds(8) == pytest.approx(8e-4, rel=0.01)


@pytest.mark.parametrize("row_seconds", [1e-6, 1e-4, 1e-3, 1e-2, 1.0])
def test_the_effort_of_a_probe_is_bounded(row_seconds: float) -> None:
    clock = Clock(lambda rows, _: row_seconds * padded(rows))
    cost = StepCost.padded_to(8, 4096)
    cost.probe(clock, max_seconds=2.0, max_passes=30)
    assert len(clock.calls) <= 30
    two_sizes = 4 * row_seconds * 16  # with a warm-up each, needed in any case
    assert clock.total <= max(2.0, two_sizes)
    assert cost.seconds(4096) == pytest.approx(row_seconds * 4096, rel=0.01), "extrapolated"


def test_longer_contexts_are_timed_within_what_the_model_can_read() -> None:
    clock = Clock(lambda rows, context: 1e-3 + 1e-8 * rows * context)
    cost = StepCost.padded_to(8, 128)
    cost.probe(clock, max_context_tokens=300)
    assert max(context for _, context, _ in clock.calls) == 300
    for rows, context in ((8, 0), (8, 1000), (64, 50), (64, 4000)):
        assert cost.seconds(rows, rows * context) == pytest.approx(1e-3 + 1e-8 * rows * context, rel=0.02)


def test_given_points_are_kept_whatever_steps_take() -> None:
    cost = StepCost.from_points([(4, 1.0), (8, 1.0), (16, 3.0)])
    cost.record(8, 0, 100.0)
    assert cost.is_fixed
    assert cost.is_known
    assert cost.seconds_at([1, 4, 6, 8, 12, 16, 20]).tolist() == pytest.approx([1, 1, 1, 1, 2, 3, 4])
    assert StepCost.from_points([(10, 2.0)]).seconds(20) == pytest.approx(4)


@pytest.mark.parametrize("points", [[], [(0, 1.0)], [(1, 0.0)], [(2, 1.0), (2, 2.0)], [(1, 2.0), (2, 1.0)]])
def test_points_that_are_no_cost_are_refused(points: list[tuple[int, float]]) -> None:
    with pytest.raises(ValueError, match="cost of a step: "):
        StepCost.from_points(points)


def test_host_work_is_learned_from_real_steps_of_a_few_sizes() -> None:
    # A small policy: the forward pass is a small part of the step.
    def step(rows: int) -> float:
        return 2e-3 + 2e-4 + 1e-6 * padded(rows) + 4e-6 * rows

    cost = probed(lambda rows, _: 2e-4 + 1e-6 * padded(rows))
    random = np.random.default_rng(0)
    for _ in range(400):
        rows = int(random.choice([8, 40, 100]))
        cost.record(rows, 0.0, step(rows) * (1 + 0.05 * random.standard_normal()))
    for rows in (4, 8, 40, 64, 100, 160):
        assert cost.seconds(rows) == pytest.approx(step(rows), rel=0.06)


def test_a_slower_machine_is_noticed_at_sizes_that_are_not_used() -> None:
    cost = probed(lambda rows, _: 1e-3 + 1e-5 * padded(rows))
    for _ in range(300):
        for rows in (8, 64):
            cost.record(rows, 0.0, 2 * (1e-3 + 1e-5 * rows))
    for rows in (8, 32, 64, 256):
        assert cost.seconds(rows) == pytest.approx(2 * (1e-3 + 1e-5 * rows), rel=0.1)


def test_a_size_that_the_probe_missed_is_learned_apart() -> None:
    def step(rows: int) -> float:
        return 1e-3 + 1e-5 * padded(rows) * (1.3 if rows > 24 else 1.0) + (2e-4 if rows > 24 else 0)

    cost = probed(lambda rows, _: 1e-3 + 1e-5 * padded(rows))
    for _ in range(200):
        for rows in (8, 16, 24, 32, 48, 64):
            cost.record(rows, 0.0, step(rows))
    for rows in (8, 24, 32, 64):
        assert cost.seconds(rows) == pytest.approx(step(rows), rel=0.04)


def test_a_disturbed_step_changes_little() -> None:
    cost = probed(lambda rows, _: 1e-3 + 1e-5 * padded(rows))
    for _ in range(100):
        cost.record(32, 0.0, 1e-3 + 1e-5 * 32)
    before = cost.seconds(32)
    for disturbed in (100.0, 1e-9):
        cost.record(32, 0.0, disturbed)
        assert cost.seconds(32) == pytest.approx(before, rel=0.05)


@settings(deadline=None, max_examples=50)
@example(records=[(27, 0.0, 6.103515625e-05), (61, 0.0, 1.0)], multiple=8, context_per_row=0.0)
@given(
    st.lists(st.tuples(st.integers(1, 600), st.floats(0, 500), st.floats(1e-6, 10)), max_size=60),
    st.sampled_from([1, 8]),
    st.floats(0, 1e4),
)
def test_cost_never_falls_with_the_rows(
    records: list[tuple[int, float, float]], multiple: int, context_per_row: float
) -> None:
    cost = probed(lambda rows, context: 1e-3 + 1e-5 * rows + 1e-8 * rows * context, multiple=multiple, max_rows=256)
    for rows, context, seconds in records:
        cost.record(rows, rows * context, seconds)
    curve = cost.seconds_at(np.arange(1, 700), context_per_row)
    assert np.isfinite(curve).all()
    assert curve[0] > 0
    assert (np.diff(curve) >= -1e-12 * curve[1:]).all()
    assert curve[99] == pytest.approx(cost.seconds(100, 100 * context_per_row))


def test_what_drafts_save() -> None:
    cost = StepCost.from_points([(1, 1.0), (8, 1.0), (16, 2.0)])
    assert cost.saved_seconds(4, 8, 12) == pytest.approx(3 * 1.0 - 1.0)
    assert cost.saved_seconds(8, 16, 8) == pytest.approx(1.0 - 2.0)
    assert cost.saved_seconds(4, 4, 4) == 0


def test_an_unknown_cost_is_not_asked() -> None:
    cost = StepCost.padded_to(8, 64)
    assert not cost.is_known
    cost.record(8, 0.0, 1.0)  # nothing to compare with
    with pytest.raises(AssertionError, match="probe"):
        cost.seconds(8)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.booleans())
def test_the_filter_is_that_of_the_textbook(seed: int, is_bounded: bool) -> None:
    random = np.random.default_rng(seed)
    weights, features = random.normal(size=4), random.normal(size=4)
    root = random.normal(size=(4, 4))
    covariance, drifts = root @ root.T + 0.1 * np.eye(4), random.random(4)
    seconds, variance = float(random.normal()), 0.1 + float(random.random())
    bounds = np.full(4, -1e9)

    predicted = covariance + np.diag(drifts)
    gain = predicted @ features / (features @ predicted @ features + variance)
    expected = weights + gain * (seconds - features @ weights)
    left = (np.eye(4) - np.outer(gain, features)) @ predicted
    if is_bounded:
        bounds[2] = expected[2] + 1.0
        expected = expected + left[2] / left[2, 2]
    follow_cost(weights, covariance, drifts, bounds, features, seconds, variance)
    np.testing.assert_allclose(weights, expected, rtol=1e-8, atol=1e-10)
    np.testing.assert_allclose(covariance, left, rtol=1e-8, atol=1e-10)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32), st.integers(2, 12))
def test_a_curve_is_what_its_formula_says(seed: int, num_edges: int) -> None:
    random = np.random.default_rng(seed)
    edges = np.cumsum(random.integers(1, 9, num_edges))
    probed, rest = np.sort(random.random(num_edges)) + 0.1, random.normal(0, 0.1, num_edges)
    seen = random.integers(0, 3, num_edges).astype(np.float64)
    seen[int(random.integers(num_edges))] = 5.0
    is_stair = random.random(num_edges) < 0.5
    weights, context = random.random(4) * [1.0, 0.1, 0.01, 0.001], 7.0

    filled = np.empty(num_edges)
    fill_rests(rest, seen, np.log(edges), 4.0, filled)
    visited = np.flatnonzero(seen)
    shrunk = rest[visited] * seen[visited] / (seen[visited] + 4.0)
    np.testing.assert_allclose(filled, np.interp(np.log(edges), np.log(edges[visited]), shrunk), rtol=1e-10, atol=1e-12)

    curve = np.empty((2, num_edges))
    tail = fill_curve(edges, probed, filled, is_stair, weights, context, curve)
    slope = weights[2] + weights[3] * context
    seconds = np.maximum.accumulate((weights[0] * probed + weights[1] + slope * edges) * (1 + filled))
    secants = np.diff(seconds, prepend=0.0) / np.diff(edges, prepend=0)
    slopes = np.where(is_stair, np.minimum(slope * (1 + filled), secants), secants)
    slopes[0] = slopes[0] if is_stair[0] else slope
    np.testing.assert_allclose(curve, [seconds, slopes], rtol=1e-10)
    assert tail == pytest.approx(max(secants[-1], (seconds[-1] - seconds[0]) / (edges[-1] - edges[0])))

    rows = random.integers(1, 2 * int(edges[-1]), 20).astype(np.float64)
    read = np.empty(20)
    read_curve(edges, curve, tail, rows, read)
    for at, found in zip(rows, read, strict=True):
        bucket = min(int(np.searchsorted(edges, at)), num_edges - 1)
        below = edges[bucket] - at
        expected = seconds[bucket] - below * (tail if below < 0 else slopes[bucket])
        assert found == pytest.approx(max(expected, 1e-9))
