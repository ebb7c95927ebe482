"""From graded groups to training sequences with an advantage on every response token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.recipe import Recipe
from srtrl.resolve import resolve_function
from srtrl.trainer.objective import subtract_kl
from srtrl.types import Rollout, RolloutGroup, TrainSequence


@dataclass(kw_only=True, slots=True, frozen=True)
class Credit:
    """What a step learns from."""

    sequences: list[TrainSequence]
    """In the order of (draw, sample)."""
    advantages: dict[tuple[int, int], float]
    """Advantage of each (draw, sample)."""
    metrics: dict[str, float]


def filter_groups(groups: Sequence[RolloutGroup], filters: Sequence[str]) -> list[RolloutGroup]:
    """The groups that every filter of `algorithm.filters` keeps, in their order; a later filter sees what is left."""
    kept = list(groups)
    for name in filters:
        if kept:
            mask: Tensor = resolve_function("srtrl.algorithms.filters", name)(group_rewards(kept))  # [G]
            if mask.shape != (len(kept),) or mask.dtype != torch.bool:
                raise ValueError(
                    f"algorithm.filters: {name} must return a bool for each of the {len(kept)} groups, "
                    f"it returned {mask.dtype} of shape {tuple(mask.shape)}"
                )
            kept = [group for group, keep in zip(kept, mask.tolist(), strict=True) if keep]
    return kept


def group_rewards(groups: Sequence[RolloutGroup]) -> Tensor:
    """Rewards [G, S] float64 of groups of equal size."""
    rewards = [[rollout.grade.reward for rollout in group.rollouts] for group in groups]
    return torch.tensor(rewards, dtype=torch.float64)


def train_sequences(groups: Sequence[RolloutGroup]) -> list[TrainSequence]:
    """One sequence a rollout, in order, with advantages still zero."""
    return [_sequence(rollout) for group in groups for rollout in group.rollouts]


def assign_credit(groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence], recipe: Recipe) -> Credit:
    """Advantages from the groups' rewards, less the KL penalty where `algorithm.kl.placement` is `reward`.

    All tokens of a sample share its advantage. `reward/kl_penalty` is the mean penalty of a sample; the `reward`
    that is logged and saved stays the graders'.

    Args:
        groups: The groups to learn from.
        sequences: Their rollouts, as `train_sequences` gives them, with `ref_logprobs` where a reference is kept.
        recipe: Its `algorithm` section names the advantage and the KL.

    Raises:
        ValueError: the advantage function returns another shape than [G, S], or a number that is not finite.
    """
    rewards = group_rewards(groups)  # [G, S]
    metrics: dict[str, float] = {}
    if recipe.algorithm.kl.coefficient > 0 and recipe.algorithm.kl.placement == "reward":
        penalised = subtract_kl(rewards, sequences, recipe)
        metrics["reward/kl_penalty"] = float((rewards - penalised).mean())
        rewards = penalised
    name = recipe.algorithm.advantage
    advantages: Tensor = resolve_function("srtrl.algorithms.advantages", name)(rewards)  # [G, S]
    if advantages.shape != rewards.shape:
        raise ValueError(
            f"algorithm.advantage: {name} must return shape {tuple(rewards.shape)}, that of the rewards; "
            f"it returned {tuple(advantages.shape)}"
        )
    if not bool(advantages.isfinite().all()):
        raise ValueError(f"algorithm.advantage: {name} returned a number that is not finite")
    rollouts = chain.from_iterable(group.rollouts for group in groups)
    values = advantages.flatten().tolist()
    return Credit(
        sequences=[_with_advantage(sequence, value) for sequence, value in zip(sequences, values, strict=True)],
        advantages={
            (rollout.draw_index, rollout.sample_index): value for rollout, value in zip(rollouts, values, strict=True)
        },
        metrics=metrics,
    )


def with_reference(
    sequences: Sequence[TrainSequence], ref_logprobs: Sequence[npt.NDArray[np.float32]]
) -> list[TrainSequence]:
    """The sequences with the frozen reference's log-probs filled in."""
    return [replace(sequence, ref_logprobs=ref) for sequence, ref in zip(sequences, ref_logprobs, strict=True)]


def _sequence(rollout: Rollout) -> TrainSequence:
    prompt_ids = rollout.prompt.token_ids
    return TrainSequence(
        token_ids=np.array([*prompt_ids, *rollout.token_ids], np.int64),
        num_prompt_tokens=len(prompt_ids),
        rollout_logprobs=np.array(rollout.rollout_logprobs, np.float32),
        advantages=np.zeros(len(rollout.token_ids), np.float32),
    )


def _with_advantage(sequence: TrainSequence, advantage: float) -> TrainSequence:
    return replace(sequence, advantages=np.full(len(sequence.rollout_logprobs), advantage, np.float32))
