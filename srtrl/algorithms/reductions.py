"""Reductions, estimators of the KL to the reference, and filters.

*Reductions*, from one loss a token to the loss of a mini-batch, are the public functions whose first argument is
`token_loss`: the values of `algorithm.reduction`, of signature

    (token_loss, sequence_index, *, sequence_lengths, max_new_tokens) -> scalar

`token_loss` [R] and `sequence_index` [R] int64 (a row of `sequence_lengths`) are those of one micro-batch;
`sequence_lengths` [B] int64 are the response lengths of the *whole* mini-batch. Each returns the micro-batch's share of
the mini-batch's loss. The shares of all micro-batches sum to it: micro-batches change memory and not the gradient.

*Estimators of KL(policy || reference)* from sampled tokens, one number a token, are those whose first argument is
`logprobs`: the values of `algorithm.kl.estimator`, of signature

    (logprobs, ref_logprobs) -> [R]

with the log-probs [R] of tokens that the policy sampled, by the policy and by the reference. Names and properties:
J. Schulman, "Approximating KL Divergence", 2020 (joschu.net/blog/kl-approx.html). All are differentiable, but only the
gradient of k2 is, in expectation over samples of the current policy, the gradient of the KL; those of k1 and k3 are
zero and the gradient of KL(reference || policy).

*Filters*, which groups of rollouts the update learns from, are those whose first argument is `rewards`: the values in
`algorithm.filters`, of signature

    (rewards, correct) -> mask

and, by name, those of `algorithm.filter_options` that it declares. Rewards are [G, S], and the verdicts of the
verifier [G, S] bool, of G groups of S samples; the mask [G] bool is true for the
groups to keep. What is kept of a group depends on that group alone: with `rollout.dynamic_sampling` a filter sees the
groups one at a time, as their grades come in.
"""

import torch
from torch import Tensor


def token_mean(token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int) -> Tensor:
    """Mean over all tokens of the mini-batch (DAPO, arXiv 2503.14476, equation 12): long responses weigh more."""
    return token_loss.sum() / sequence_lengths.sum()


def sequence_mean_token_mean(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """Mean over sequences of the mean over each one's tokens (GRPO, arXiv 2402.03300, equation 3)."""
    return (token_loss / sequence_lengths[sequence_index]).sum() / len(sequence_lengths)


def sequence_mean_token_sum(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """Mean over sequences of the sum over each one's tokens: no length in the denominator at all."""
    return token_loss.sum() / len(sequence_lengths)


def sequence_mean_token_sum_norm(
    token_loss: Tensor, sequence_index: Tensor, *, sequence_lengths: Tensor, max_new_tokens: int
) -> Tensor:
    """`sequence_mean_token_sum` divided by the constant `max_new_tokens` (Dr. GRPO, arXiv 2503.20783).

    The constant brings the loss, and so the gradient norm that is clipped, to the scale of the other reductions without
    favouring any length.
    """
    return token_loss.sum() / (len(sequence_lengths) * max_new_tokens)


def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Log of policy / reference: unbiased, of high variance, negative for single tokens.

    As a reward (`placement: reward`) it is the usual choice; in the loss its gradient has expectation zero.
    """
    return logprobs - ref_logprobs


def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Half the squared log-ratio: biased, of low variance, never negative."""
    return (logprobs - ref_logprobs).square() / 2


def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Ratio - 1 - log(ratio), with ratio = reference / policy: unbiased, of low variance, never negative.

    The estimator of GRPO (equation 4 of DeepSeekMath, arXiv 2402.03300). `expm1` keeps small differences exact where
    exp(x) - 1 - x would cancel.
    """
    log_ratio = ref_logprobs - logprobs
    return torch.expm1(log_ratio) - log_ratio


def drop_uniform(rewards: Tensor, correct: Tensor) -> Tensor:
    """Drop groups whose rewards are all equal: their group-relative advantages are zero.

    Without it such groups still count in the denominator of the loss. With rewards of right and wrong alone it is
    `drop_all_right_or_wrong`; a further reward (of length, say) makes groups pass that are all wrong.
    """
    return (rewards != rewards[:, :1]).any(dim=1)


def drop_all_right_or_wrong(rewards: Tensor, correct: Tensor) -> Tensor:
    """Drop groups whose samples are all right or all wrong; their rewards do not matter.

    The constraint of DAPO's dynamic sampling, 0 < number of right samples < S (equation 11 of arXiv 2503.14476).
    """
    return correct.any(dim=1) & ~correct.all(dim=1)
