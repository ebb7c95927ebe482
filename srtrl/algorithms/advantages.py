"""Advantages: from rewards to the number that scales each token's learning signal.

Every public function here is a value of `algorithm.advantage`, of one of two kinds.

*Sequence-level*, `(rewards: Tensor) -> Tensor`, both [G, S]: G groups (draws of a prompt) of S samples each, one reward
and one advantage a sample.

*Token-level*, marked `@token_level` (`@token_level(needs_values=True)` if the values are used, so that the recipe
must have a value model):

    (token_rewards, values, mask, *, group_index, gamma, lam) -> advantages

with `token_rewards`, `values`, `mask` (bool) and the result [B, L]: B responses, L tokens in the longest, shorter ones
padded on the right, where the mask is false and the result is zero. `values` are the value model's, zeros without one;
`group_index` [B] int64 says which responses are of one draw of a prompt. All is computed in float64. The value
model's targets are advantages + values, so a token-level function that needs values must not rescale what it returns.

Both kinds get `reward_terms`, `reward_weights`, `correct`, `lengths`, `prompt_ids` and `step` if they declare them
(docs/extending.md), and `algorithm.advantage_options`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

AdvantageFunction = Callable[..., Any]
EPSILON = 1e-6
"""Added to the standard deviation, as in verl; TRL adds 1e-4."""
WHITEN_EPSILON = 1e-8
"""Added to the variance, as in verl (`masked_whiten`); OpenRLHF takes it as the least variance."""


def token_level(function: AdvantageFunction | None = None, *, needs_values: bool = False) -> AdvantageFunction:
    """Mark an advantage function as token-level: `@token_level` or `@token_level(needs_values=True)`.

    Returns:
        The same function, with the attributes `token_level` (True) and `needs_values`.
    """

    def mark(marked: AdvantageFunction) -> AdvantageFunction:
        marked.token_level = True  # type: ignore[attr-defined]
        marked.needs_values = needs_values  # type: ignore[attr-defined]
        return marked

    return mark if function is None else mark(function)


def is_token_level(function: AdvantageFunction) -> bool:
    """Whether an advantage function bears the mark `@token_level`."""
    return bool(getattr(function, "token_level", False))


def needs_values(function: AdvantageFunction) -> bool:
    """Whether an advantage function bears the mark `@token_level(needs_values=True)`."""
    return bool(getattr(function, "needs_values", False))


def group_relative(rewards: Tensor) -> Tensor:
    """GRPO: (reward - mean of the group) / (standard deviation of the group + 1e-6).

    Section 4.1.2 of DeepSeekMath (arXiv 2402.03300) does not say which standard deviation; this is the unbiased one
    (divisor S - 1), as in verl (`compute_grpo_outcome_advantage`) and TRL (`GRPOTrainer`). A group whose rewards are
    all equal gets exactly zero: rounding of its mean must not become a learning signal.

    Args:
        rewards: [G, S], S at least 2.

    Returns:
        Advantages [G, S], in the dtype of `rewards`; all tokens of a sample share its advantage.
    """
    exact = _group_rewards(rewards)
    deviation = exact - exact.mean(dim=1, keepdim=True)  # [G, S]
    spread = exact.std(dim=1, correction=1, keepdim=True)  # [G, 1]
    return _zero_if_uniform(rewards, deviation / (spread + EPSILON))


def group_centered(rewards: Tensor) -> Tensor:
    """Dr. GRPO: reward - mean of the group, not divided by the standard deviation.

    Section 3 of arXiv 2503.20783: the division favours problems that are nearly always or nearly never solved. A
    group whose rewards are all equal gets exactly zero.

    Args:
        rewards: [G, S], S at least 2.

    Returns:
        Advantages [G, S], in the dtype of `rewards`.
    """
    exact = _group_rewards(rewards)
    return _zero_if_uniform(rewards, exact - exact.mean(dim=1, keepdim=True))


def leave_one_out(rewards: Tensor) -> Tensor:
    """RLOO: reward - mean of the group's other rewards.

    Section 2 of arXiv 2402.14740 (after Kool, van Hoof and Welling, 2019): the baseline of a sample does not depend on
    it, so the gradient is unbiased. It equals `group_centered` times S / (S - 1). A group whose rewards are all equal
    gets exactly zero.

    Args:
        rewards: [G, S], S at least 2.

    Returns:
        Advantages [G, S], in the dtype of `rewards`.
    """
    exact = _group_rewards(rewards)
    others = (exact.sum(dim=1, keepdim=True) - exact) / (rewards.shape[1] - 1)  # [G, S]
    return _zero_if_uniform(rewards, exact - others)


def max_rl(rewards: Tensor) -> Tensor:
    """MaxRL: (reward - mean of the group) / (mean of the group + 1e-6).

    arXiv 2602.02710: with rewards of 0 and 1 the division by the share of right samples makes the gradient that of the
    log-probability of a right answer, so problems that are seldom solved weigh more than in GRPO. SkyRL (`maxrl`) has
    the same formula. A group whose rewards are all equal gets exactly zero.

    Args:
        rewards: [G, S], S at least 2.

    Returns:
        Advantages [G, S], in the dtype of `rewards`.

    Raises:
        ValueError: the mean of a group is negative, or 0 among unequal rewards: there is no share to divide by.
    """
    exact = _group_rewards(rewards)
    mean = exact.mean(dim=1, keepdim=True)  # [G, 1]
    if bool(((mean <= 0) & (exact != 0)).any()):
        raise ValueError(
            f"algorithm.advantage: max_rl divides by a group's mean reward, found one of {float(mean.min()):g}: "
            "expected rewards that are never negative (no penalties, no KL in the reward)"
        )
    return _zero_if_uniform(rewards, (exact - mean) / (mean + EPSILON))


@token_level(needs_values=True)
def gae(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, group_index: Tensor, gamma: float, lam: float
) -> Tensor:
    """PPO: generalised advantage estimation, the sum over l of (gamma lam)^l delta(t + l).

    delta(t) = reward(t) + gamma value(t + 1) - value(t), equation 16 of arXiv 1506.02438, computed backwards:
    A(t) = delta(t) + gamma lam A(t + 1). With gamma = lam = 1 it is the sum of the rewards to come less the value.

    The value after the last response token is 0, also if the response was cut at the length limit: being cut ends
    the episode, with the reward that the graders gave. verl and OpenRLHF do the same; the alternative, to bootstrap
    from the value of the state after the cut (arXiv 1712.00378), treats the limit as no part of the task.

    Args:
        token_rewards: [B, L].
        values: the value of the state in which each token was chosen, [B, L].
        mask: [B, L] bool, true for the response's tokens, which come first in each row.
        group_index: [B], not used.
        gamma: discount.
        lam: lambda.

    Returns:
        Advantages [B, L] float64, zero where the mask is false.
    """
    rewards, baseline = _padded_with_zeros(token_rewards, mask), _padded_with_zeros(values, mask)
    next_values = torch.cat((baseline[:, 1:], torch.zeros_like(baseline[:, :1])), dim=1)  # [B, L]
    return _discounted_sums((rewards + gamma * next_values - baseline) * mask, gamma * lam)


@token_level
def reinforce_plus_plus(
    token_rewards: Tensor, values: Tensor, mask: Tensor, *, group_index: Tensor, gamma: float, lam: float
) -> Tensor:
    """REINFORCE++: a token's discounted sum of rewards to come, whitened over all tokens of the batch.

    arXiv 2501.03262: with the KL in the reward (k1) and gamma = 1 the sum is the response's reward less coefficient x
    the KL of this token and those after it; the normalisation is over the whole batch, not over a prompt's group, and
    there is no other baseline. It is meant for one sample a prompt as well.

    Args:
        token_rewards: [B, L].
        values: [B, L], not used.
        mask: [B, L] bool, true for the response's tokens, which come first in each row.
        group_index: [B], not used: that is the point of it.
        gamma: discount.
        lam: not used.

    Returns:
        Advantages [B, L] float64, zero where the mask is false; all zero where all sums are equal.
    """
    return whiten(_discounted_sums(_padded_with_zeros(token_rewards, mask), gamma), mask)


def whiten(values: Tensor, mask: Tensor) -> Tensor:
    """(value - mean) / sqrt(variance + 1e-8), mean and variance over the tokens of the mask.

    Each token counts once, so long responses weigh more in both. The variance is the unbiased one (divisor n - 1), as
    in verl; OpenRLHF divides by n. Values that are all equal (a single token among them) become exactly 0: the
    rounding of their mean, divided by 1e-4, must not become a learning signal.

    Args:
        values: [B, L].
        mask: [B, L] bool, true for the tokens that there are; at least one.

    Returns:
        [B, L] in the dtype of `values` (computed in float64), 0 where the mask is false.
    """
    chosen = values[mask].double()  # [N]
    assert len(chosen) >= 1, "no token to whiten: the mask is false everywhere"
    whitened = torch.zeros_like(values)
    if not bool((chosen == chosen[0]).all()):
        scaled = (chosen - chosen.mean()) / (chosen.var(correction=1) + WHITEN_EPSILON).sqrt()  # [N]
        whitened[mask] = scaled.to(values.dtype)
    return whitened


def _group_rewards(rewards: Tensor) -> Tensor:
    num_samples = rewards.shape[1]
    assert num_samples >= 2, f"groups of at least 2 samples, found {num_samples}"
    return rewards.double()


def _zero_if_uniform(rewards: Tensor, advantages: Tensor) -> Tensor:
    uniform = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # [G, 1]
    return torch.where(uniform, 0.0, advantages).to(rewards.dtype)


def _padded_with_zeros(numbers: Tensor, mask: Tensor) -> Tensor:
    """Replace numbers after the end of a response by zeros: they may be NaN."""
    return torch.where(mask, numbers.double(), 0.0)  # [B, L]


def _discounted_sums(numbers: Tensor, discount: float) -> Tensor:
    """Sum over l of discount^l x numbers(t + l), along the last dimension of [B, L], which is zero after each end."""
    # [L, B], the numbers of one position side by side: over rows this takes seconds
    sums = numbers.T.clone(memory_format=torch.contiguous_format)
    for position in reversed(range(len(sums) - 1)):
        sums[position].add_(sums[position + 1], alpha=discount)
    return sums.T.contiguous()
