"""A tiny critic, sequences with values and returns, and the same numbers computed the slow way."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from padded_update import padded_forward
from torch import Tensor
from update_cases import RecordingSGD, make_policy, make_recipe, make_sequences

from srtrl.features.critic import Critic, ValueModel
from srtrl.recipe.schema import Recipe
from srtrl.types import TrainSequence


def make_critic_recipe(critic: dict[str, Any] | None = None, **options: Any) -> Recipe:
    """Three groups of two, a critic with a norm that is never clipped; `critic` are values of its section."""
    section = {"learning_rate": 0.02, "value_clip": 0.1, **(critic or {})}
    return make_recipe(critic=section, algorithm__advantage="gae", **options)


def make_value_model(seed: int = 1, dtype: torch.dtype = torch.float64) -> ValueModel:
    """A body of random weights and a head that is not zero any more."""
    model = ValueModel(make_policy(seed=seed, dtype=dtype))
    head = torch.randn(model.value_head.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    with torch.no_grad():
        model.value_head.copy_(head)
    return model


def with_random_targets(sequences: Sequence[TrainSequence]) -> list[TrainSequence]:
    """Values and returns of all sizes."""
    rng = np.random.default_rng(8)
    filled = []
    for sequence in sequences:
        values, noise = rng.standard_normal((2, len(sequence.rollout_logprobs)))
        filled.append(replace(sequence, values=values.astype(np.float32), returns=(values + noise).astype(np.float32)))
    return filled


def make_value_sequences() -> list[TrainSequence]:
    """Six sequences of three draws with random values and returns; their lengths differ."""
    return with_random_targets(make_sequences(make_policy()))


def padded_values(model: ValueModel, sequences: Sequence[TrainSequence]) -> Tensor:
    """The value before each sampled token, [R], by a batch padded on the right."""
    _, hidden = padded_forward(model.body, sequences)
    values = hidden @ model.value_head[0]  # [B, longest]
    responses = [torch.from_numpy(one.targets) - 1 for one in sequences]
    return torch.cat([row[response] for row, response in zip(values, responses, strict=True)])


def make_critic(model: ValueModel, recipe: Recipe) -> tuple[Critic, RecordingSGD]:
    """A critic that descends plainly, and its optimizer's records."""
    optimizer = RecordingSGD(model)
    return Critic(model, optimizer, recipe), optimizer
