"""What an update minimises: the loss, reduction and KL that a recipe names."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from srtrl.algorithms.losses import truncated_weights
from srtrl.recipe.schema import Recipe
from srtrl.resolve import resolve_part
from srtrl.rollout.packing import PackedBatch

RESERVED_METRICS = frozenset(
    {"step", "loss", "entropy", "grad_norm", "learning_rate", "accuracy"}
    | {"value_mean", "return_mean", "explained_variance"}  # the critic's, where they stand under `critic/`
)
"""Names that a loss function's metrics may not have: the trainer logs them itself."""
RESERVED_FAMILIES = (
    *("critic/", "data/", "engine/", "environment/", "eval/", "grading/", "groups/", "importance/", "kl/", "length/"),
    *("logprob_difference/", "memory/", "reward/", "samples/", "time/", "tokens/"),
)
"""What those names may not begin with, for the same reason. `clip_share/` is the loss functions' own."""


class Objective:
    """What the policy's update minimises: the functions that the recipe names, and their options."""

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
        self.loss = CheckedLoss("algorithm.loss", algorithm.loss)
        self.reduction = resolve_part("algorithm.reduction", algorithm.reduction)
        has_reference = algorithm.kl.coefficient > 0
        self.kl = resolve_part("algorithm.kl.estimator", algorithm.kl.estimator) if has_reference else None
        self.kl_loss_coefficient = kl_coefficient if algorithm.kl.placement == "loss" else 0.0
        """0 where the KL is in the reward (the estimate is logged all the same)."""

    def micro_batch_loss(
        self, logprobs: Tensor, entropy: Tensor, packed: PackedBatch, sequence_lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of one micro-batch in its mini-batch's loss, and metrics with one number for each token [R].

        The importance weights multiply the policy's loss. They do not multiply the KL and the entropy, which are no
        expectations over what the decoder sampled: they measure the policy as it is.

        Args:
            logprobs: by the policy, with gradient, [R].
            entropy: of the policy's distribution at these tokens in nats, with gradient, [R].
            packed: the micro-batch; its `sequence_index` are rows of `sequence_lengths`.
            sequence_lengths: response lengths of the whole mini-batch, [B].

        Raises:
            ValueError: a function of the recipe's returns the wrong shape, or a metric with a name of the trainer's.
        """
        algorithm, index = self.algorithm, packed.sequence_index
        assert packed.old_logprobs is not None, "filled before the first mini-batch"
        token_loss, metrics = self.loss(
            logprobs,
            packed.old_logprobs,
            packed.advantages,
            index,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            **algorithm.loss_options,
        )
        if (cap := algorithm.importance_cap) is not None:
            weights = truncated_weights(
                packed.old_logprobs, packed.rollout_logprobs, index, cap=cap, level=algorithm.importance_level
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
        if algorithm.entropy_coefficient > 0:
            token_loss = token_loss - algorithm.entropy_coefficient * entropy
        reduced: Tensor = self.reduction(
            token_loss, index, sequence_lengths=sequence_lengths, max_new_tokens=self.max_new_tokens
        )
        if reduced.ndim != 0:
            raise ValueError(f"algorithm.reduction must return one number, found shape {tuple(reduced.shape)}")
        return reduced, {"entropy": entropy, **metrics}


class CheckedLoss:
    """A loss function of the policy or the critic, perhaps a user's own: what it returns is checked each time."""

    def __init__(self, option: str, name: str) -> None:
        """`name` is the value of the recipe's `option`.

        Raises:
            ValueError: it is unknown.
        """
        self.option = option
        self.function = resolve_part(option, name)
        self.metric_names: set[str] | None = None  # of the first micro-batch

    def __call__(self, values: Tensor, *arguments: Tensor | None, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss [R] and metrics [R] of one micro-batch, from what the model computes, `values` [R].

        Raises:
            ValueError: the loss or a metric has another shape, a metric has a name of the trainer's, or the metrics are
                not those of the first micro-batch.
        """
        token_loss, metrics = self.function(values, *arguments, **options)
        for name in metrics:
            if is_reserved_metric(name):
                raise ValueError(f"{self.option} returns a metric named `{name}`, which is srtrl's own: rename it")
        self.metric_names = set(metrics) if self.metric_names is None else self.metric_names
        if unequal := sorted(self.metric_names ^ metrics.keys()):  # a mean over some tokens would pass for one of all
            raise ValueError(
                f"{self.option} must return the same metrics for every micro-batch, and returned `{unequal[0]}` for "
                "some only; where it has no meaning, return zeros"
            )
        check_per_token(self.option, {"its loss": token_loss, **metrics}, values)
        return token_loss, dict(metrics)


def is_reserved_metric(name: str) -> bool:
    """Whether a step's row has, or may have, a metric of this name that is not the loss function's."""
    return name in RESERVED_METRICS or name.startswith(RESERVED_FAMILIES)


def check_per_token(option: str, found: dict[str, Tensor], tokens: Tensor) -> None:
    """Refuse what the function that `option` names returns, by name, where it is not one number for each token.

    Raises:
        ValueError: naming the option and the shape.
    """
    for name, value in found.items():
        if value.shape != tokens.shape:
            expected = f"one number per token, {tuple(tokens.shape)}"
            raise ValueError(f"{option} must return {expected}; {name} has shape {tuple(value.shape)}")
