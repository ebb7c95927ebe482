"""A tiny critic, and sequences with values and returns."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from update_cases import make_policy, make_recipe

from srtrl.features.critic import ValueModel
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
