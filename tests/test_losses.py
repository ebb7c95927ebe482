"""Policy losses, value losses and importance weights: what they promise, and edge cases by hand.

Their values and gradients are compared with other code in `test_update.py` (padded batches) and `test_trl_parity.py`.
"""

import numpy as np
import pytest
import torch
from algorithm_reference import RaggedBatch, packed, random_batch
from padded_update import LOSSES
from torch import Tensor

from srtrl.algorithms import losses
from srtrl.algorithms.losses import sequence_means, sequence_sums
from srtrl.resolve import list_parts, resolve_part

F64 = torch.float64
CLIP_LOW, CLIP_HIGH = 0.2, 0.3


def our_losses(
    name: str, batch: RaggedBatch, new: Tensor, *, low: float = CLIP_LOW, high: float = CLIP_HIGH, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = resolve_part("algorithm.loss", name)
    old, advantages = packed(batch.old), packed(batch.advantages)
    token_loss, metrics = loss(new, old, advantages, batch.sequence_index, clip_low=low, clip_high=high, **options)
    assert isinstance(token_loss, Tensor)
    return token_loss, metrics


def sequence_weights(batch: RaggedBatch) -> Tensor:
    """Weight of each token in GRPO's mean over sequences of the mean over tokens, [R]."""
    return packed([np.full(length, 1 / (length * len(batch.lengths))) for length in batch.lengths])


def test_every_loss_has_a_formula_in_the_padded_update() -> None:
    assert set(list_parts("algorithm.loss")) == set(LOSSES)


@pytest.mark.parametrize("name", LOSSES)
def test_unchanged_weights_give_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss has REINFORCE's gradient under GRPO's reduction, for any clip range."""
    batch = random_batch(5)
    batch.new = batch.old
    weights = sequence_weights(batch)
    new = packed(batch.new).requires_grad_()
    for low, high in ((0.2, 0.3), (0.0, 0.0), (1.0, 4.0)):
        token_loss, metrics = our_losses(name, batch, new, low=low, high=high)
        (gradient,) = torch.autograd.grad((token_loss * weights).sum(), new)
        torch.testing.assert_close(gradient, -packed(batch.advantages) * weights, rtol=1e-12, atol=0.0)
        assert all(not bool(metric.any()) for metric in metrics.values())


def test_a_ratio_exactly_at_the_clip_keeps_its_gradient() -> None:
    """1 + clip_high = 1.5 and 1 - clip_low = 0.5 are exact in binary; the next number beyond has no gradient."""
    new = torch.tensor([1.5, np.nextafter(1.5, 2), 0.5, np.nextafter(0.5, 0), 1.5, 0.5], dtype=F64)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0, 2.0], dtype=F64)
    ratio = new.clone().requires_grad_()
    token_loss, metrics = losses._clipped(ratio, advantages, 0.5, 0.5)
    assert torch.autograd.grad(token_loss.sum(), ratio)[0].tolist() == [-2.0, 0.0, 2.0, 0.0, 2.0, -2.0]
    assert metrics["clip_share/high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert metrics["clip_share/low"].tolist() == [0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "gspo_token"])
def test_clip_metrics_mark_exactly_the_tokens_without_gradient(name: str) -> None:
    batch = random_batch(9, spread=1.5)
    new = packed(batch.new).requires_grad_()
    options = {"ratio_cap": 1.5} if name == "dual_clip" else {}
    token_loss, metrics = our_losses(name, batch, new, **options)
    (gradient,) = torch.autograd.grad(token_loss.sum(), new)
    marked = torch.stack(list(metrics.values())).sum(dim=0)
    assert 0 < marked.sum() < len(marked)
    assert marked.max() == 1
    assert torch.equal(gradient == 0, marked == 1)


@pytest.mark.parametrize("cap", [1.0, 0.5, -3.0, float("nan")])
def test_a_cap_of_at_most_one_is_refused(cap: float) -> None:
    batch = random_batch(0)
    with pytest.raises(ValueError, match=r"^algorithm.loss_options.ratio_cap: expected a number above 1, found "):
        our_losses("dual_clip", batch, packed(batch.new), ratio_cap=cap)


def test_gspo_ratios_of_long_sequences_are_exact_in_float32() -> None:
    """8,192 tokens, a mean log-ratio of 1e-4: within 1e-3 of it, where the clip range (3e-4) is decided."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(8192, generator=generator, dtype=F64) * 3
    difference = 1e-4 + 0.3 * torch.randn(8192, generator=generator, dtype=F64)
    difference += 1e-4 - difference.mean()
    new, old_float = (old + difference).float(), old.float()
    ones, index = torch.ones(8192), torch.zeros(8192, dtype=torch.int64)
    token_loss, _ = losses.gspo(new, old_float, ones, index, clip_low=0.2, clip_high=0.2)
    exact = (new.double() - old_float.double()).mean().exp().item()
    assert -token_loss[0].item() == pytest.approx(exact, abs=1.2e-7)
    assert exact == pytest.approx(1.0001, abs=1e-7)


def test_cispo_clips_weights_and_keeps_every_gradient() -> None:
    new = torch.tensor([2.0, -3.0, 0.1], dtype=F64, requires_grad=True)
    zeros, ones, index = torch.zeros(3, dtype=F64), torch.ones(3, dtype=F64), torch.arange(3)
    for low, smallest in ((0.5, 0.5), (1.0, np.exp(-3.0))):
        token_loss, metrics = losses.cispo(new, zeros, ones, index, clip_low=low, clip_high=4.0)
        gradient = torch.autograd.grad(token_loss.sum(), new)[0]
        assert gradient.tolist() == pytest.approx([-5.0, -smallest, -np.exp(0.1)])
        assert metrics["clip_share/high"].tolist() == [1, 0, 0]
        assert metrics["clip_share/low"].tolist() == [0, float(low < 1), 0]


# --- What the critic minimises ----------------------------------------------------------------------------------------


def test_the_value_clip_at_its_edges() -> None:
    """Old value 0, clip 0.5, return 2: moving towards the return loses the gradient beyond 0.5, away never."""
    values = torch.tensor([0.5, 0.5 + 1e-9, -3.0, 0.0], dtype=F64, requires_grad=True)
    zeros = torch.zeros(4, dtype=F64)
    loss, metrics = losses.clipped_value(values, zeros, zeros + 2, torch.arange(4), value_clip=0.5)
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-1.5, 0.0, -5.0, -2.0]
    assert metrics["clip_share/value"].tolist() == [0, 1, 0, 0]
    assert loss.tolist() == pytest.approx([1.125, 1.125, 12.5, 2.0], rel=1e-12)


# --- Importance weights -----------------------------------------------------------------------------------------------


def test_importance_weights_of_equal_logprobs_are_one_and_overflow_is_capped() -> None:
    logprobs = torch.tensor([-1.0, -2.0, -300.0])
    assert torch.equal(losses.truncated_weights(logprobs, logprobs, cap=2.0), torch.ones(3))
    far = losses.truncated_weights(logprobs + 1000, logprobs, cap=2.0)
    assert torch.equal(far, torch.full((3,), 2.0))


def test_sums_and_means_of_sequences() -> None:
    """Tokens of a sequence stand anywhere, and its number is any number."""
    numbers = torch.tensor([1.0, 2.0, 3.0, 10.0], requires_grad=True)
    index = torch.tensor([5, 2, 5, 0])
    assert sequence_sums(numbers, index).tolist() == [4.0, 2.0, 4.0, 10.0]
    means = sequence_means(numbers, index)
    assert means.tolist() == [2.0, 2.0, 2.0, 10.0]
    (gradient,) = torch.autograd.grad((means * torch.tensor([1.0, 10.0, 3.0, 5.0])).sum(), numbers)
    assert gradient.tolist() == [2, 10, 2, 5]
