"""What an update minimises: the loss, reduction and KL that a recipe names."""

from __future__ import annotations

from torch import Tensor

from srtrl.algorithms.losses import truncated_weights
from srtrl.recipe import Recipe
from srtrl.resolve import resolve_part
from srtrl.rollout.packing import PackedBatch

RESERVED_METRICS = frozenset({"step", "loss", "entropy", "grad_norm", "learning_rate", "accuracy"})
"""Names that a loss function's metrics may not have: the trainer logs them itself."""
RESERVED_FAMILIES = (
    *("critic/", "data/", "engine/", "eval/", "grading/", "groups/", "importance/", "kl/", "length/"),
    *("logprob_difference/", "memory/", "reward/", "samples/", "time/", "tokens/"),
)
"""What those names may not begin with, for the same reason. `clip_share/` is the loss functions' own."""


class Objective:
    """What is minimised: the functions that the recipe names, and their options."""

    def __init__(self, recipe: Recipe, *, kl_coefficient: float) -> None:
        """Resolve the names of `recipe.algorithm`.

        Args:
            recipe: `algorithm`, and `rollout.max_new_tokens`.
            kl_coefficient: the present one; the recipe's is only the first where it is adaptive.

        Raises:
            ValueError: a name is unknown.
        """
        algorithm = recipe.algorithm
        self.algorithm = algorithm
        self.max_new_tokens = recipe.rollout.max_new_tokens
        self.loss = resolve_part("algorithm.loss", algorithm.loss)
        self.reduction = resolve_part("algorithm.reduction", algorithm.reduction)
        has_reference = algorithm.kl.coefficient > 0
        self.kl = resolve_part("algorithm.kl.estimator", algorithm.kl.estimator) if has_reference else None
        self.kl_loss_coefficient = kl_coefficient if algorithm.kl.placement == "loss" else 0.0
        """0 where the KL is in the reward (the estimate is logged all the same)."""

    def micro_batch_loss(
        self, logprobs: Tensor, packed: PackedBatch, sequence_lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of one micro-batch in its mini-batch's loss, and metrics with one number a token [R].

        The importance weights multiply the policy's loss and not the KL, which is no expectation over what the decoder
        sampled but a measure of how far the policy has gone.

        Args:
            logprobs: by the policy, with gradient, [R].
            packed: the micro-batch; its `sequence_index` are rows of `sequence_lengths`.
            sequence_lengths: response lengths of the whole mini-batch, [B].

        Raises:
            ValueError: a function of the recipe's returns the wrong shape, or a metric with a name of the trainer's.
        """
        algorithm, cap = self.algorithm, self.algorithm.importance_cap
        token_loss, metrics = self._policy_loss(logprobs, packed)
        if cap is not None:
            assert packed.old_logprobs is not None, "filled before the first mini-batch"
            weights = truncated_weights(
                packed.old_logprobs,
                packed.rollout_logprobs,
                packed.sequence_index,
                cap=cap,
                level=algorithm.importance_level,
            )
            token_loss = token_loss * weights
            metrics["importance/weight"] = weights
            metrics["importance/capped_share"] = (weights == weights.new_tensor(cap)).to(weights.dtype)
        if self.kl is not None:
            assert packed.ref_logprobs is not None, "a KL coefficient above 0 needs ref_logprobs"
            kl = self.kl(logprobs, packed.ref_logprobs)  # [R]
            check_per_token("algorithm.kl.estimator", {"its estimate": kl}, logprobs)
            metrics["kl/ref"] = kl.detach()
            if self.kl_loss_coefficient > 0:
                token_loss = token_loss + self.kl_loss_coefficient * kl
        reduced: Tensor = self.reduction(
            token_loss, packed.sequence_index, sequence_lengths=sequence_lengths, max_new_tokens=self.max_new_tokens
        )
        if reduced.ndim != 0:
            raise ValueError(f"algorithm.reduction must return one number, found shape {tuple(reduced.shape)}")
        return reduced, metrics

    def _policy_loss(self, logprobs: Tensor, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function's token loss [R] and its metrics, checked."""
        token_loss, metrics = self.loss(
            logprobs,
            packed.old_logprobs,
            packed.advantages,
            packed.sequence_index,
            clip_low=self.algorithm.clip_low,
            clip_high=self.algorithm.clip_high,
            **self.algorithm.loss_options,
        )
        for name in metrics:
            if is_reserved_metric(name):
                raise ValueError(f"algorithm.loss returns a metric named `{name}`, which is srtrl's own: rename it")
        check_per_token("algorithm.loss", {"its loss": token_loss, **metrics}, logprobs)
        return token_loss, dict(metrics)


def is_reserved_metric(name: str) -> bool:
    """Whether a step's row has, or may have, a metric of this name that is not the loss function's."""
    return name in RESERVED_METRICS or name.startswith(RESERVED_FAMILIES)


def check_per_token(option: str, found: dict[str, Tensor], tokens: Tensor) -> None:
    """Refuse what the function that `option` names returns, by name, where it is not one number a token.

    Raises:
        ValueError: naming the option and the shape.
    """
    for name, value in found.items():
        if value.shape != tokens.shape:
            raise ValueError(
                f"{option} must return one number a token, {tuple(tokens.shape)}; {name} has shape {tuple(value.shape)}"
            )
