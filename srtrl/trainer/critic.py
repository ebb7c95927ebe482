"""PPO's critic in a training step: the values of the response tokens, and what the critic learns from their returns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.model.attention import PackedPlan
from srtrl.ranks.processes import ONE_RANK, Ranks
from srtrl.recipe.schema import Recipe
from srtrl.rollout.packing import PackedBatch
from srtrl.trainer.objective import CheckedLoss
from srtrl.trainer.on_ranks import by_sequence
from srtrl.trainer.update import NonFiniteError, describe_token, run_optimizer_steps
from srtrl.types import TrainSequence

if TYPE_CHECKING:
    from accelerate import Accelerator

    from srtrl.model.value_model import ValueModel

MIN_RELATIVE_VARIANCE = 1e-12
"""Returns that vary by less, against the mean square of returns and values, are equal but for rounding to float32."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Critic:
    """The value model and what trains it."""

    model: ValueModel
    optimizer: torch.optim.Optimizer
    """Of the model's parameters alone."""


def response_values(model: ValueModel, packed: PackedBatch, accelerator: Accelerator) -> Tensor:
    """Forward pass of one micro-batch: values [R], differentiable.

    The value of a response token is that of the state in which it is chosen: of all tokens before it.
    """
    plan = PackedPlan.from_lengths(packed.lengths, packed.token_ids.device)
    with accelerator.autocast():
        values: Tensor = model(packed.token_ids, plan)  # [T]
    return values[packed.hidden_index]


def compute_values(
    model: ValueModel,
    sequences: Sequence[TrainSequence],
    accelerator: Accelerator,
    recipe: Recipe,
    *,
    where: str,
    ranks: Ranks = ONE_RANK,
) -> list[npt.NDArray[np.float32]]:
    """Values of the response tokens of each sequence, without gradient.

    Returns:
        One array [R] for each sequence, in their order; the same on all ranks, which share the work.

    Raises:
        NonFiniteError: a value is not finite; names the sequence, after `where` ("step 3").
        ValueError: a sequence is longer than `train.micro_batch_tokens`.
    """
    values = by_sequence(lambda packed: response_values(model, packed, accelerator), model, sequences, recipe, ranks)
    everything = np.concatenate(values)  # [R]
    if not np.isfinite(everything).all():
        row = int(np.isfinite(everything).argmin())
        raise NonFiniteError(
            f"{where}: {describe_token(sequences, row)}: the critic's value is {everything[row]}; no weights of this "
            "step were changed"
        )
    return values


def update_critic(
    critic: Critic,
    accelerator: Accelerator,
    sequences: Sequence[TrainSequence],
    *,
    recipe: Recipe,
    step: int,
    ranks: Ranks = ONE_RANK,
) -> dict[str, float]:
    """Learn the returns of training step `step` (the first is 1); changes the weights of `critic.model`.

    The loss of a mini-batch is the mean over all its response tokens, however it is cut into micro-batches. Learning
    rate and order depend on the step alone, so that nothing of it is saved for resume but the optimizer's state.

    Args:
        critic: value model and optimizer.
        accelerator: gives autocast, backward and clipping.
        sequences: at least one, sorted by (draw, sample), with `values` (before this update) and `returns`.
        recipe: the sections `critic` and `train`, and the seed.
        step: names the step in errors and places it on the learning rate's schedule.
        ranks: those that share the work; all call this with the same arguments, and all get the same.

    Returns:
        `critic/loss` and `critic/grad_norm` (before clipping): means over optimizer steps. `critic/learning_rate`:
        that of the last optimizer step. `critic/<name>`: what the value loss returns, means over all response tokens
        of all mini-batches. Of the values before the update, over all response tokens: `critic/value_mean`,
        `critic/return_mean` and `critic/explained_variance` (absent where all returns are equal).

    Raises:
        NonFiniteError: a loss or a gradient norm is not finite; raised before that optimizer step.
        ValueError: `critic.value_loss` is unknown or returns the wrong shape, or a sequence exceeds the micro-batch.
    """
    section = recipe.critic
    assert section is not None, "the recipe has no critic"
    value_loss = CheckedLoss("critic.value_loss", section.value_loss)

    def micro_batch_loss(packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        values = response_values(critic.model, packed, accelerator)  # [R]
        token_loss, metrics = value_loss(
            values, packed.values, packed.returns, packed.sequence_index, value_clip=section.value_clip
        )
        return token_loss.sum() / sequence_lengths.sum(), metrics

    metrics = run_optimizer_steps(
        critic.model,
        critic.optimizer,
        accelerator,
        sequences,
        micro_batch_loss,
        updates=recipe.critic_updates,
        recipe=recipe,
        step=step,
        max_grad_norm=section.max_grad_norm,
        where=f"step {step}, critic",
        ranks=ranks,
    )
    metrics |= value_metrics(sequences)
    return {f"critic/{name}": value for name, value in metrics.items()}


def value_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """How well `values` predict `returns`, over all response tokens: `value_mean`, `return_mean`, `explained_variance`.

    Explained variance is 1 - Var(returns - values) / Var(returns): 1 for a perfect critic, 0 for one that knows no more
    than a constant, below 0 for a worse one. It is left out where all returns are equal, up to rounding: returns are
    advantages + values, and where the values cancel (all rewards 0), what varies is the rounding error of the values.
    """
    pairs = [(one.values, one.returns) for one in sequences if one.values is not None and one.returns is not None]
    assert len(pairs) == len(sequences), "the critic learns from sequences with values and returns"
    values, returns = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))  # [R] each
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    variance = returns.var()
    if variance > MIN_RELATIVE_VARIANCE * max(np.square(returns).mean(), np.square(values).mean()):
        metrics["explained_variance"] = float(1 - (returns - values).var() / variance)
    return metrics
