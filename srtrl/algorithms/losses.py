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


def importance_weights(
    old_logprobs: Tensor, rollout_logprobs: Tensor, sequence_index: Tensor, *, mode: str, min: float, max: float
) -> tuple[Tensor, Tensor]:
    """Weights by r, the ratio of a token's probability by the trainer to that by the decoder, within [min, max].

    The decoder's is of an earlier policy in some values of `rollout.mode`, and of other kernels or types
    where these differ. By `mode`:

    - `token_truncate`: r, at least min and at most max. Truncated importance sampling (Ionides, 2008).
    - `token_mask`: r, and 0 outside the range: IcePop (arXiv 2510.18855).
    - `sequence_truncate`, `sequence_mask`: the same of the product of a sequence's ratios, the same for all its tokens,
      as in TRL and at verl's `sequence` level. It drops ordinary long samples through rounding: errors of 0.01 nats a
      token add up to 0.45 in 2,000 tokens where they are independent, and to 20 where they are of one sign.
    - `sequence_mean_mask`: r, and 0 for all tokens of a sequence whose geometric mean of ratios is outside the range
      (`seq-mask-tis` of NeMo-RL and OpenRLHF). Its range is narrow: 0.999 to 1.002 in NeMo-RL.

    A token of weight 0 stays in the denominators of the reduction, as in TRL and prime-rl; verl's rejection takes it
    out of them.

    Args:
        old_logprobs: by the trainer, with the weights before the update, [R].
        rollout_logprobs: by the decoder, [R].
        sequence_index: which tokens belong to one sequence, [R] int64.
        mode: one of the names above.
        min: at most 1.
        max: at least 1.

    Returns:
        Weights [R] in the dtype of `old_logprobs`, without gradient, to be multiplied into the policy's token losses;
        and bool [R], which tokens have been truncated or dropped.
    """
    log_ratio = old_logprobs.detach().double() - rollout_logprobs.detach().double()  # [R]
    ratio = bounded = log_ratio.exp()
    if mode in ("sequence_truncate", "sequence_mask"):
        ratio = bounded = sequence_sums(log_ratio, sequence_index).exp()
    elif mode == "sequence_mean_mask":
        bounded = sequence_means(log_ratio, sequence_index).exp()
    is_outside = (bounded < min) | (bounded > max)  # [R]
    weights = ratio.clamp(min, max) if mode.endswith("truncate") else ratio.masked_fill(is_outside, 0.0)
    return weights.to(old_logprobs.dtype), is_outside


def opsm_mask(
    rollout_logprobs: Tensor, logprobs: Tensor, advantages: Tensor, sequence_index: Tensor, *, threshold: float
) -> Tensor:
    """OPSM: which tokens of negative advantage are in a sequence that the policy has moved away from.

    Section 3.1 of DeepSeek-V3.2 (arXiv 2512.02556): the mean over the sequence of (log mu - log p) is above the
    threshold, mu the decoder's probability and p the policy's now, so the mask changes within an update. TRL has
    the same threshold.

    Args:
        rollout_logprobs: by the decoder, [R].
        logprobs: by the policy being trained, [R].
        advantages: [R].
        sequence_index: [R] int64.
        threshold: in nats per token.

    Returns:
        Bool [R], true where the policy's loss becomes 0; the token stays in the denominators of the reduction.
    """
    moved = sequence_means(rollout_logprobs - logprobs.detach(), sequence_index)  # [R]
    return (advantages < 0) & (moved > threshold)


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
