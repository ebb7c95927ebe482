"""Losses and advantages against the formulas of other codes, written down here, on 1,000 random tokens: within 1e-12.

`test_trl_parity.py` runs the code of TRL itself; prime-rl, verl and SkyRL are not installed.
"""

import math
from collections.abc import Callable
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from srtrl.algorithms import advantages, losses
from srtrl.algorithms.losses import importance_weights, opsm_mask
from srtrl.recipe.schema import ImportanceMode

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


def their_weights(mode: str, old: Tensor, decoder: Tensor, low: float, high: float) -> Tensor:
    """Rows [B, L] of sequences: TRL's four modes, and `seq-mask-tis` of OpenRLHF and NeMo-RL, of tokens' ratios."""
    difference = old - decoder
    if mode == "sequence_mean_mask":
        mean = torch.exp(difference.sum(dim=1) / difference.shape[1])
        return torch.exp(difference) * ((mean >= low) & (mean <= high))[:, None]
    ratio = torch.exp(difference.sum(dim=-1, keepdim=True) if mode.startswith("sequence") else difference)
    if mode.endswith("truncate"):
        return torch.clamp(ratio, min=low, max=high)
    return ratio.masked_fill((ratio < low) | (ratio > high), 0.0)


MODES = sorted(set(get_args(ImportanceMode)) - {"auto", "none"})


@pytest.mark.parametrize("mode", MODES)
def test_importance_weights(mode: str) -> None:
    new, decoder, _, index = random_tokens(0.4)
    low, high = (0.95, 1.05) if mode == "sequence_mean_mask" else (0.5, 1.5)
    found, is_outside = importance_weights(new, decoder, index, mode=mode, min=low, max=high)
    rows = new.detach().reshape(-1, 20), decoder.reshape(-1, 20)
    expected = their_weights(mode, *rows, low, high).broadcast_to(rows[0].shape).flatten()
    torch.testing.assert_close(found, expected, **CLOSE)
    assert not found.requires_grad
    assert 0.1 < is_outside.double().mean() < 0.9
    same, is_outside = importance_weights(decoder, decoder, index, mode=mode, min=1.0, max=1.0)
    assert torch.equal(same, torch.ones_like(same)), "no weights where the policies are equal"
    assert not is_outside.any()


def test_the_product_of_ratios_drops_what_rounding_has_moved() -> None:
    """Differences of 0.012 nats in 100 tokens, between 1/3 and 3 (TRL's issue 4772); no other mode drops a token."""
    decoder, index = torch.full((100,), -1.0), torch.zeros(100, dtype=torch.int64)
    for mode in MODES:
        weights, _ = importance_weights(decoder + 0.012, decoder, index, mode=mode, min=1 / 3, max=3.0)
        assert bool((weights == 0).all()) == (mode == "sequence_mask")
        assert bool((weights != 0).all()) == (mode != "sequence_mask")


@pytest.mark.parametrize("threshold", [0.02, 0.1])
def test_opsm_equals_trl(threshold: float) -> None:
    trainer = pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is not installed: pip install 'trl>=1.0'")
    new, decoder, given, index = random_tokens(0.4)
    rows = [numbers.reshape(-1, 20) for numbers in (given, new, decoder)]
    kept = trainer.GRPOTrainer.get_off_policy_mask(*rows, torch.ones(50, 20), threshold).flatten()
    found = opsm_mask(decoder, new, given, index, threshold=threshold)
    assert torch.equal(found, kept == 0)
    assert 0 < found.double().mean() < 0.5


def test_max_rl() -> None:
    """SkyRL's `compute_maxrl_advantage`, on rewards of 0 and 1, and on numbers of at least 0."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.rand(125, 8, generator=generator, dtype=F64)
    for rewards in (numbers, (numbers < 0.2).double()):
        means = [sum(row) / len(row) for row in rewards.tolist()]
        rows = zip(rewards.tolist(), means, strict=True)
        expected = torch.tensor([[(reward - mean) / (mean + 1e-6) for reward in row] for row, mean in rows], dtype=F64)
        torch.testing.assert_close(advantages.max_rl(rewards), expected, **CLOSE)
