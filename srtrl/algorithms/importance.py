"""Importance weights between the policy as the trainer computes it and as the decoder sampled it."""

from typing import Literal

import torch
from torch import Tensor

from srtrl.algorithms.segments import sequence_sums


def truncated_weights(
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    sequence_index: Tensor,
    *,
    cap: float,
    level: Literal["token", "sequence"],
) -> Tensor:
    """min(probability by the trainer / probability by the decoder, cap), for each token.

    Decoder and trainer may compute the same weights with different kernels or types; the samples are then from a policy
    that is not quite the one whose ratio the loss takes. Truncated importance sampling (Ionides, 2008) corrects that
    with a bias that the cap bounds. `token` takes the ratio of each token, as OpenRLHF and verl's `token` level do;
    `sequence` takes the ratio of the whole response, the product over its tokens, as verl's `sequence` level does: with
    cap infinity unbiased, and of a variance that grows with the length.

    Args:
        old_logprobs: by the trainer, with the weights that sampled, [R].
        rollout_logprobs: by the decoder, [R].
        sequence_index: [R] int64.
        cap: greatest weight, above 0.
        level: `token` or `sequence`.

    Returns:
        Weights [R] in the dtype of `old_logprobs`, without gradient, to be multiplied into the policy's token losses.
    """
    log_ratio = old_logprobs.detach().double() - rollout_logprobs.detach().double()  # [R]
    if level == "sequence":
        log_ratio = sequence_sums(log_ratio, sequence_index)
    return torch.exp(log_ratio).clamp(max=cap).to(old_logprobs.dtype)
