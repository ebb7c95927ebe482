"""What the critic minimises, and truncated importance weights, against loops over plain floats."""

import math

import numpy as np
import pytest
import torch
from algorithm_reference import packed, random_batch
from torch import Tensor

from srtrl.algorithms import losses
from srtrl.algorithms.losses import sequence_means, sequence_sums
from srtrl.resolve import list_parts

F64 = torch.float64


def hand_value_loss(name: str, value: float, old: float, target: float, clip: float) -> tuple[float, float]:
    """Value and derivative of one token's loss."""
    clipped = min(max(value, old - clip), old + clip)
    error, clipped_error = (value - target) ** 2, (clipped - target) ** 2
    if name == "clipped_value" and clipped_error > error:
        return clipped_error / 2, 0.0
    return error / 2, value - target


@pytest.mark.parametrize("clip", [0.05, 0.2, 10.0])
@pytest.mark.parametrize("name", list_parts("critic.value_loss"))
def test_value_loss_and_gradient_equal_the_formula(name: str, clip: float) -> None:
    generator = np.random.default_rng(0)
    old, target = generator.standard_normal((2, 200))
    value = old + 0.2 * generator.standard_normal(200)
    values = torch.from_numpy(value).requires_grad_()
    loss, metrics = getattr(losses, name)(
        values, torch.from_numpy(old), torch.from_numpy(target), torch.arange(200), value_clip=clip
    )
    expected = [
        hand_value_loss(name, *row, clip) for row in zip(value.tolist(), old.tolist(), target.tolist(), strict=True)
    ]
    assert loss.tolist() == pytest.approx([value for value, _ in expected], rel=1e-12)
    (gradient,) = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([slope for _, slope in expected], rel=1e-12)
    if name == "clipped_value":
        assert torch.equal(metrics["clip_share/value"] == 1, gradient == 0)
        assert (0 < metrics["clip_share/value"].sum().item() < 200) == (clip < 1)


@pytest.mark.parametrize("name", list_parts("critic.value_loss"))
def test_autograd_agrees_with_its_own_differences(name: str) -> None:
    values, old, target = torch.randn(3, 30, generator=torch.Generator().manual_seed(0), dtype=F64)

    def loss(values: Tensor) -> Tensor:
        token_loss: Tensor = getattr(losses, name)(values, old, target, torch.arange(30), value_clip=0.3)[0]
        return token_loss

    assert torch.autograd.gradcheck(loss, values.requires_grad_())


def test_the_value_clip_at_its_edges() -> None:
    """Old value 0, clip 0.5, return 2: moving towards the return loses the gradient beyond 0.5, away never."""
    values = torch.tensor([0.5, 0.5 + 1e-9, -3.0, 0.0], dtype=F64, requires_grad=True)
    zeros = torch.zeros(4, dtype=F64)
    loss, metrics = losses.clipped_value(values, zeros, zeros + 2, torch.arange(4), value_clip=0.5)
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-1.5, 0.0, -5.0, -2.0]
    assert metrics["clip_share/value"].tolist() == [0, 1, 0, 0]
    assert loss.tolist() == pytest.approx([1.125, 1.125, 12.5, 2.0], rel=1e-12)


@pytest.mark.parametrize("cap", [0.5, 2.0, 1e9])
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_importance_weights_equal_the_formula(level: str, cap: float) -> None:
    """`old` as the trainer's log-probs, `new` as the decoder's."""
    for seed in range(5):
        batch = random_batch(seed, spread=0.6)
        old = packed(batch.old).requires_grad_()
        found = losses.truncated_weights(
            old,
            packed(batch.new),
            batch.sequence_index,
            cap=cap,
            level="sequence" if level == "sequence" else "token",
        )
        expected = []
        for trainer, decoder in zip(batch.old, batch.new, strict=True):
            ratios = [math.exp(a) / math.exp(b) for a, b in zip(trainer, decoder, strict=True)]
            if level == "sequence":
                ratios = [math.prod(ratios)] * len(ratios)
            expected += [min(ratio, cap) for ratio in ratios]
        assert found.tolist() == pytest.approx(expected, rel=1e-11)
        assert not found.requires_grad


def test_importance_weights_of_equal_logprobs_are_one_and_overflow_is_capped() -> None:
    logprobs, index = torch.tensor([-1.0, -2.0, -300.0]), torch.tensor([0, 0, 1])
    for level in ("token", "sequence"):
        weights = losses.truncated_weights(logprobs, logprobs, index, cap=2.0, level=level)
        assert torch.equal(weights, torch.ones(3))
        far = losses.truncated_weights(logprobs + 1000, logprobs, index, cap=2.0, level=level)
        assert torch.equal(far, torch.full((3,), 2.0))


def test_sums_and_means_of_sequences() -> None:
    numbers = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    index = torch.tensor([5, 2, 5, 0])
    assert sequence_sums(numbers, index).tolist() == [4.0, 2.0, 4.0, 10.0]
    means = sequence_means(numbers, index)
    assert means.tolist() == [2.0, 2.0, 2.0, 10.0]
    assert means.dtype == F64
    assert torch.autograd.grad((means * torch.tensor([1.0, 10.0, 3.0, 5.0])).sum(), numbers)[0].tolist() == [
        2,
        10,
        2,
        5,
    ]
    assert sequence_sums(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).shape == (0,)
