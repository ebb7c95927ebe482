"""Losses, advantages and estimators of the KL: what they promise, edge cases by hand, and papers' formulas in loops.

Values and gradients of the losses are compared with other code in `test_update.py` (padded batches) and
`test_trl_parity.py`; the loops are in `algorithm_reference.py`.
"""

import importlib
import math
from collections.abc import Callable

import algorithm_reference as reference
import numpy as np
import pytest
import torch
from algorithm_reference import Ragged, padded
from hypothesis import given, settings
from hypothesis import strategies as st
from padded_update import LOSSES, REDUCTIONS
from torch import Tensor

from srtrl.algorithms import advantages, losses, reductions
from srtrl.algorithms.advantages import whiten
from srtrl.resolve import PARTS, list_functions

F64 = torch.float64


# --- Losses -----------------------------------------------------------------------------------------------------------


def list_parts(option: str) -> list[str]:
    """Names in the package for an option."""
    module_name, first_arguments = PARTS[option]
    return list_functions(importlib.import_module(module_name), first_arguments)


def test_everything_has_a_formula_in_the_padded_update() -> None:
    assert set(list_parts("algorithm.loss")) == set(LOSSES)
    assert set(list_parts("algorithm.reduction")) == set(REDUCTIONS)


def test_a_ratio_exactly_at_the_clip_keeps_its_gradient() -> None:
    """1 + clip_high = 1.25 and 1 - clip_low = 0.5 are exact in binary; the next number beyond has no gradient."""
    new = torch.tensor([1.25, np.nextafter(1.25, 2), 0.5, np.nextafter(0.5, 0), 1.25, 0.5], dtype=F64)
    advantages = torch.tensor([2.0, 2.0, -2.0, -2.0, -2.0, 2.0], dtype=F64)
    ratio = new.clone().requires_grad_()
    token_loss, metrics = losses._clipped(ratio, advantages, 0.5, 0.25)
    assert token_loss.tolist() == [-2.5, -2.5, 1.0, 1.0, 2.5, -1.0]
    assert torch.autograd.grad(token_loss.sum(), ratio)[0].tolist() == [-2.0, 0.0, 2.0, 0.0, 2.0, -2.0]
    assert metrics["clip_share/high"].tolist() == [0, 1, 0, 0, 0, 0]
    assert metrics["clip_share/low"].tolist() == [0, 0, 0, 1, 0, 0]


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


def test_dppo_bounds_the_weight_of_a_rare_token_as_verl_does() -> None:
    """Verl's `compute_policy_loss_dppo_tv` cuts ratios at 20."""
    new, decoder = torch.tensor([-8.0, -8.0], requires_grad=True), torch.tensor([-8.0 - math.log(19), -12.0])
    loss, _ = losses.dppo(new, decoder, -torch.ones(2), new, clip_low=0.2, clip_high=0.2, rollout_logprobs=decoder)
    assert torch.autograd.grad(loss.sum(), new)[0].tolist() == pytest.approx([19, 20])


def test_the_value_clip_at_its_edges() -> None:
    """Old value 0, clip 0.5, return 2: moving towards the return loses the gradient beyond 0.5, away never."""
    values = torch.tensor([0.5, 0.5 + 1e-9, -3.0, 0.0], dtype=F64, requires_grad=True)
    zeros = torch.zeros(4, dtype=F64)
    loss, metrics = losses.clipped_value(values, zeros, zeros + 2, torch.arange(4), value_clip=0.5)
    assert torch.autograd.grad(loss.sum(), values)[0].tolist() == [-1.5, 0.0, -5.0, -2.0]
    assert metrics["clip_share/value"].tolist() == [0, 1, 0, 0]
    assert loss.tolist() == pytest.approx([1.125, 1.125, 12.5, 2.0], rel=1e-12)


# --- Advantages ------------------------------------------------------------------------------------------------------

Advantage = Callable[..., Tensor]
GROUP_FUNCTIONS = [advantages.group_relative, advantages.group_centered, advantages.leave_one_out, advantages.max_rl]


numbers = st.floats(-3, 3).map(lambda number: round(number, 3))
lengths = st.lists(st.integers(1, 6), min_size=1, max_size=5)


@st.composite
def ragged_rows(draw: st.DrawFn) -> tuple[Ragged, Ragged]:
    """Rewards and values of 1 to 5 responses of 1 to 6 tokens."""
    rows = [st.lists(numbers, min_size=length, max_size=length) for length in draw(lengths)]
    return [np.array(draw(row)) for row in rows], [np.array(draw(row)) for row in rows]


def group_formula(function: Advantage, rewards: list[float]) -> list[float]:
    """One group by the paper: GRPO section 4.1.2 (divisor S - 1, 1e-6), Dr. GRPO, RLOO, MaxRL."""
    mean = sum(rewards) / len(rewards)
    if function is advantages.leave_one_out:
        others = [[r for j, r in enumerate(rewards) if j != i] for i in range(len(rewards))]
        return [r - sum(rest) / len(rest) for r, rest in zip(rewards, others, strict=True)]
    if function is advantages.max_rl:
        return [(r - mean) / (mean + 1e-6) for r in rewards]
    deviation = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (len(rewards) - 1))
    return [(r - mean) / (deviation + 1e-6 if function is advantages.group_relative else 1) for r in rewards]


@pytest.mark.parametrize("function", GROUP_FUNCTIONS)
def test_group_advantages_equal_the_formula_and_are_exactly_zero_for_equal_rewards(function: Advantage) -> None:
    for shape in ((1, 2), (3, 5), (40, 8)):
        rewards = np.random.default_rng(shape[0]).exponential(size=shape)
        found = function(torch.from_numpy(rewards))
        expected = torch.tensor([group_formula(function, list(map(float, row))) for row in rewards], dtype=F64)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(found.sum(dim=1), torch.zeros(shape[0], dtype=F64), rtol=0.0, atol=1e-12)
    for dtype in (torch.float32, F64):
        equal = torch.tensor([0.1, 3.3, 1e-8, 1e8, 0.0], dtype=dtype)[:, None].expand(5, 7)
        found = function(equal)
        assert found.dtype == dtype
        assert torch.equal(found, torch.zeros(5, 7, dtype=dtype))


@pytest.mark.parametrize("rewards", [[[1.0, 0.0], [0.5, -1.0]], [[1.0, -1.0]], [[-1.0, -1.0]]])
def test_max_rl_refuses_a_mean_that_is_no_share(rewards: list[list[float]]) -> None:
    with pytest.raises(ValueError, match=r"algorithm.advantage: max_rl divides by a group's mean reward, found one of"):
        advantages.max_rl(torch.tensor(rewards))


@settings(deadline=None)  # the machine may be busy
@given(
    rows=ragged_rows(),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    lam=st.sampled_from([1.0, 0.95, 0.3, 0.0]),
    padding=st.sampled_from([0.0, 1e6, math.nan, math.inf]),
)
def test_token_level_advantages_equal_the_closed_forms(
    rows: tuple[Ragged, Ragged], gamma: float, lam: float, padding: float
) -> None:
    """GAE's recursion, and REINFORCE++'s whitened returns; what stands in the padding does not matter."""
    (rewards, mask), (values, _) = (padded(numbers, padding) for numbers in rows)
    before, group_index = rewards.clone(), torch.arange(len(rewards))
    found = advantages.gae(rewards, values, mask, group_index=group_index, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, padded(reference.gae(*rows, gamma, lam))[0], rtol=1e-11, atol=1e-12)
    whitened = advantages.reinforce_plus_plus(rewards, values, mask, group_index=group_index, gamma=gamma, lam=1.0)
    returns = reference.returns_to_go(rows[0], gamma)
    tokens = np.concatenate(returns)
    if (tokens == tokens[0]).all():
        assert not whitened.any()
    elif np.ptp(tokens) > 1e-9:  # below it the sums differ by rounding alone
        torch.testing.assert_close(whitened, padded(reference.whiten(returns))[0], rtol=1e-9, atol=1e-9)
    assert not found[~mask].any()
    assert not whitened[~mask].any()
    assert torch.equal(rewards.nan_to_num(), before.nan_to_num()), "the caller's rewards were changed"


def test_equal_numbers_are_whitened_to_exactly_zero() -> None:
    """A single token among them: it has no standard deviation."""
    for number in (0.1, -7.7, 1e8, 0.0):
        for rows in ([np.array([number])], [np.full(5, number), np.array([number])]):
            values, mask = padded(rows)
            assert torch.equal(whiten(values, mask), torch.zeros_like(values))
            assert whiten(values.float(), mask).dtype == torch.float32


# --- Estimators of the KL ---------------------------------------------------------------------------------------------


def test_k3_keeps_small_differences() -> None:
    """In float32 exp(x) - 1 - x of x = 1e-3 would be off by a tenth."""
    found = reductions.k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10])).item()
    assert found == pytest.approx(2**-21, rel=1e-3)
