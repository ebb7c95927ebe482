"""Policy losses, value losses and importance weights: one number a token, before any reduction.

*Policy losses* are the functions whose first argument is `logprobs`: the values of `algorithm.loss`, of signature

    (logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high) -> (token_loss, metrics)

with tensors [R], the response tokens of a micro-batch: `logprobs` by the policy being trained (with gradient),
`old_logprobs` by the policy that sampled, `sequence_index` int64 that says which tokens belong to one sequence (whole
sequences are in one micro-batch; losses of single tokens do not need it). A loss that declares `entropy` (with
gradient), `rollout_logprobs` or, with a KL, `ref_logprobs` gets these, too, [R]. Further keyword arguments with
defaults are its options, given as `algorithm.loss_options`. `token_loss` [R] is to be minimised; how it becomes one
number is the reduction's part. Each metric is a number a token, [R], without gradient: the trainer logs its mean over
all tokens of the step under its name, that of a function of your own as `loss/<name>`. A micro-batch without it counts
as zeros.

*Value losses* are those whose first argument is `values`: what the option `value_loss` may name, of signature

    (values, old_values, returns, sequence_index, *, value_clip) -> (token_loss, metrics)

with tensors [R], the response tokens of a micro-batch: `values` by the model being trained (with gradient),
`old_values` by the same before the update, `returns` the targets (advantages + old values). Each metric is a number a
token, [R], without gradient, under the same names for every micro-batch: the trainer logs its mean over all tokens of
the step.
"""

import torch
from torch import Tensor


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's clipped surrogate: -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), ratio = exp(new - old).

    Equation 7 of PPO (arXiv 1707.06347), a token at a time as in GRPO (arXiv 2402.03300); DAPO's "clip higher"
    (arXiv 2503.14476) is `clip_high` above `clip_low`.

    Metrics: `clip_share/low` and `clip_share/high` mark tokens whose gradient the clip took away: a ratio below
    1 - clip_low at a negative advantage, above 1 + clip_high at a positive one. `sequence_index` is not used.
    """
    return _clipped(torch.exp(logprobs - old_logprobs), advantages, clip_low, clip_high)


def dual_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    ratio_cap: float = 3.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """`ppo_clip` whose loss is at most -ratio_cap * A where the advantage is negative.

    Dual-clip PPO of arXiv 1912.09729: max(min(ratio * A, clip(ratio) * A), ratio_cap * A) for A < 0. Without it the
    loss of a token that has become much more likely although its advantage is negative grows without bound. verl always
    has this clip (`clip_ratio_c`, 3.0); OpenRLHF has it as `dual_clip`; TRL's `delta` is the same.

    Metrics: those of `ppo_clip`, and `clip_share/dual` marks the tokens whose gradient the cap took away.

    Raises:
        ValueError: `ratio_cap` is not above 1: every unchanged token of negative advantage would lose its gradient.
    """
    if not ratio_cap > 1:
        raise ValueError(f"algorithm.loss_options.ratio_cap: expected a number above 1, found {ratio_cap}")
    ratio = torch.exp(logprobs - old_logprobs)
    token_loss, metrics = _clipped(ratio, advantages, clip_low, clip_high)
    is_capped = (ratio > ratio_cap) & (advantages < 0)  # [R]
    metrics["clip_share/dual"] = is_capped.to(ratio.dtype)
    return torch.where(is_capped, -ratio_cap * advantages, token_loss), metrics


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO: `ppo_clip` with one ratio a sequence, s = exp(mean over its tokens of (new - old)).

    Equations 5 and 7 of arXiv 2507.18071. Every token of a sequence carries the sequence's loss, so that the reduction
    `sequence_mean_token_mean` gives the paper's mean over sequences. The ratio is a geometric mean, close to 1, and so
    the clip range is narrow: 3e-4 and 4e-4 in the paper.

    Metrics: as in `ppo_clip`; a clipped sequence marks all its tokens.
    """
    ratio = torch.exp(sequence_means(logprobs - old_logprobs, sequence_index)).to(logprobs.dtype)  # [R]
    return _clipped(ratio, advantages, clip_low, clip_high)


def gspo_token(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """GSPO-token: the sequence's ratio s of `gspo` as a number, the gradient of the token's own log-prob.

    Equations 13 and 14 of arXiv 2507.18071: the ratio is sg(s) * exp(new - sg(new)), sg the stop-gradient. The value is
    that of `gspo`; with one advantage a sequence and `sequence_mean_token_mean` so is the gradient. It differs where
    advantages differ within a sequence, and under other reductions. verl's `gspo` is this one.

    Metrics: as in `gspo`.
    """
    ratio = torch.exp(sequence_means((logprobs - old_logprobs).detach(), sequence_index)).to(logprobs.dtype)  # [R]
    return _clipped(ratio * torch.exp(logprobs - logprobs.detach()), advantages, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """CISPO: -sg(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob, with sg the stop-gradient.

    Equations 4 and 5 of MiniMax-M1 (arXiv 2506.13585): the clip bounds a token's weight and takes no token's gradient
    away. `clip_low` 1 means no lower bound, as in the paper's runs. verl clips the same way. TRL's `epsilon_high` is
    the greatest weight itself, 1 + `clip_high` here, and TRL has no lower bound.

    Metrics: `clip_share/low` and `clip_share/high` mark tokens whose weight was clipped, of either sign of the
    advantage, but not without one; they keep their gradient. `sequence_index` is not used.
    """
    ratio = torch.exp((logprobs - old_logprobs).detach())
    metrics = {
        "clip_share/low": ((ratio < 1 - clip_low) & (advantages != 0)).to(ratio.dtype),
        "clip_share/high": ((ratio > 1 + clip_high) & (advantages != 0)).to(ratio.dtype),
    }
    return -ratio.clamp(1 - clip_low, 1 + clip_high) * advantages * logprobs, metrics


def dppo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    rollout_logprobs: Tensor,
    ratio_cap: float = 20.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """DPPO: -min(ratio, ratio_cap) * A, without tokens that have moved too far in probability, not in their ratio.

    "Binary TV" of arXiv 2602.04879 (equation 13): ratio = p / mu, with mu the decoder's probability. A token of
    positive advantage is dropped where p - mu > clip_high, one of negative advantage where p - mu < -clip_low: this
    bounds the total variation, so rare tokens may move freely and likely ones may not. prime-rl (whose default loss
    this is, at 0.2 / 0.2) and SkyRL have no cap; verl's `dppo_tv`, which takes mu from the trainer, cuts the ratio at
    20, and the gradient here is its: min(ratio, ratio_cap) * A * the gradient of `logprobs`. A dropped token stays in
    the denominators of the reduction, as in all of them.

    Metrics: `clip_share/low` and `clip_share/high` mark the dropped tokens. `old_logprobs` and `sequence_index` are not
    used: the ratio to the policy that sampled is in the loss itself.

    Raises:
        ValueError: `ratio_cap` is below 1: an unchanged token would have a weight below 1.
    """
    if not ratio_cap >= 1:
        raise ValueError(f"algorithm.loss_options.ratio_cap: expected a number of at least 1, found {ratio_cap}")
    difference = torch.exp(logprobs.detach()) - torch.exp(rollout_logprobs)  # [R]
    is_low, is_high = (difference < -clip_low) & (advantages < 0), (difference > clip_high) & (advantages > 0)
    weights = torch.exp(logprobs.detach() - rollout_logprobs).clamp(max=ratio_cap)  # [R]
    weights = weights.masked_fill(is_low | is_high, 0.0)
    metrics = {"clip_share/low": is_low.to(weights.dtype), "clip_share/high": is_high.to(weights.dtype)}
    return -weights * advantages * torch.exp(logprobs - logprobs.detach()), metrics


def policy_gradient(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """REINFORCE: -A * logprob, without ratio and without clip (Williams, 1992).

    At the weights that sampled, its gradient is that of `ppo_clip`; after the first optimizer step on a batch nothing
    corrects for the change. `old_logprobs`, `sequence_index` and the clip range are not used; no metrics.
    """
    return -advantages * logprobs, {}


def clipped_value(
    values: Tensor, old_values: Tensor, returns: Tensor, sequence_index: Tensor, *, value_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the greater of (value - return)^2 and (clipped value - return)^2.

    The clipped value is within `value_clip` of the old one. Not in the PPO paper; from OpenAI's baselines (`ppo2`), the
    ninth of the "37 implementation details of PPO" (Huang et al., 2022); arXiv 2006.05990 found that it does harm in
    continuous control. verl and OpenRLHF have it too, with the same factor of a half.

    Metrics: `clip_share/value` marks tokens whose gradient the clip took away: the value has already moved further than
    `value_clip` towards the return. `sequence_index` is not used.
    """
    clipped = torch.clamp(values, old_values - value_clip, old_values + value_clip)
    error, clipped_error = (values - returns).square(), (clipped - returns).square()
    is_clipped = clipped_error > error  # [R]
    metrics = {"clip_share/value": is_clipped.to(values.dtype)}
    return torch.where(is_clipped, clipped_error, error) / 2, metrics


def squared_error(
    values: Tensor, old_values: Tensor, returns: Tensor, sequence_index: Tensor, *, value_clip: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """Half the squared error: (value - return)^2 / 2. `value_clip` and `old_values` are not used; no metrics."""
    return (values - returns).square() / 2, {}


def truncated_weights(old_logprobs: Tensor, rollout_logprobs: Tensor, *, cap: float) -> Tensor:
    """min(probability by the trainer / probability by the decoder, cap), for each token.

    Decoder and trainer may compute the same weights with different kernels or types; the samples are then from a policy
    that is not quite the one whose ratio the loss takes. Truncated importance sampling (Ionides, 2008) corrects that
    with a bias that the cap bounds. The ratio is that of each token, as in OpenRLHF and at verl's `token` level.

    Args:
        old_logprobs: by the trainer, with the weights that sampled, [R].
        rollout_logprobs: by the decoder, [R].
        cap: greatest weight, above 0.

    Returns:
        Weights [R] in the dtype of `old_logprobs`, without gradient, to be multiplied into the policy's token losses.
    """
    log_ratio = old_logprobs.detach().double() - rollout_logprobs.detach().double()  # [R]
    return torch.exp(log_ratio).clamp(max=cap).to(old_logprobs.dtype)


def sequence_sums(numbers: Tensor, sequence_index: Tensor) -> Tensor:
    """For each token the sum of `numbers` over all tokens of its sequence, [R] -> [R], with gradient.

    Summed in float64: the log-ratios of a long response must add up to the same number in any packing,
    and GSPO's clip range (3e-4) is too narrow for the rounding of a float32 sum.

    Args:
        numbers: [R].
        sequence_index: [R] int64, not negative; the sequences need not be contiguous, nor their numbers dense.

    Returns:
        [R] float64.
    """
    if len(sequence_index) == 0:
        return numbers.double()
    sums = numbers.new_zeros(int(sequence_index.max()) + 1).double()
    return sums.index_add(0, sequence_index, numbers.double())[sequence_index]


def sequence_means(numbers: Tensor, sequence_index: Tensor) -> Tensor:
    """For each token the mean of `numbers` over all tokens of its sequence: `sequence_sums` over the lengths."""
    return sequence_sums(numbers, sequence_index) / sequence_sums(
        numbers.detach().new_ones(len(numbers)), sequence_index
    )


def _clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-min(ratio * A, clip(ratio) * A), and which tokens the clip took the gradient from.

    Without `clamp`: whether that has a gradient exactly at its bounds (where every ratio is with a range of 0) differs
    between versions of torch. Here a ratio at a bound keeps its gradient.
    """
    is_low, is_high = (ratio < 1 - clip_low) & (advantages < 0), (ratio > 1 + clip_high) & (advantages > 0)
    clipped_ratio = torch.where(is_low, 1 - clip_low, torch.where(is_high, 1 + clip_high, ratio))
    metrics = {"clip_share/low": is_low.to(ratio.dtype), "clip_share/high": is_high.to(ratio.dtype)}
    return -clipped_ratio * advantages, metrics
