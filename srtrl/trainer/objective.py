"""What an update minimises: the loss, reduction and KL that a recipe names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from srtrl.recipe import Recipe
from srtrl.resolve import resolve_function
from srtrl.rollout.packing import PackedBatch
from srtrl.types import TrainSequence

RESERVED_METRICS = frozenset({"step", "loss", "entropy", "kl/ref", "grad_norm", "learning_rate", "accuracy"})
"""Names that a loss function's metrics may not have: the trainer logs them itself."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Objective:
    """What is minimised: the functions and numbers that the recipe names."""

    loss: Callable[..., tuple[Tensor, dict[str, Tensor]]]
    reduction: Callable[..., Tensor]
    kl: Callable[[Tensor, Tensor], Tensor] | None
    """None where the recipe has no reference."""
    kl_loss_coefficient: float
    """0 where the KL is in the reward (the estimate is logged all the same)."""
    clip_low: float
    clip_high: float
    temperature: float
    max_new_tokens: int

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> Objective:
        """Resolve the names of `recipe.algorithm`.

        Raises:
            ValueError: a name is unknown.
        """
        algorithm = recipe.algorithm
        kl = algorithm.kl
        return cls(
            loss=resolve_function("srtrl.algorithms.losses", algorithm.loss),
            reduction=resolve_function("srtrl.algorithms.reductions", algorithm.reduction),
            kl=resolve_function("srtrl.algorithms.kl", kl.estimator) if kl.coefficient > 0 else None,
            kl_loss_coefficient=kl.coefficient if kl.placement == "loss" else 0.0,
            clip_low=algorithm.clip_low,
            clip_high=algorithm.clip_high,
            temperature=recipe.rollout.temperature,
            max_new_tokens=recipe.rollout.max_new_tokens,
        )

    def micro_batch_loss(
        self, logprobs: Tensor, packed: PackedBatch, sequence_lengths: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Share of one micro-batch in its mini-batch's loss, and metrics with one number a token [R].

        Args:
            logprobs: by the policy, with gradient, [R].
            packed: the micro-batch; its `sequence_index` are rows of `sequence_lengths`.
            sequence_lengths: response lengths of the whole mini-batch, [B].
        """
        token_loss, loss_metrics = self.loss(
            logprobs,
            packed.old_logprobs,
            packed.advantages,
            packed.sequence_index,
            clip_low=self.clip_low,
            clip_high=self.clip_high,
        )
        taken = sorted(RESERVED_METRICS & loss_metrics.keys())
        if taken:
            raise ValueError(f"algorithm.loss returns a metric named `{taken[0]}`, which is srtrl's own: rename it")
        metrics = dict(loss_metrics)
        if self.kl is not None:
            assert packed.ref_logprobs is not None, "a KL coefficient above 0 needs ref_logprobs"
            kl = self.kl(logprobs, packed.ref_logprobs)  # [R]
            metrics["kl/ref"] = kl.detach()
            if self.kl_loss_coefficient > 0:
                token_loss = token_loss + self.kl_loss_coefficient * kl
        for name, value in {"token loss": token_loss, **metrics}.items():
            if value.shape != logprobs.shape:
                raise ValueError(
                    f"algorithm.loss and algorithm.kl.estimator must return one number a token, "
                    f"{tuple(logprobs.shape)}; {name} has shape {tuple(value.shape)}"
                )
        reduced = self.reduction(
            token_loss, packed.sequence_index, sequence_lengths=sequence_lengths, max_new_tokens=self.max_new_tokens
        )
        if reduced.ndim != 0:
            raise ValueError(f"algorithm.reduction must return one number, found shape {tuple(reduced.shape)}")
        return reduced, metrics


def subtract_kl(rewards: Tensor, sequences: Sequence[TrainSequence], recipe: Recipe) -> Tensor:
    """KL in the reward (`algorithm.kl.placement: reward`), to be applied before advantages are computed.

    Each sample's reward loses `coefficient` x the sum over its tokens of the KL estimate, as in InstructGPT
    (arXiv 2203.02155, equation 2). The policy's log-probs are the decoder's: the samples are from that policy.

    Args:
        rewards: of G groups of S samples, [G, S].
        sequences: the G x S sequences in the same order, with `ref_logprobs`.
        recipe: names estimator and coefficient.

    Returns:
        Rewards [G, S], in the dtype of `rewards`.
    """
    kl = recipe.algorithm.kl
    estimator: Callable[[Tensor, Tensor], Tensor] = resolve_function("srtrl.algorithms.kl", kl.estimator)
    assert len(sequences) == rewards.numel()
    penalties = []
    for sequence in sequences:
        assert sequence.ref_logprobs is not None, "KL in the reward needs ref_logprobs"
        logprobs, ref_logprobs = map(torch.from_numpy, (sequence.rollout_logprobs, sequence.ref_logprobs))
        penalties.append(estimator(logprobs.double(), ref_logprobs.double()).sum())  # over [L - num_prompt_tokens]
    penalty = torch.stack(penalties).reshape(rewards.shape)  # [G, S]
    return (rewards - kl.coefficient * penalty.to(rewards.device)).to(rewards.dtype)
