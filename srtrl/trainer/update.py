"""The policy update of one training step: rollouts in, changed weights and metrics out."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from srtrl.recipe import Recipe
from srtrl.rollout.packing import pack
from srtrl.trainer.objective import Objective
from srtrl.trainer.optimizer import learning_rate_at, set_learning_rate
from srtrl.trainer.sequence_logprobs import (
    NonFiniteError,
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
) -> UpdateMetrics:
    """Learn from the rollouts of training step `step` (the first is 1); changes the weights of `policy`.

    Each mini-batch is one optimizer step: gradients of its micro-batches add up to that of its whole loss, then the
    norm is clipped. Learning rate and order depend on the step alone, so that nothing of the update is saved for resume
    but the optimizer's state. Groups that filters dropped make the last mini-batch smaller, or mini-batches fewer.

    The decoder's log-probs are compared with the trainer's while both have the same weights: in the forward passes of
    the first mini-batch (`algorithm.old_logprobs: rollout`; later mini-batches are off-policy and are not compared), or
    for all sequences in the extra forward pass of `recompute`.

    Args:
        policy: its parameters are those of `optimizer`.
        optimizer: see `srtrl.trainer.optimizer`.
        accelerator: gives autocast, backward and clipping.
        sequences: `rollout.num_samples` of each kept group, sorted by (draw, sample); at least one group. With a KL
            coefficient above 0 they have `ref_logprobs`; `old_logprobs` are filled here.
        recipe: the sections `algorithm`, `train`, `rollout` and the seed.
        step: names the step in errors and places it on the learning rate's schedule.

    Returns:
        `loss` and `grad_norm` (before clipping): means over optimizer steps. `entropy`, `kl/ref`, `clip_share/low`,
        `clip_share/high` and whatever else the loss function returns: means over all response tokens of all
        mini-batches. `learning_rate`: that of the last optimizer step. `logprob_difference/mean`, `/max`, `/kl`.

    Raises:
        NonFiniteError: a log-prob, a loss or a gradient norm is not finite; raised before that optimizer step.
        LogprobDifferenceError: `train.max_logprob_difference` is exceeded; raised before any weight changes.
        ValueError: a function that the recipe names returns the wrong shape, or a sequence exceeds the micro-batch.
    """
    assert sequences, "no sequences: the caller skips the update where filters dropped all groups"
    assert len(sequences) % recipe.rollout.num_samples == 0, "groups must be whole"
    assert accelerator.gradient_accumulation_steps == 1, "accelerate would divide the loss by these steps"
    train = recipe.train
    objective = Objective.from_recipe(recipe)
    sequences, difference = _with_old_logprobs(policy, accelerator, sequences, recipe, step)
    means = TokenMeans()
    losses: list[float] = []
    grad_norms: list[float] = []
    rates: list[float] = []
    for mini_batch in mini_batches(len(sequences), recipe, step):
        batch = [sequences[index] for index in mini_batch.indices]
        where = f"step {step}, epoch {mini_batch.epoch + 1}, mini-batch {mini_batch.number + 1}"
        optimizer.zero_grad(set_to_none=True)
        loss, logprobs = _accumulate_gradient(
            policy, accelerator, batch, objective=objective, micro_batch_tokens=train.micro_batch_tokens, means=means
        )
        if difference is None:
            by_sequence = split_by_sequence(logprobs, batch)
            difference = logprob_difference(
                batch, by_sequence, max_difference=train.max_logprob_difference, where=where
            )
        losses.append(_finite(loss, f"{where}: the loss"))
        norm = accelerator.clip_grad_norm_(policy.parameters(), train.max_grad_norm)
        grad_norms.append(_finite(norm, f"{where}: the gradient norm"))
        rates.append(_learning_rate(recipe, step, len(rates)))
        set_learning_rate(optimizer, rates[-1])
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)  # frees the gradients' memory for the decoder
    assert difference is not None
    return {
        "loss": float(np.mean(losses)),
        **means.result(),
        "grad_norm": float(np.mean(grad_norms)),
        "learning_rate": rates[-1],
        **difference,
    }


@dataclass(kw_only=True, slots=True, frozen=True)
class MiniBatch:
    """The sequences of one optimizer step."""

    epoch: int
    number: int
    """Within its epoch, from 0."""
    indices: list[int]
    """Rows of the step's sequences, ascending."""


def mini_batches(num_sequences: int, recipe: Recipe, step: int) -> Iterator[MiniBatch]:
    """Cut the step's groups into mini-batches of `train.mini_batch_prompts` whole groups, epoch by epoch.

    The first epoch takes them in data order, later ones in an order drawn from (seed, step, epoch). Inside a mini-batch
    the order is always that of the data, so that packing does not depend on the draw.
    """
    num_samples = recipe.rollout.num_samples
    num_groups = num_sequences // num_samples
    size = recipe.train.mini_batch_prompts or recipe.rollout.num_prompts
    for epoch in range(recipe.train.num_epochs):
        order = np.arange(num_groups)
        if epoch > 0:
            order = np.random.default_rng((recipe.seed, step, epoch)).permutation(num_groups)
        for number, start in enumerate(range(0, num_groups, size)):
            groups = np.sort(order[start : start + size])
            indices = (groups[:, None] * num_samples + np.arange(num_samples)).ravel()
            yield MiniBatch(epoch=epoch, number=number, indices=indices.tolist())


class TokenMeans:
    """Means over all tokens of a step, whatever the micro-batches; sums are float64 and stay on the device."""

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._num_tokens = 0

    def add(self, values: Mapping[str, Tensor]) -> None:
        """Add the tokens of one micro-batch; each value is [R]."""
        for name, value in values.items():
            total = value.detach().sum(dtype=torch.float64)
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._num_tokens += len(next(iter(values.values())))

    def result(self) -> dict[str, float]:
        """The mean of each value."""
        return {name: total.item() / self._num_tokens for name, total in self._sums.items()}


def _accumulate_gradient(
    policy: Transformer,
    accelerator: Accelerator,
    batch: Sequence[TrainSequence],
    *,
    objective: Objective,
    micro_batch_tokens: int,
    means: TokenMeans,
) -> tuple[Tensor, Tensor]:
    """Add the gradient of a mini-batch's loss; returns that loss and the log-probs [R] of its response tokens."""
    device = policy.head_weight.device
    sequence_lengths = torch.tensor([len(sequence.advantages) for sequence in batch], device=device)  # [B]
    losses, logprobs_parts = [], []
    for packed in pack(batch, micro_batch_tokens, device):
        logprobs, entropy = response_logprobs(policy, packed, accelerator, objective.temperature)  # [R]
        loss, metrics = objective.micro_batch_loss(logprobs, packed, sequence_lengths)
        accelerator.backward(loss)
        means.add({"entropy": entropy, **metrics})
        losses.append(loss.detach())
        logprobs_parts.append(logprobs.detach())
    return torch.stack(losses).sum(), torch.cat(logprobs_parts)


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


def _learning_rate(recipe: Recipe, step: int, number: int) -> float:
    """Learning rate of the `number`-th optimizer step (from 0) of training step `step`."""
    train = recipe.train
    num_prompts = recipe.rollout.num_prompts
    per_step = train.num_epochs * (num_prompts // (train.mini_batch_prompts or num_prompts))
    return learning_rate_at(
        (step - 1) * per_step + number,
        peak=train.learning_rate,
        warmup_steps=train.warmup_steps,
        num_steps=train.num_steps * per_step,
        schedule=train.schedule,
    )


def _finite(value: Tensor, what: str) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise NonFiniteError(f"{what} is {number}; the weights were not changed by this mini-batch")
    return number
