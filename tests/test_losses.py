"""Policy losses against the papers' formulas in loops (`algorithm_reference.py`): values and gradients."""

import inspect
import math

import numpy as np
import pytest
import torch
from algorithm_reference import (
    LOSSES,
    RaggedBatch,
    central_differences,
    dual_clip_of,
    packed,
    random_batch,
    reduction_weights,
    weighted,
)
from torch import Tensor

from srtrl.algorithms import losses
from srtrl.resolve import list_parts, resolve_part

F64 = torch.float64
CLIP_LOW, CLIP_HIGH, MAX_NEW_TOKENS = 0.2, 0.3, 12


def our_losses(
    name: str, batch: RaggedBatch, new: Tensor, *, low: float = CLIP_LOW, high: float = CLIP_HIGH, **options: float
) -> tuple[Tensor, dict[str, Tensor]]:
    loss = resolve_part("algorithm.loss", name)
    old, advantages = packed(batch.old), packed(batch.advantages)
    token_loss, metrics = loss(new, old, advantages, batch.sequence_index, clip_low=low, clip_high=high, **options)
    assert isinstance(token_loss, Tensor)
    return token_loss, metrics


def test_every_loss_has_a_formula_here() -> None:
    assert set(list_parts("algorithm.loss")) == set(LOSSES)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("spread", [0.02, 0.4, 1.5])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_equal_the_formula(name: str, spread: float, per_token: bool) -> None:
    """The gradient of a sum with random weights: no token's derivative can hide behind another's."""
    for seed in range(6):
        batch = random_batch(seed, spread=spread, per_token=per_token)
        generator = np.random.default_rng(seed)
        weights = [generator.standard_normal(length) for length in batch.lengths]

        def formula(new: list[np.ndarray], batch: RaggedBatch = batch) -> list[np.ndarray]:
            return LOSSES[name](new, batch.new, batch.old, batch.advantages, CLIP_LOW, CLIP_HIGH)

        new = packed(batch.new).requires_grad_()
        token_loss, _ = our_losses(name, batch, new)
        torch.testing.assert_close(token_loss.detach(), packed(formula(batch.new)), rtol=1e-12, atol=1e-14)
        (gradient,) = torch.autograd.grad((token_loss * packed(weights)).sum(), new)
        expected = central_differences(lambda new: weighted(formula(new), weights), batch.new)  # noqa: B023
        torch.testing.assert_close(gradient, packed(expected), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("reduction", list_parts("algorithm.reduction"))
@pytest.mark.parametrize("name", LOSSES)
def test_reduced_loss_and_gradient_equal_the_formula(name: str, reduction: str) -> None:
    batch = random_batch(7, spread=0.5)
    weights = reduction_weights(reduction, batch.lengths, MAX_NEW_TOKENS)

    def formula(new: list[np.ndarray]) -> float:
        return weighted(LOSSES[name](new, batch.new, batch.old, batch.advantages, CLIP_LOW, CLIP_HIGH), weights)

    new = packed(batch.new).requires_grad_()
    token_loss, _ = our_losses(name, batch, new)
    reduced = resolve_part("algorithm.reduction", reduction)(
        token_loss, batch.sequence_index, sequence_lengths=torch.tensor(batch.lengths), max_new_tokens=MAX_NEW_TOKENS
    )
    assert reduced.item() == pytest.approx(formula(batch.new), rel=1e-12)
    expected = central_differences(formula, batch.new)
    torch.testing.assert_close(torch.autograd.grad(reduced, new)[0], packed(expected), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "policy_gradient"])
def test_autograd_agrees_with_its_own_differences(name: str) -> None:
    """Losses without a stop-gradient: PyTorch's own check of every entry of the Jacobian."""
    batch = random_batch(3, spread=0.6)
    assert torch.autograd.gradcheck(lambda new: our_losses(name, batch, new)[0], packed(batch.new).requires_grad_())


@pytest.mark.parametrize("name", LOSSES)
def test_order_and_packing_of_sequences_do_not_matter(name: str) -> None:
    """Tokens of a sequence in any place, its number any number: the same loss and gradient for each token."""
    batch = random_batch(11, spread=0.5)
    new = packed(batch.new).requires_grad_()
    token_loss, _ = our_losses(name, batch, new)
    (gradient,) = torch.autograd.grad(token_loss.square().sum(), new)

    order = torch.randperm(len(new), generator=torch.Generator().manual_seed(0))
    shuffled = packed(batch.new)[order].requires_grad_()
    function = resolve_part("algorithm.loss", name)
    again, _ = function(
        shuffled,
        packed(batch.old)[order],
        packed(batch.advantages)[order],
        3 * batch.sequence_index[order] + 2,
        clip_low=CLIP_LOW,
        clip_high=CLIP_HIGH,
    )
    torch.testing.assert_close(again, token_loss[order], rtol=1e-13, atol=0.0)
    shuffled_gradient = torch.autograd.grad(again.square().sum(), shuffled)[0]
    torch.testing.assert_close(shuffled_gradient, gradient[order], rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("name", LOSSES)
def test_unchanged_weights_give_the_policy_gradient(name: str) -> None:
    """At ratio 1 every loss has REINFORCE's gradient under GRPO's reduction, whatever the clip range."""
    batch = random_batch(5)
    batch.new = batch.old
    weights = packed(reduction_weights("sequence_mean_token_mean", batch.lengths, MAX_NEW_TOKENS))
    new = packed(batch.new).requires_grad_()
    for low, high in ((0.2, 0.3), (0.0, 0.0), (1.0, 4.0)):
        token_loss, metrics = our_losses(name, batch, new, low=low, high=high)
        (gradient,) = torch.autograd.grad((token_loss * weights).sum(), new)
        torch.testing.assert_close(gradient, -packed(batch.advantages) * weights, rtol=1e-12, atol=0.0)
        assert all(not bool(metric.any()) for metric in metrics.values())


@pytest.mark.parametrize("name", LOSSES)
def test_zero_advantages_give_a_zero_gradient(name: str) -> None:
    batch = random_batch(2, spread=1.0)
    batch.advantages = [np.zeros(length) for length in batch.lengths]
    new = packed(batch.new).requires_grad_()
    token_loss, _ = our_losses(name, batch, new)
    assert bool((token_loss == 0).all())
    assert bool((torch.autograd.grad(token_loss.sum(), new)[0] == 0).all())


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_token_and_dtypes(name: str, dtype: torch.dtype) -> None:
    """A batch of one token; losses keep the dtype of the log-probs, metrics have no gradient and the same shape."""
    new = torch.tensor([-0.9], dtype=dtype, requires_grad=True)
    function = resolve_part("algorithm.loss", name)
    old, advantages, index = torch.tensor([-1.0], dtype=dtype), torch.tensor([2.0], dtype=dtype), torch.tensor([4])
    token_loss, metrics = function(new, old, advantages, index, clip_low=0.2, clip_high=0.3)
    weight = {"policy_gradient": -0.9, "cispo": -0.9 * math.exp(0.1)}.get(name, math.exp(0.1))
    assert token_loss.dtype == dtype
    assert token_loss.item() == pytest.approx(-2 * weight, rel=1e-6)
    assert all(metric.shape == (1,) and not metric.requires_grad for metric in metrics.values())


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
    token_loss, metrics = (
        our_losses(name, batch, new, ratio_cap=1.5) if name == "dual_clip" else our_losses(name, batch, new)
    )
    (gradient,) = torch.autograd.grad(token_loss.sum(), new)
    marked = torch.stack(list(metrics.values())).sum(dim=0)
    assert 0 < marked.sum() < len(marked)
    assert marked.max() == 1
    assert torch.equal(gradient == 0, marked == 1)


def test_the_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    new = torch.tensor([2.0, 2.0, 0.5], dtype=F64, requires_grad=True)  # ratios 7.39, 7.39, 1.65
    advantages, index = torch.tensor([-2.0, 2.0, -2.0], dtype=F64), torch.arange(3)
    token_loss, metrics = losses.dual_clip(
        new, torch.zeros(3, dtype=F64), advantages, index, clip_low=0.2, clip_high=0.3, ratio_cap=4.0
    )
    assert token_loss.tolist() == pytest.approx([8.0, -2.6, 2 * np.exp(0.5)])
    assert metrics["clip_share/dual"].tolist() == [1, 0, 0]
    assert metrics["clip_share/high"].tolist() == [0, 1, 0]
    assert torch.autograd.grad(token_loss.sum(), new)[0].tolist() == pytest.approx([0.0, 0.0, 2 * np.exp(0.5)])


@pytest.mark.parametrize("cap", [1.2, 3.0, 10.0])
def test_the_dual_clip_at_several_caps(cap: float) -> None:
    batch = random_batch(4, spread=1.5, per_token=True)
    token_loss, _ = our_losses("dual_clip", batch, packed(batch.new), ratio_cap=cap)
    expected = dual_clip_of(cap)(batch.new, batch.new, batch.old, batch.advantages, CLIP_LOW, CLIP_HIGH)
    torch.testing.assert_close(token_loss, packed(expected), rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("cap", [1.0, 0.5, -3.0, float("nan")])
def test_a_cap_of_at_most_one_is_refused(cap: float) -> None:
    batch = random_batch(0)
    with pytest.raises(ValueError, match=r"^algorithm.loss_options.ratio_cap: expected a number above 1, found "):
        our_losses("dual_clip", batch, packed(batch.new), ratio_cap=cap)


def test_gspo_and_its_token_variant_agree_where_the_paper_says_so() -> None:
    """Equal values always; equal gradients with one advantage a sequence and GRPO's reduction, and not without."""
    gradients = {}
    for per_token in (False, True):
        batch = random_batch(8, spread=0.3, per_token=per_token)
        weights = packed(reduction_weights("sequence_mean_token_mean", batch.lengths, MAX_NEW_TOKENS))
        values = {}
        for name in ("gspo", "gspo_token"):
            new = packed(batch.new).requires_grad_()
            token_loss, _ = our_losses(name, batch, new)
            values[name] = token_loss.detach()
            (gradients[name, per_token],) = torch.autograd.grad((token_loss * weights).sum(), new)
        torch.testing.assert_close(values["gspo"], values["gspo_token"], rtol=1e-13, atol=0.0)
    torch.testing.assert_close(gradients["gspo", False], gradients["gspo_token", False], rtol=1e-12, atol=1e-16)
    assert not torch.allclose(gradients["gspo", True], gradients["gspo_token", True], rtol=1e-3)


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


def test_losses_of_the_recipe_have_one_signature() -> None:
    """The first four arguments and the clip range are those of `ppo_clip`; what comes after is optional."""
    expected = list(inspect.signature(losses.ppo_clip).parameters.values())
    for name in list_parts("algorithm.loss"):
        parameters = list(inspect.signature(getattr(losses, name)).parameters.values())
        assert parameters[: len(expected)] == expected
        assert all(parameter.default is not parameter.empty for parameter in parameters[len(expected) :])
