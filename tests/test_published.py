"""Losses and advantages against the formulas of other codes, written down here, on 1,000 random tokens: within 1e-12.

`test_trl_parity.py` runs the code of TRL itself; prime-rl, verl and SkyRL are not installed.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from srtrl.algorithms import advantages, losses

F64 = torch.float64
NUM_TOKENS = 1000
LOW, HIGH = 0.15, 0.2
CLOSE: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}


def random_tokens(spread: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probs by the policy (with gradient) and by the decoder, advantages (some 0), sequences of 20 tokens."""
    generator = torch.Generator().manual_seed(0)
    decoder = -3 * torch.rand(NUM_TOKENS, generator=generator, dtype=F64)
    moved = spread * torch.randn(NUM_TOKENS, generator=generator, dtype=F64)
    new = (decoder + moved).clamp(max=0.0).requires_grad_()
    given = torch.randn(NUM_TOKENS, generator=generator, dtype=F64)
    given[::7] = 0.0
    return new, decoder, given, torch.arange(NUM_TOKENS) // 20


def prime_dppo(new: Tensor, decoder: Tensor, given: Tensor) -> Tensor:
    """prime-rl's `default_loss_fn`, without its KL term."""
    difference = torch.exp(new) - torch.exp(decoder)
    is_masked = torch.where(given > 0, difference > HIGH, difference < -LOW)
    return -(~is_masked * given * torch.exp(new - decoder))


def verl_dppo(new: Tensor, old: Tensor, given: Tensor) -> Tensor:
    """Verl's `compute_policy_loss_dppo_tv`, with the decoder's log-probs as the old ones."""
    ratio = torch.exp(torch.clamp(new - old, min=-20.0, max=20.0)).clamp(max=20.0).detach()
    difference = torch.exp(new) - torch.exp(old)
    is_valid = torch.where(given > 0, difference <= HIGH, difference >= -LOW).detach().double()
    return -given * ratio * new * is_valid


@pytest.mark.parametrize(("spread", "theirs"), [(0.4, prime_dppo), (0.4, verl_dppo), (3.0, verl_dppo)])
def test_dppo(spread: float, theirs: Callable[..., Tensor]) -> None:
    """The gradients of both, and of prime-rl the value: it has no cut of the ratio, which a spread of 3 would meet."""
    new, decoder, given, index = random_tokens(spread)
    found, metrics = losses.dppo(
        new, torch.zeros_like(new), given, index, clip_low=LOW, clip_high=HIGH, rollout_logprobs=decoder
    )
    expected = theirs(new, decoder, given)
    gradients = [torch.autograd.grad(loss.sum(), new, retain_graph=True)[0] for loss in (found, expected)]
    torch.testing.assert_close(*gradients, **CLOSE)
    if theirs is prime_dppo:
        torch.testing.assert_close(found, expected, **CLOSE)
    assert all(0 < metric.mean() < 0.5 for metric in metrics.values())
    assert bool((new - decoder > math.log(20)).any()) == (spread == 3.0)


def test_max_rl() -> None:
    """SkyRL's `compute_maxrl_advantage`, on rewards of 0 and 1, and on numbers of at least 0."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(125, 8, generator=generator, dtype=F64)
    for rewards in (numbers, (numbers < 0.2).double()):
        means = [sum(row) / len(row) for row in rewards.tolist()]
        rows = zip(rewards.tolist(), means, strict=True)
        expected = torch.tensor([[(reward - mean) / (mean + 1e-6) for reward in row] for row, mean in rows], dtype=F64)
        torch.testing.assert_close(advantages.max_rl(rewards), expected, **CLOSE)
