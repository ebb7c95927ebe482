"""A loss of the tokens at which the policy hesitates: an example of docs/extending.md."""

import torch
from torch import Tensor

from srtrl.algorithms.losses import ppo_clip


def most_entropic(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    sequence_index: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    entropy: Tensor,
    share: float = 0.2,
) -> tuple[Tensor, dict[str, Tensor]]:
    """PPO's loss of the `share` of each response with the highest entropies (after arXiv 2506.01939); 0 elsewhere.

    The paper takes the share of a batch. That of a response does not depend on how micro-batches are cut.
    """
    is_learned = torch.zeros_like(entropy)  # [R]
    for index in torch.unique(sequence_index):
        is_own = sequence_index == index
        is_learned[is_own] = (entropy[is_own] >= entropy[is_own].quantile(1 - share)).to(entropy.dtype)
    token_loss, metrics = ppo_clip(
        logprobs, old_logprobs, advantages, sequence_index, clip_low=clip_low, clip_high=clip_high
    )
    return token_loss * is_learned, {**metrics, "learned_share": is_learned}
