"""Advantages: from the rewards of a group's samples to the number that scales each sample's learning signal.

Every public function here is a value of `algorithm.advantage` and has the signature
`(rewards: Tensor) -> Tensor`, both [G, S]: G groups (draws of a prompt) of S samples each.
"""

import torch
from torch import Tensor

EPSILON = 1e-6
"""Added to the standard deviation, as in verl; TRL adds 1e-4."""


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
    num_samples = rewards.shape[1]
    assert num_samples >= 2, f"groups of at least 2 samples, found {num_samples}"
    exact = rewards.double()
    deviation = exact - exact.mean(dim=1, keepdim=True)  # [G, S]
    spread = exact.std(dim=1, correction=1, keepdim=True)  # [G, 1]
    uniform = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)  # [G, 1]
    return torch.where(uniform, 0.0, deviation / (spread + EPSILON)).to(rewards.dtype)
