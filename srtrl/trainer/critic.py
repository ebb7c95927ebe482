"""PPO's critic in a training step: the values of the response tokens, and how the critic learns their returns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from srtrl.model.attention import PackedPlan
from srtrl.model.value_model import ValueModel, save_value_model
from srtrl.ranks.sharding import reshard, unshard
from srtrl.recipe.schema import Recipe
from srtrl.resolve import resolve_part
from srtrl.rollout.packing import PackedBatch
from srtrl.run.checkpoint import CRITIC_FOLDER, CRITIC_OPTIMIZER
from srtrl.trainer.learner import Learner, loss_metrics
from srtrl.trainer.optimizer import MasterAdamW
from srtrl.trainer.passes import Column, UpdateContext
from srtrl.types import TrainSequence

MIN_RELATIVE_VARIANCE = 1e-12
"""Returns that vary by less, against the mean square of returns and values, are equal but for rounding to float32."""


class Critic(Learner):
    """The value model; its loss is the mean of `critic.value_loss` over the response tokens of a mini-batch."""

    model: ValueModel
    stage = "critic"
    title = "critic, "
    folder = CRITIC_OPTIMIZER

    def __init__(self, model: ValueModel, optimizer: MasterAdamW, recipe: Recipe) -> None:
        """Resolve `critic.value_loss`.

        Raises:
            ValueError: it is unknown.
        """
        super().__init__(model, optimizer, recipe.critic_updates)
        assert recipe.critic is not None, "the recipe has no critic"
        self.section = section = recipe.critic
        self.loss_name = f"critic.value_loss {section.value_loss}"
        self.value_loss = resolve_part("critic.value_loss", section.value_loss)

    def loss(self, packed: PackedBatch, sequence_lengths: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """See `Learner`."""
        values = response_values(self.model, packed)  # [R]
        token_loss, logged = self.value_loss(
            values, packed.values, packed.returns, packed.sequence_index, value_clip=self.section.value_clip
        )
        return token_loss.sum() / sequence_lengths.sum(), loss_metrics(self.section.value_loss, logged)

    @property
    def dtype(self) -> torch.dtype:
        """See `Learner`."""
        return self.model.body.dtype

    @contextmanager
    def whole(self) -> Iterator[None]:
        """See `Learner`."""
        unshard(self.model)
        yield
        reshard(self.model)

    def save(self, folder: Path) -> None:
        """See `Learner`; the model is written, too."""
        super().save(folder)
        save_value_model(self.model, folder / CRITIC_FOLDER)

    def learn(self, sequences: Sequence[TrainSequence], context: UpdateContext) -> dict[str, float]:
        """Learn the returns of a training step; see `Learner`.

        The loss of a mini-batch is the mean over all its response tokens, however it is cut into micro-batches.

        Args:
            sequences: At least one, sorted by (draw, sample), with `values` (before this update) and `returns`.
            context: Its recipe has the section `train`, and the seed.

        Returns:
            Under `critic/`, beside those of `Learner`: of the values before the update, over all response tokens,
            `value_mean`, `return_mean` and `explained_variance` (absent where all returns are equal).
        """
        metrics = super().learn(sequences, context) | value_metrics(sequences)
        return {f"critic/{name}": value for name, value in metrics.items()}


def response_values(model: ValueModel, packed: PackedBatch) -> Tensor:
    """Forward pass of one micro-batch: values [R], differentiable.

    The value of a response token is that of the state in which it is chosen: of all tokens before it.
    """
    plan = PackedPlan(packed.lengths, packed.token_ids.device)
    values: Tensor = model(packed.token_ids, plan)  # [T]
    return values[packed.hidden_index]


def values_column(model: ValueModel) -> Column:
    """The critic's values of the response tokens; see `Column`."""
    return Column(stage="values", field="values", model=model, forward=lambda packed: response_values(model, packed))


def value_metrics(sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """Quality of `values` as predictions of `returns`, over all response tokens.

    The metrics `value_mean`, `return_mean` and `explained_variance`, 1 - Var(returns - values) / Var(returns): 1 for a
    perfect critic, 0 for one that is no better than a constant, below 0 for a worse one. It is left out where all
    returns are equal, up to rounding: returns are advantages + values, and where the values cancel (all rewards 0),
    only the rounding error of the values varies.
    """
    pairs = [
        (sequence.values, sequence.returns)
        for sequence in sequences
        if sequence.values is not None and sequence.returns is not None
    ]
    assert len(pairs) == len(sequences), "the critic learns from sequences with values and returns"
    values, returns = (np.concatenate(arrays).astype(np.float64) for arrays in zip(*pairs, strict=True))  # [R] each
    metrics = {"value_mean": float(values.mean()), "return_mean": float(returns.mean())}
    variance = returns.var()
    if variance > MIN_RELATIVE_VARIANCE * max(np.square(returns).mean(), np.square(values).mean()):
        metrics["explained_variance"] = float(1 - (returns - values).var() / variance)
    return metrics
