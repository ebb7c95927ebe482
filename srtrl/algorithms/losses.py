"""Policy losses: one number a token, before any reduction.

Every public function here is a value of `algorithm.loss` and has the signature

    (logprobs, old_logprobs, advantages, sequence_index, *, clip_low, clip_high) -> (token_loss, metrics)

with tensors [R], the response tokens of a micro-batch: `logprobs` by the policy being trained (with gradient),
`old_logprobs` by the policy that sampled, `sequence_index` int64 that says which tokens belong to one sequence (whole
sequences are in one micro-batch; losses of single tokens do not need it). `token_loss` [R] is to be minimised; how it
becomes one number is the reduction's part. Each metric is a number a token, [R], without gradient: the trainer logs its
mean over all tokens of the step under its name.
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
    ratio = torch.exp(logprobs - old_logprobs)
    clipped_ratio = ratio.clamp(1 - clip_low, 1 + clip_high)
    token_loss = -torch.minimum(ratio * advantages, clipped_ratio * advantages)
    with torch.no_grad():
        metrics = {
            "clip_share/low": ((ratio < 1 - clip_low) & (advantages < 0)).to(ratio.dtype),
            "clip_share/high": ((ratio > 1 + clip_high) & (advantages > 0)).to(ratio.dtype),
        }
    return token_loss, metrics
