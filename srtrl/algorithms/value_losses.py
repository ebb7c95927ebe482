"""Value losses: what PPO's critic minimises, one number a token, before any reduction.

Every public function here is a value of `critic.value_loss` and has the signature

    (values, old_values, returns, sequence_index, *, value_clip) -> (token_loss, metrics)

with tensors [R], the response tokens of a micro-batch: `values` by the critic being trained (with gradient),
`old_values` by the critic before the update, `returns` the targets (advantages + old values). Each metric is a number a
token, [R], without gradient, under the same names for every micro-batch: the trainer logs its mean over all tokens of
the step.
"""

import torch
from torch import Tensor


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
