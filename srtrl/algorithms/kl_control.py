"""An adaptive KL coefficient: a controller that holds the KL to the reference at a target."""

MAX_ERROR = 0.2
"""The relative error that the controller sees is clipped to plus and minus this (Ziegler et al.).

`MAX_KL_ERROR` of `recipe_conflicts.py` is the same number: there a horizon that is too short is refused with its line.
"""


def adapted_coefficient(coefficient: float, kl: float, *, target: float, horizon: int, num_samples: int) -> float:
    """The KL coefficient of the next step: coefficient x (1 + error x num_samples / horizon).

    error = clip(kl / target - 1, -0.2, 0.2). Section 2.2 of Ziegler et al. 2019 (arXiv 1909.08593), a proportional
    controller in log-space; `num_samples / horizon` is their K (0.1), written as in their code, so that the speed does
    not depend on the batch. They measure the KL of a whole response; here both numbers are nats a token.

    Args:
        coefficient: that of this step.
        kl: mean KL of this step's samples, nats a token (an estimate: it may be negative).
        target: the KL to hold, nats a token, above 0.
        horizon: samples over which the coefficient follows.
        num_samples: samples of this step.

    Raises:
        ValueError: a horizon so short that the coefficient could become 0 or negative.
    """
    gain = num_samples / horizon
    if MAX_ERROR * gain >= 1:
        raise ValueError(
            f"algorithm.kl.horizon: expected more than {MAX_ERROR} x the {num_samples} samples of a step, or one step "
            f"could make the coefficient 0 or negative, found {horizon}"
        )
    error = min(max(kl / target - 1, -MAX_ERROR), MAX_ERROR)
    return coefficient * (1 + error * gain)
