"""Accuracy, its confidence interval, and that evaluation repeats itself."""

import math
import random
from statistics import fmean

import pytest
from scipy import stats

from srtrl.trainer.evaluate import confidence_interval, summarise, wilson_interval
from srtrl.types import FinishReason, Grade, GradeOutcome, Prompt, Rollout, RolloutGroup


def group(
    draw_index: int, outcomes: list[GradeOutcome], *, length: int = 4, finish_reason: FinishReason = "stop"
) -> RolloutGroup:
    prompt = Prompt(prompt_id=str(draw_index), text="?", token_ids=(1,), answer="")
    rollouts = [
        Rollout(
            prompt=prompt,
            draw_index=draw_index,
            sample_index=index,
            token_ids=[1] * (length + index),
            rollout_logprobs=[0.0] * (length + index),
            text="",
            finish_reason=finish_reason,
            policy_version=0,
            grade=Grade(reward=float(outcome == "correct"), parts={}, outcome=outcome),
        )
        for index, outcome in enumerate(outcomes)
    ]
    return RolloutGroup(prompt=prompt, draw_index=draw_index, rollouts=rollouts)


@pytest.mark.parametrize(("successes", "n"), [(0, 10), (3, 10), (10, 10), (137, 500), (1, 1)])
def test_wilson_interval_equals_scipy(successes: int, n: int) -> None:
    expected = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
    assert wilson_interval(successes / n, n) == pytest.approx((expected.low, expected.high), abs=1e-12)


def test_interval_is_clustered_by_problem() -> None:
    shares = [0.25, 0.5, 1.0, 1.0, 1.0, 0.75]
    half = 1.959963984540054 * stats.sem(shares)  # the standard error of problem means, not of samples
    low, high = confidence_interval(shares, num_samples=4)
    assert high == 1.0  # cut
    assert low == pytest.approx(fmean(shares) - half)
    assert confidence_interval([0.0, 1.0], num_samples=1) == wilson_interval(0.5, 2)


@pytest.mark.parametrize("shares", [[0.0] * 5, [1.0] * 5, [0.5]])
def test_interval_without_spread_is_not_a_point(shares: list[float]) -> None:
    low, high = confidence_interval(shares, num_samples=4)
    assert high - low > 0.3
    assert low <= shares[0] <= high


@pytest.mark.parametrize("num_samples", [1, 4])
def test_interval_covers_the_truth_about_95_times_in_100(num_samples: int) -> None:
    generator = random.Random(0)
    covered = 0
    for _ in range(1000):
        chances = [generator.betavariate(1, 1) for _ in range(60)]  # problems differ in difficulty; their mean is 0.5
        shares = [fmean(generator.random() < chance for _ in range(num_samples)) for chance in chances]
        low, high = confidence_interval(shares, num_samples)
        covered += low <= 0.5 <= high
    assert 0.93 <= covered / 1000 <= 0.97  # the standard deviation of this share is 0.007


def test_summary_counts_failures_apart_and_as_not_right() -> None:
    groups = [
        group(0, ["correct", "wrong"], length=4),
        group(1, ["timeout", "correct"], length=8, finish_reason="length"),
        group(2, ["wrong", "crash"], length=2),
    ]
    result = summarise(groups, seconds=2.0)
    assert result.accuracy == pytest.approx(1 / 3)
    assert result.solved_any == pytest.approx(2 / 3)
    assert result.outcomes == {"correct": 2, "wrong": 2, "timeout": 1, "crash": 1, "error": 0}
    assert (result.num_problems, result.num_samples, result.num_tokens) == (3, 2, 4 + 5 + 8 + 9 + 2 + 3)
    assert result.mean_length == pytest.approx(31 / 6)
    assert result.max_length == 9
    assert result.truncated_share == pytest.approx(1 / 3)
    metrics = result.metrics()
    assert metrics["eval/grading/timeout"] == 1
    assert all(math.isfinite(value) for value in metrics.values())
    timed = {name for name in metrics if name.startswith("time/")}
    assert timed == {"time/eval"}  # all else must be equal after a resume
