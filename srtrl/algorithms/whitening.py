"""Whitening: advantages of mean 0 and standard deviation 1 over all response tokens of a batch.

Dimension letters: B sequences, L the longest response (shorter ones are padded on the right).
"""

import torch
from torch import Tensor

EPSILON = 1e-8
"""Added to the variance, as in verl (`masked_whiten`); OpenRLHF takes it as the least variance."""


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
        scaled = (chosen - chosen.mean()) / (chosen.var(correction=1) + EPSILON).sqrt()  # [N]
        whitened[mask] = scaled.to(values.dtype)
    return whitened
