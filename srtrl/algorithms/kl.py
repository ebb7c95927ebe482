"""Estimators of KL(policy || reference) from sampled tokens, one number a token.

Every public function here is a value of `algorithm.kl.estimator` and has the signature
`(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor`, all [R]: the log-probs of tokens that the policy sampled, by the
policy and by the reference. Names and properties: J. Schulman, "Approximating KL Divergence", 2020
(joschu.net/blog/kl-approx.html). All are differentiable, but only the gradient of k2 is, in expectation over samples of
the current policy, the gradient of the KL; those of k1 and k3 are zero and the gradient of KL(reference || policy).
"""

import torch
from torch import Tensor


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
