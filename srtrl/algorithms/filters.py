"""Filters: which groups of rollouts the update learns from.

Every public function here is a value in `algorithm.filters` and has the signature
`(rewards: Tensor, correct: Tensor) -> Tensor`: rewards [G, S] and the verifier's verdicts [G, S] bool of G groups of S
samples, to a mask [G] bool that is true for the groups to keep. What is kept of a group depends on that group alone:
with `rollout.dynamic_sampling` a filter sees the groups one at a time, as their grades come in.
"""

from torch import Tensor


def drop_uniform(rewards: Tensor, correct: Tensor) -> Tensor:
    """Drop groups whose rewards are all equal: their group-relative advantages are zero.

    Without it such groups still count in the denominator of the loss. With rewards of right and wrong alone it is
    `drop_all_right_or_wrong`; a further reward (of length, say) makes groups pass that are all wrong.
    """
    return (rewards != rewards[:, :1]).any(dim=1)


def drop_all_right_or_wrong(rewards: Tensor, correct: Tensor) -> Tensor:
    """Drop groups whose samples are all right or all wrong, whatever their rewards.

    The constraint of DAPO's dynamic sampling, 0 < number of right samples < S (equation 11 of arXiv 2503.14476).
    """
    return correct.any(dim=1) & ~correct.all(dim=1)
