"""The policy update of one training step: rollouts in, changed weights and metrics out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from srtrl.algorithms.reductions import adapted_coefficient
from srtrl.recipe import Recipe
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.mini_batches import MiniBatch, descend, mini_batches
from srtrl.trainer.objective import Objective
from srtrl.trainer.optimizer import planned_learning_rate
from srtrl.trainer.sequence_logprobs import (
    compute_logprobs,
    logprob_difference,
    response_logprobs,
    split_by_sequence,
)
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from accelerate import Accelerator

    from srtrl.model.transformer import Transformer

UpdateMetrics = dict[str, float]
"""Metrics of one training step's update, by the name they are logged under; see `update_policy`."""


def update_policy(
    policy: Transformer,
    optimizer: torch.optim.Optimizer,
    accelerator: Accelerator,
    sequences: Sequence[TrainSequence],
    *,
    recipe: Recipe,
    step: int,
    kl_coefficient: float,
) -> UpdateMetrics:
    """Learn from the rollouts of training step `step` (the first is 1); changes the weights of `policy`.

    Each mini-batch is one optimizer step (see `descend`). Learning rate and order depend on the step alone, so that
    nothing of the update is saved for resume but the optimizer's state.

    The decoder's log-probs are compared with the trainer's while both have the same weights: in the forward passes of
    the first mini-batch (`algorithm.old_logprobs: rollout`), or for all sequences in `recompute`'s extra forward pass.

    Args:
        policy: its parameters are those of `optimizer`.
        optimizer: see `srtrl.trainer.optimizer`.
        accelerator: gives autocast, backward and clipping.
        sequences: those of each kept draw, whole or what overlong filtering left of it, sorted by (draw, sample); at
            least one. With a KL coefficient above 0 they have `ref_logprobs`; `old_logprobs` are filled here.
        recipe: the sections `algorithm`, `train`, `rollout` and the seed.
        step: names the step in errors and places it on the learning rate's schedule.
        kl_coefficient: the present one; see `next_kl_coefficient`.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps; `learning_rate`: the last one's.
        `entropy`, `kl/ref` and what loss function and importance weights log: means over all response tokens of all
        mini-batches. `logprob_difference/mean`, `/max`, `/kl`.

    Raises:
        NonFiniteError: a log-prob, a loss or a gradient norm is not finite; raised before that optimizer step.
        LogprobDifferenceError: `train.max_logprob_difference` is exceeded; raised before any weight changes.
        ValueError: a function that the recipe names returns the wrong shape, or a sequence exceeds the micro-batch.
    """
    assert sequences, "no sequences: the caller skips the update where there is nothing to learn from"
    train, updates = recipe.train, recipe.policy_updates
    objective = Objective.from_recipe(recipe, kl_coefficient=kl_coefficient)
    sequences, difference = _with_old_logprobs(policy, accelerator, sequences, recipe, step)
    first_logprobs: list[Tensor] = []  # of the first mini-batch, where they are yet to be compared

    def micro_batch_loss(packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        logprobs, entropy = response_logprobs(policy, packed, accelerator, objective.temperature)  # [R]
        if difference is None:
            first_logprobs.append(logprobs.detach())
        loss, metrics = objective.micro_batch_loss(logprobs, packed, sequence_lengths)
        return loss, {"entropy": entropy, **metrics}

    def compare_first(mini_batch: MiniBatch, where: str) -> None:
        nonlocal difference
        if difference is None:
            by_sequence = split_by_sequence(torch.cat(first_logprobs), mini_batch.sequences)
            difference = logprob_difference(
                mini_batch.sequences, by_sequence, max_difference=train.max_logprob_difference, where=where
            )

    metrics = descend(
        policy,
        optimizer,
        accelerator,
        mini_batches(
            sequences,
            size=updates.mini_batch_prompts,
            num_epochs=updates.num_epochs,
            seed=recipe.seed,
            step=step,
        ),
        micro_batch_loss,
        micro_batch_tokens=train.micro_batch_tokens,
        max_grad_norm=train.max_grad_norm,
        learning_rate=lambda number: planned_learning_rate(updates, step, number),
        loss_option="algorithm.loss",
        where=f"step {step}",
        check=compare_first,
    )
    assert difference is not None
    return {**metrics, **difference}


def next_kl_coefficient(
    kl_coefficient: float, metrics: UpdateMetrics, recipe: Recipe, *, sampled_kl: float | None, num_samples: int
) -> float:
    """The KL coefficient of the next training step: adapted where `algorithm.kl.target` asks for it, else the same.

    What it steers by is the KL that the coefficient multiplies: in the reward that of the policy that sampled (as in
    Ziegler et al.), in the loss that of the policy as it learns, over all epochs.

    Args:
        kl_coefficient: that of this step.
        metrics: of this step's update, with `kl/ref`, its mean KL a token.
        recipe: `algorithm.kl`.
        sampled_kl: `Credit.sampled_kl` of this step; None where the KL is not in the reward.
        num_samples: samples that the update learned from.
    """
    kl = recipe.algorithm.kl
    if kl.target is None:
        return kl_coefficient
    if kl.placement == "reward":
        assert sampled_kl is not None, "credit assignment estimates the KL that it takes off the reward"
        found = sampled_kl
    else:
        found = metrics["kl/ref"]
    return adapted_coefficient(kl_coefficient, found, target=kl.target, horizon=kl.horizon, num_samples=num_samples)


def _with_old_logprobs(
    policy: Transformer, accelerator: Accelerator, sequences: Sequence[TrainSequence], recipe: Recipe, step: int
) -> tuple[list[TrainSequence], dict[str, float] | None]:
    """Fill `old_logprobs`; where that costs a forward pass, it measures the log-prob difference too."""
    if recipe.algorithm.old_logprobs == "rollout":
        return [replace(sequence, old_logprobs=sequence.rollout_logprobs) for sequence in sequences], None
    logprobs = compute_logprobs(
        policy,
        sequences,
        accelerator,
        micro_batch_tokens=recipe.train.micro_batch_tokens,
        temperature=recipe.rollout.temperature,
    )
    difference = logprob_difference(
        sequences, logprobs, max_difference=recipe.train.max_logprob_difference, where=f"step {step}"
    )
    filled = [replace(sequence, old_logprobs=old) for sequence, old in zip(sequences, logprobs, strict=True)]
    return filled, difference
