"""What an update minimises: the loss, reduction and KL that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

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


@dataclass(kw_only=True, slots=True, frozen=True)
class Objective:
    """What is minimised: the functions and numbers that the recipe names."""

    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    reduction: Callable[..., Tensor]
    kl: Callable[[Tensor, Tensor], Tensor] | None
    """None where the recipe has no reference."""
    kl_loss_coefficient: float
    """0 where the KL is in the reward (the estimate is logged all the same)."""
    importance_cap: float | None
    """Most that a loss is weighted with; None where the recipe asks for no importance weights."""
    importance_level: Literal["token", "sequence"]
    loss_options: Mapping[str, Any]
    """What the loss function takes beside the clips."""
    clip_low: float
    clip_high: float
    temperature: float
    max_new_tokens: int

    @classmethod
    def from_recipe(cls, recipe: Recipe, *, kl_coefficient: float) -> Objective:
        """Resolve the names of `recipe.algorithm`.

        Args:
            recipe: `algorithm`, and `rollout` for temperature and length.
            kl_coefficient: the present one; the recipe's is only the first where it is adaptive.

        Raises:
            ValueError: a name is unknown.
        """
        algorithm = recipe.algorithm
        kl = algorithm.kl
        return cls(
            loss=resolve_part("algorithm.loss", algorithm.loss),
            reduction=resolve_part("algorithm.reduction", algorithm.reduction),
            kl=resolve_part("algorithm.kl.estimator", kl.estimator) if kl.coefficient > 0 else None,
            kl_loss_coefficient=kl_coefficient if kl.placement == "loss" else 0.0,
            importance_cap=algorithm.importance_cap,
            importance_level=algorithm.importance_level,
            loss_options=algorithm.loss_options,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            temperature=recipe.rollout.temperature,
            max_new_tokens=recipe.rollout.max_new_tokens,
        )

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
        token_loss, metrics = self._policy_loss(logprobs, packed)
        if self.importance_cap is not None:
            weights = self._importance_weights(packed)
            token_loss = token_loss * weights
            metrics["importance/weight"] = weights
            metrics["importance/capped_share"] = (weights == weights.new_tensor(self.importance_cap)).to(weights.dtype)
        if self.kl is not None:
            assert packed.ref_logprobs is not None, "a KL coefficient above 0 needs ref_logprobs"
            kl = self.kl(logprobs, packed.ref_logprobs)  # [R]
            _check_shape("algorithm.kl.estimator", "its estimate", kl, logprobs)
            metrics["kl/ref"] = kl.detach()
            if self.kl_loss_coefficient > 0:
                token_loss = token_loss + self.kl_loss_coefficient * kl
        reduced = self.reduction(
            token_loss, packed.sequence_index, sequence_lengths=sequence_lengths, max_new_tokens=self.max_new_tokens
        )
        if reduced.ndim != 0:
            raise ValueError(f"algorithm.reduction must return one number, found shape {tuple(reduced.shape)}")
        return reduced, metrics

    def _policy_loss(self, logprobs: Tensor, packed: PackedBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss function's token loss [R] and its metrics, checked."""
        token_loss, loss_metrics = self.loss(
            logprobs,
            packed.old_logprobs,
            packed.advantages,
            packed.sequence_index,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
            **self.loss_options,
        )
        for name in loss_metrics:
            if is_reserved_metric(name):
                raise ValueError(f"algorithm.loss returns a metric named `{name}`, which is srtrl's own: rename it")
        for name, value in {"its loss": token_loss, **loss_metrics}.items():
            _check_shape("algorithm.loss", name, value, logprobs)
        return token_loss, dict(loss_metrics)

    def _importance_weights(self, packed: PackedBatch) -> Tensor:
        """min(trainer's probability / decoder's, cap) before the update, [R], in the dtype of the log-probs."""
        assert packed.old_logprobs is not None, "filled before the first mini-batch"
        assert self.importance_cap is not None
        return truncated_weights(
            packed.old_logprobs,
            packed.rollout_logprobs,
            packed.sequence_index,
            cap=self.importance_cap,
            level=self.importance_level,
        )


def is_reserved_metric(name: str) -> bool:
    """Whether a step's row has, or may have, a metric of this name that is not the loss function's."""
    return name in RESERVED_METRICS or name.startswith(RESERVED_FAMILIES)


def _check_shape(option: str, what: str, found: Tensor, logprobs: Tensor) -> None:
    if found.shape != logprobs.shape:
        raise ValueError(
            f"{option} must return one number a token, {tuple(logprobs.shape)}; {what} has shape {tuple(found.shape)}"
        )
