"""Filters: which groups of rollouts the update learns from.

Every public function here is a value in `algorithm.filters` and has the signature `(rewards: Tensor) -> Tensor`:
rewards [G, S] of G groups of S samples, to a mask [G] bool that is true for the groups to keep.
"""

from torch import Tensor


def drop_uniform(rewards: Tensor) -> Tensor:
    """Drop groups whose rewards are all equal: their group-relative advantages are zero.

    The filter of DAPO's dynamic sampling (section 3.2 of arXiv 2503.14476). Without it such groups still count in
    the denominator of the loss.
    """
    return (rewards != rewards[:, :1]).any(dim=1)
