"""Accuracy, pass@k and majority votes with their confidence intervals."""

import itertools
import math
import random
from statistics import fmean

import pytest
from rollout_cases import make_group
from scipy import stats

from srtrl.evaluation.policy import majority_scores
from srtrl.statistics import (
    Estimate,
    confidence_interval,
    estimate,
    macro_average,
    mean_interval,
    pass_at_k,
    pass_at_ks,
    wilson_interval,
)
from srtrl.trainer.evaluate import eval_metrics
from srtrl.types import GradeOutcome

Z = 1.959963984540054

# --- Intervals --------------------------------------------------------------------------------------------------------


def test_intervals_of_shares_and_of_rewards() -> None:
    for successes, n in ((0, 10), (3, 10), (10, 10), (137, 500), (1, 1)):
        exact = stats.binomtest(successes, n).proportion_ci(0.95, method="wilson")
        assert wilson_interval(successes / n, n) == pytest.approx((exact.low, exact.high), abs=1e-12)
    shares = [0.25, 0.5, 1.0, 1.0, 1.0, 0.75]
    low, high = confidence_interval(shares)
    assert high == 1.0  # cut
    assert low == pytest.approx(fmean(shares) - Z * stats.sem(shares))  # of problem means, not of samples
    assert confidence_interval([0.0, 1.0]) == wilson_interval(0.5, 2)
    for equal in ([0.0] * 5, [1.0] * 5, [0.5]):
        low, high = confidence_interval(equal)
        assert high - low > 0.3, "without spread it is not a point"
        assert low <= equal[0] <= high
    generator = random.Random(2)
    rewards = [generator.gauss(-3, 2) for _ in range(50)]  # which are not limited to shares
    half = Z * stats.sem(rewards)
    assert mean_interval(rewards) == pytest.approx((fmean(rewards) - half, fmean(rewards) + half))
    assert mean_interval([7.0]) == mean_interval([7.0, 7.0]) == (7.0, 7.0)


def test_macro_average_weighs_benchmarks_equally_and_adds_their_variances() -> None:
    generator = random.Random(1)
    big, small = ([generator.random() for _ in range(count)] for count in (400, 30))
    macro = macro_average([estimate(big), estimate(small)])
    error = Z * math.hypot(stats.sem(big), stats.sem(small)) / 2
    mean = (fmean(big) + fmean(small)) / 2
    assert (macro.low, macro.value, macro.high) == pytest.approx((mean - error, mean, mean + error))
    one = macro_average([Estimate(value=0.9, low=0.5, high=1.0)])  # the two arms of an interval are kept apart
    assert (one.value, one.low, one.high) == pytest.approx((0.9, 0.5, 1.0))


# --- What is counted --------------------------------------------------------------------------------------------------


def test_summary_counts_failures_apart_and_as_not_right() -> None:
    groups = [
        make_group(0, ["correct", "wrong"], lengths=[4, 5]),
        make_group(1, ["timeout", "correct"], lengths=[8, 9], cut=[0, 1]),
        make_group(2, ["wrong", "crash"], lengths=[2, 3]),
    ]
    metrics = eval_metrics(groups, seconds=2.0)
    expected = {
        **{"accuracy": 1 / 3, "solved_any": 2 / 3, "pass_at_2": 2 / 3, "num_problems": 3, "num_samples": 2},
        **{"tokens": 31, "length/mean": 31 / 6, "length/median": 4.5, "length/max": 9},
        **{"length/truncated_share": 1 / 3, "grading/correct": 2, "grading/wrong": 2, "grading/timeout": 1},
        **{"grading/crash": 1, "grading/error": 0},
    }
    assert {name: metrics[f"eval/{name}"] for name in expected} == pytest.approx(expected)
    assert "eval/pass_at_1" not in metrics  # that is eval/accuracy
    assert all(math.isfinite(value) for value in metrics.values())
    timed = {name for name in metrics if name.startswith("time/")}
    assert timed == {"time/eval"}  # all else must be equal after a resume


def test_the_interval_of_a_reward_stays_within_the_rewards_of_samples() -> None:
    groups = [make_group(index, ["correct", "wrong"] if index < 2 else ["wrong", "wrong"]) for index in range(20)]
    metrics = eval_metrics(groups, seconds=2.0)
    low, high = mean_interval([0.5, 0.5, *([0.0] * 18)])
    assert low < 0
    assert (metrics["eval/reward_low"], metrics["eval/reward_high"]) == (0.0, high)


def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples() -> None:
    for num_samples in (1, 2, 5, 8):
        for num_correct, k in itertools.product(range(num_samples + 1), range(1, num_samples + 1)):
            right = [index < num_correct for index in range(num_samples)]
            expected = fmean(any(chosen) for chosen in itertools.combinations(right, k))
            assert pass_at_k(num_samples, num_correct, k) == pytest.approx(expected, abs=1e-14)
    # With many samples it neither overflows nor loses digits.
    assert pass_at_k(4096, 1, 1) == pytest.approx(1 / 4096, rel=1e-9)
    assert pass_at_k(4096, 2048, 2048) == 1.0
    log_miss = sum(math.log1p(-10 / (1000 - i)) for i in range(100))  # C(990, 100) / C(1000, 100), term by term
    assert pass_at_k(1000, 10, 100) == pytest.approx(-math.expm1(log_miss), rel=1e-9)
    assert [pass_at_ks(n) for n in (1, 2, 5, 8)] == [[], [2], [2, 4, 5], [2, 4, 8]]


def first_word(text: str) -> str | None:
    return text.split(maxsplit=1)[0] if text.split() else None


def test_majority_vote() -> None:
    votes: list[tuple[str, set[str], float]] = [
        ("7 7 8", {"7"}, 1.0),
        ("7 8 8", {"7"}, 0.0),
        ("7 7.0 8 9 9", {"7", "7.0"}, 1 / 2),  # what the verifier accepted is one answer; a tie of two
        ("7 8 9 x", {"7"}, 1 / 4),  # a tie of four
        ("7 - - -", {"7"}, 1.0),  # what has no answer does not vote
        ("- - -", set(), 0.0),
        ("8 9 9", {"7"}, 0.0),
        ("07 8 08", {"07"}, 0.0),  # integers are compared as such
    ]
    for said, right, score in votes:
        texts = [text.strip("-") for text in said.split()]
        outcomes: list[GradeOutcome] = ["correct" if text in right else "wrong" for text in texts]
        assert majority_scores([make_group(0, outcomes, texts=texts)], first_word) == [pytest.approx(score)], said
    failed: list[GradeOutcome] = ["correct", "timeout", "crash", "error"]  # they do not vote
    assert majority_scores([make_group(0, failed, texts=["7", "8", "8", "8"])], first_word) == [1.0]
