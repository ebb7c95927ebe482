"""GRPO's parts, reductions, KL and filters against formulas written out in loops over plain floats."""

import inspect
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from srtrl.algorithms import advantages, losses, reductions
from srtrl.algorithms.reductions import adapted_coefficient
from srtrl.resolve import list_parts, resolve_part

F64 = torch.float64
CLIP_LOW, CLIP_HIGH, MAX_NEW_TOKENS = 0.2, 0.3, 10

# Two groups of two samples. The ratios exp(new - old) are below, inside and above the clip range for both signs of the
# advantage (one advantage a sequence), and the lengths all differ.
LENGTHS = [3, 4, 1, 2]
ADVANTAGES = [1.5, -0.7, -2.0, 0.4]
NEW = [-0.5, -1.0, -2.0, -0.9, -3.0, -0.2, -1.6, -1.1, -0.8, -2.4]
OLD = [-0.9, -1.1, -1.5, -0.4, -3.1, -0.9, -1.6, -0.6, -0.7, -3.0]
REF = [-0.7, -1.0, -2.6, -0.5, -2.2, -0.3, -1.9, -1.3, -0.1, -2.0]
SEQUENCE = [index for index, length in enumerate(LENGTHS) for _ in range(length)]


def hand_kl(estimator: str, new: float, ref: float) -> tuple[float, float]:
    """Value and derivative with respect to the new log-prob."""
    if estimator == "k1":
        return new - ref, 1.0
    if estimator == "k2":
        return 0.5 * (new - ref) ** 2, new - ref
    return math.exp(ref - new) - (ref - new) - 1, 1 - math.exp(ref - new)


def hand_clip(new: float, old: float, advantage: float) -> tuple[float, float]:
    """PPO's clipped loss of one token and its derivative with respect to the new log-prob."""
    ratio = math.exp(new - old)
    if advantage > 0 and ratio > 1 + CLIP_HIGH:
        return -(1 + CLIP_HIGH) * advantage, 0.0
    if advantage < 0 and ratio < 1 - CLIP_LOW:
        return -(1 - CLIP_LOW) * advantage, 0.0
    return -ratio * advantage, -ratio * advantage


def hand_weight(reduction: str, sequence: int) -> float:
    """Weight of one token of `sequence` in the loss of the mini-batch."""
    return {
        "token_mean": 1 / sum(LENGTHS),
        "sequence_mean_token_mean": 1 / (len(LENGTHS) * LENGTHS[sequence]),
        "sequence_mean_token_sum": 1 / len(LENGTHS),
        "sequence_mean_token_sum_norm": 1 / (len(LENGTHS) * MAX_NEW_TOKENS),
    }[reduction]


def hand_loss(reduction: str, estimator: str | None, coefficient: float) -> tuple[float, list[float]]:
    """Loss of the mini-batch and its gradient with respect to each log-prob."""
    total, gradient = 0.0, []
    for new, old, ref, sequence in zip(NEW, OLD, REF, SEQUENCE, strict=True):
        value, slope = hand_clip(new, old, ADVANTAGES[sequence])
        if estimator is not None:
            kl_value, kl_slope = hand_kl(estimator, new, ref)
            value, slope = value + coefficient * kl_value, slope + coefficient * kl_slope
        weight = hand_weight(reduction, sequence)
        total += weight * value
        gradient.append(weight * slope)
    return total, gradient


def our_loss(
    new: Tensor, rows: slice, reduction: str, estimator: str | None, coefficient: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same with the functions under test, for the micro-batch `rows`."""
    sequence_index = torch.tensor(SEQUENCE)[rows]
    token_loss, metrics = losses.ppo_clip(
        new,
        torch.tensor(OLD, dtype=F64)[rows],
        torch.tensor(ADVANTAGES, dtype=F64)[sequence_index],
        sequence_index,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )
    if estimator is not None:
        token_loss = token_loss + coefficient * getattr(reductions, estimator)(new, torch.tensor(REF, dtype=F64)[rows])
    reduce: Callable[..., Tensor] = getattr(reductions, reduction)
    lengths = torch.tensor(LENGTHS)
    return reduce(token_loss, sequence_index, sequence_lengths=lengths, max_new_tokens=MAX_NEW_TOKENS), metrics


@pytest.mark.parametrize("micro_batches", [[slice(0, 10)], [slice(0, 3), slice(3, 8), slice(8, 10)]])
@pytest.mark.parametrize("estimator", [None, "k1", "k2", "k3"])
@pytest.mark.parametrize("reduction", list_parts("algorithm.reduction"))
def test_loss_and_gradient_equal_the_hand_computation(
    reduction: str, estimator: str | None, micro_batches: Sequence[slice]
) -> None:
    loss, gradient = 0.0, []
    for rows in micro_batches:
        new = torch.tensor(NEW, dtype=F64)[rows].requires_grad_()
        share, _ = our_loss(new, rows, reduction, estimator, 0.05)
        loss += share.item()
        gradient += torch.autograd.grad(share, new)[0].tolist()
    expected_loss, expected_gradient = hand_loss(reduction, estimator, 0.05)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    assert gradient == pytest.approx(expected_gradient, rel=1e-12, abs=1e-15)


def test_clip_metrics_mark_the_tokens_without_gradient() -> None:
    new = torch.tensor(NEW, dtype=F64).requires_grad_()
    loss, metrics = our_loss(new, slice(0, 10), "token_mean", None, 0.0)
    (gradient,) = torch.autograd.grad(loss, new)
    assert metrics["clip_share/low"].tolist() == [0, 0, 0, 1, 0, 0, 0, 1, 0, 0]
    assert metrics["clip_share/high"].tolist() == [1, 0, 0, 0, 0, 0, 0, 0, 0, 1]
    assert (gradient == 0).tolist() == (metrics["clip_share/low"] + metrics["clip_share/high"] > 0).tolist()
    assert not any(metric.requires_grad for metric in metrics.values())


def test_loss_at_unchanged_weights_is_minus_the_advantage() -> None:
    logprobs = torch.tensor(NEW, dtype=F64).requires_grad_()
    advantage = torch.tensor(ADVANTAGES, dtype=F64)[torch.tensor(SEQUENCE)]
    token_loss, _ = losses.ppo_clip(
        logprobs, logprobs.detach(), advantage, torch.tensor(SEQUENCE), clip_low=0.0, clip_high=0.0
    )
    assert torch.equal(token_loss, -advantage)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        # mean 0.25, squared deviations 3 x 0.0625 + 0.5625 = 0.75, divided by S - 1 = 3: standard deviation 0.5
        ([0.0, 0.0, 1.0, 0.0], [-0.25 / 0.500001, -0.25 / 0.500001, 0.75 / 0.500001, -0.25 / 0.500001]),
        # mean 0, squared deviations 2, divided by 1: standard deviation sqrt(2)
        ([-1.0, 1.0], [-1 / (math.sqrt(2) + 1e-6), 1 / (math.sqrt(2) + 1e-6)]),
        # a standard deviation as small as epsilon halves the advantages
        ([0.0, math.sqrt(2) * 1e-6], [-math.sqrt(0.5) / 2, math.sqrt(0.5) / 2]),
    ],
)
def test_group_relative_by_hand(rewards: list[float], expected: list[float]) -> None:
    found = advantages.group_relative(torch.tensor([rewards], dtype=F64))
    assert found[0].tolist() == pytest.approx(expected, rel=1e-12)


def test_kl_by_hand() -> None:
    logprobs, ref_logprobs = torch.tensor([-1.0, -2.0], dtype=F64), torch.tensor([-1.5, -1.0], dtype=F64)
    assert reductions.k1(logprobs, ref_logprobs).tolist() == [0.5, -1.0]
    assert reductions.k2(logprobs, ref_logprobs).tolist() == [0.125, 0.5]
    expected = [math.exp(-0.5) - 0.5, math.exp(1.0) - 2.0]  # exp(x) - 1 - x of x = -0.5 and 1
    assert reductions.k3(logprobs, ref_logprobs).tolist() == pytest.approx(expected, rel=1e-14)


def test_k3_keeps_small_differences() -> None:
    """In float32 exp(x) - 1 - x of x = 1e-3 would be off by a tenth."""
    found = reductions.k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10])).item()
    assert found == pytest.approx(2**-21, rel=1e-3)


def exact_kl(logits: Tensor, other: Tensor) -> Tensor:
    logprobs, other_logprobs = logits.log_softmax(-1), other.log_softmax(-1)
    return (logprobs.exp() * (logprobs - other_logprobs)).sum()


def test_what_the_estimators_and_their_gradients_estimate() -> None:
    """Expectations over all tokens of a small vocabulary, exactly: what `reductions.py` says of bias and gradients."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(7, generator=generator, dtype=F64).requires_grad_()
    reference = torch.randn(7, generator=generator, dtype=F64)
    probs = logits.detach().softmax(-1)
    forward = torch.autograd.grad(exact_kl(logits, reference), logits)[0]
    backward = torch.autograd.grad(exact_kl(reference, logits), logits)[0]
    true_kl = exact_kl(logits, reference).item()
    for estimator, gradient in (
        (reductions.k1, torch.zeros(7, dtype=F64)),
        (reductions.k2, forward),
        (reductions.k3, backward),
    ):
        mean = (probs * estimator(logits.log_softmax(-1), reference.log_softmax(-1))).sum()
        torch.testing.assert_close(torch.autograd.grad(mean, logits)[0], gradient, rtol=1e-12, atol=1e-14)
        assert (mean.item() == pytest.approx(true_kl, rel=1e-12)) == (estimator is not reductions.k2)


def test_filters_keep_groups_to_learn_from() -> None:
    """Rewards and verdicts may differ: a further reward makes a group mixed that is all wrong."""
    rewards = torch.tensor([[1.0, 1.0, 1.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0], [0.5, 0.4, 0.5], [0.3, 0.3, 0.3]])
    correct = torch.tensor([[1, 1, 1], [0, 0, 0], [0, 0, 1], [0, 0, 0], [1, 0, 1]], dtype=torch.bool)
    assert reductions.drop_uniform(rewards, correct).tolist() == [False, False, True, True, False]
    assert reductions.drop_all_right_or_wrong(rewards, correct).tolist() == [False, False, True, False, True]


@pytest.mark.parametrize("name", list_parts("algorithm.filters"))
def test_a_filter_sees_each_group_alone(name: str) -> None:
    """Dynamic sampling calls it on one group at a time, in the order in which grades come in."""
    generator = torch.Generator().manual_seed(0)
    correct = torch.rand(30, 3, generator=generator) < 0.5
    keep = resolve_part("algorithm.filters", name)
    together = keep(correct.double(), correct)
    alone = [keep(correct[row : row + 1].double(), correct[row : row + 1]) for row in range(30)]
    assert together.dtype == torch.bool
    assert torch.equal(torch.cat(alone), together)
    assert 0 < together.sum() < 30


@pytest.mark.parametrize(
    ("kl_now", "factor"),
    [
        (0.1, 1.0),  # at the target
        (0.11, 1 + 0.1 * 0.1),  # 10% above: error 0.1, times 1000 / 10000
        (0.095, 1 - 0.05 * 0.1),
        (5.0, 1 + 0.2 * 0.1),  # clipped
        (0.0, 1 - 0.2 * 0.1),
        (-0.3, 1 - 0.2 * 0.1),  # an estimate may be negative
    ],
)
def test_adapted_kl_coefficient_by_hand(kl_now: float, factor: float) -> None:
    found = adapted_coefficient(0.05, kl_now, target=0.1, horizon=10_000, num_samples=1000)
    assert found == pytest.approx(0.05 * factor, rel=1e-12)


def test_adapted_kl_coefficient_reaches_its_target() -> None:
    """A policy whose KL is 0.01 / coefficient is held at the target 0.04, that is at a coefficient of 0.25."""
    coefficient = 1.0
    for _ in range(400):
        coefficient = adapted_coefficient(coefficient, 0.01 / coefficient, target=0.04, horizon=1000, num_samples=100)
    assert coefficient == pytest.approx(0.25, rel=1e-6)


def test_a_horizon_that_could_turn_the_kl_coefficient_round_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^algorithm.kl.horizon: expected more than 0.2 x the 5000 samples of a step"):
        adapted_coefficient(0.05, 0.0, target=0.1, horizon=1000, num_samples=5000)


@pytest.mark.parametrize("option", ["algorithm.filters", "algorithm.kl.estimator", "algorithm.reduction"])
def test_public_functions_of_a_kind_have_one_signature(option: str) -> None:
    """Each is a legal name in a recipe, so each must be callable as the trainer calls it."""
    names = list_parts(option)
    assert names
    assert len({str(inspect.signature(resolve_part(option, name))) for name in names}) == 1
