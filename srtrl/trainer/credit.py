"""From graded groups to training sequences with an advantage on every response token.

Dimension letters: G groups of S samples each, B = G x S sequences, L the longest response (shorter ones are padded on
the right), R response tokens in total. Everything is float64 until it is stored in a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srtrl.algorithms.advantages import is_token_level, needs_values, whiten
from srtrl.recipe.schema import Recipe
from srtrl.resolve import declared, declared_names, describe_value, resolve_part
from srtrl.types import Rollout, RolloutGroup, TrainSequence

SequenceMetrics = Callable[[Sequence[TrainSequence]], dict[str, float]]
Teaching = Callable[[Sequence[TrainSequence]], tuple[Tensor, dict[str, float]]]
"""Returns numbers to add to the advantages of all response tokens, [R], and metrics."""
PER_TOKEN = (None, "one number per token, a tensor of shape {shape}")
RETURNED = {
    "algorithm.advantage": (None, "a tensor of shape {shape}, that of its first argument"),
    "algorithm.reduction": (0, "one number, a tensor of shape {shape}"),
    "algorithm.filters": (1, "a bool for each of the {shape[0]} groups, a tensor"),
}
"""Option -> required result of the function that it names, by default `PER_TOKEN`: a tensor with the shape of the first
argument, or with as many of its first dimensions as the number says."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Credit:
    """The sequences that a step learns from."""

    sequences: list[TrainSequence]
    """In the order of (draw, sample); none where overlong filtering left nothing."""
    advantages: dict[tuple[int, int], float]
    """Advantage of each (draw, sample) that is learned from; the mean over its tokens if they differ."""
    metrics: dict[str, float]


class CreditAssigner:
    """Chooses the samples that a step learns from, and gives each of their tokens an advantage."""

    def __init__(self, recipe: Recipe, describe: SequenceMetrics = lambda _: {}, teach: Teaching | None = None) -> None:
        """Look up, once, what the recipe's `algorithm` names.

        Args:
            recipe: Its `algorithm` and its rewards count.
            describe: Gives further metrics of the sequences that a step learns from.
            teach: What a teacher adds to the advantages.

        Raises:
            ValueError: an advantage, filter or estimator is unknown.
        """
        algorithm, kl = recipe.algorithm, recipe.algorithm.kl
        self._algorithm, self._describe = algorithm, describe
        self._advantage = resolve_part("algorithm.advantage", algorithm.advantage)
        self._teach, self._teaches_alone = teach, recipe.teaches_alone
        self._is_token_level = is_token_level(self._advantage)
        self._declared = declared_names(self._advantage, 3 if self._is_token_level else 1)
        self._filters = [(name, resolve_part("algorithm.filters", name)) for name in algorithm.filters]
        self._penalty = kl.coefficient if kl.placement == "reward" else 0.0
        self._estimate_kl = resolve_part("algorithm.kl.estimator", kl.estimator)
        self._reward_weights = {reward.name.rpartition(":")[2]: reward.weight for reward in recipe.rewards}

    def groups_to_learn_from(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The groups that the filters keep, without the samples that could not be graded.

        Such a sample has no reward, so nothing is learned from it, and it counts in no mean and no deviation. A
        sequence-level advantage compares samples: a group of several in which fewer than two are left is dropped.

        Raises:
            ValueError: a filter returns something else than a bool for each group.
        """
        min_samples = 1 if self._is_token_level else 2
        enough = [group for group in groups if len(group.graded) >= min(min_samples, len(group.rollouts))]
        return self._filter([replace(group, rollouts=group.graded) for group in enough])

    def _filter(self, groups: list[RolloutGroup]) -> list[RolloutGroup]:
        """The groups that every filter keeps, in their order; a later filter sees the kept ones.

        Each filter gets those of `algorithm.filter_options` that it declares, and the groups of each size apart.
        """
        for name, function in self._filters:
            chosen: list[int] = []
            for indices in _by_size(groups):
                grades = [[rollout.grade for rollout in groups[index].rollouts] for index in indices]  # [G, S]
                rewards = torch.tensor([[grade.reward for grade in group] for group in grades], dtype=torch.float64)
                correct = torch.tensor([[grade.outcome == "correct" for grade in group] for group in grades])
                mask = function(rewards, correct, **declared(function, 2, self._algorithm.filter_options))  # [G]
                check_returned("algorithm.filters", name, mask, rewards)
                chosen += compress(indices, mask.tolist())
            groups = [groups[index] for index in sorted(chosen)]
        return groups

    def assign_credit(
        self, groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence], *, step: int = 1
    ) -> Credit:
        """Advantages from the graders' rewards, less the KL penalty where `algorithm.kl.placement` is `reward`.

        A sequence-level advantage gets the sum of each sample's token rewards, and all tokens of a sample share it. A
        token-level one (`gae`, `reinforce_plus_plus`) gets the token rewards and the values. If there are values,
        `returns` = advantages + values, for their model to learn from; whitening comes after that, and then what a
        teacher adds. Overlong filtering comes last: a truncated sample counts in its group's baseline and in the
        whitening, and is then left out.

        Args:
            groups: The groups to learn from, at least one; all samples are graded.
            sequences: Their rollouts, as `train_sequences` gives them, with `ref_logprobs` if a reference is kept,
                `values` if a model gives them, and `old_logprobs` if the trainer has computed them.
            step: The training step.

        Returns:
            The credit; its metrics are `groups/zero_advantage_share`, the share of these groups in which no sample has
            an advantage other than 0, `reward/kl_penalty`, the mean penalty of a sample (the `reward` that is logged
            and saved stays the graders'), and `samples/overlong_dropped`, each only if the recipe sets it.

        Raises:
            ValueError: the advantage function returns no tensor, an incorrect shape, or a number that is not finite.
        """
        algorithm = self._algorithm
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        assert len(rollouts) == len(sequences), "one sequence for each rollout"
        lengths = [len(sequence.rollout_logprobs) for sequence in sequences]
        mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]  # [B, L], true at each response token
        rewards = torch.zeros(mask.shape, dtype=torch.float64)  # [B, L], the graders'
        for row, length, rollout in zip(rewards, lengths, rollouts, strict=True):
            if self._is_token_level and (on_tokens := rollout.grade.token_rewards) is not None:
                row[:length] = torch.tensor(on_tokens, dtype=torch.float64)
            else:
                row[length - 1] = rollout.grade.reward
        metrics: dict[str, float] = {}
        if self._penalty > 0:
            penalty = self._penalty * _padded(self._kl_estimates(sequences), mask)  # [B, L]
            metrics["reward/kl_penalty"] = float(penalty.sum(dim=1).mean())
            rewards = rewards - penalty
        has_values = sequences[0].values is not None
        values = _padded(joined([sequence.values for sequence in sequences]), mask) if has_values else None  # [B, L]
        advantages = self._advantages(rewards, values, mask, groups, step)  # [B, L]
        returns = None if values is None else advantages + values  # [B, L]
        if algorithm.whiten_advantages:
            advantages = whiten(advantages, mask)
        if self._teach is not None:
            added, measured = self._teach(sequences)
            advantages = advantages + _padded(added, mask)
            metrics |= measured
        rows = [row[:length].numpy() for row, length in zip(advantages, lengths, strict=True)]  # float64
        draws_with_signal = {rollout.draw_index for rollout, row in zip(rollouts, rows, strict=True) if row.any()}
        metrics["groups/zero_advantage_share"] = 1 - len(draws_with_signal) / len(groups)
        kept = list(range(len(rollouts)))
        if algorithm.overlong_filtering:
            kept = [index for index in kept if rollouts[index].response.finish_reason != "length"]
            metrics["samples/overlong_dropped"] = len(rollouts) - len(kept)
        learned = [
            replace(
                sequences[index],
                advantages=rows[index].astype(np.float32),
                returns=None if returns is None else returns[index, : lengths[index]].float().numpy(),
            )
            for index in kept
        ]
        return Credit(
            sequences=learned,
            advantages={
                (rollouts[index].draw_index, rollouts[index].sample_index): _mean(rows[index]) for index in kept
            },
            metrics=metrics | self._describe(learned),
        )

    def _kl_estimates(self, sequences: Sequence[TrainSequence]) -> Tensor:
        """Estimate of KL(policy || reference) at each response token, [R] float64.

        Its multiple is what the reward of each token loses, as in equation 2 of InstructGPT (arXiv 2203.02155; its
        reward of a sample has the sum).
        """
        reference = joined([sequence.ref_logprobs for sequence in sequences])
        estimates: Tensor = self._estimate_kl(policy_logprobs(sequences), reference)
        return estimates.double()

    def _advantages(
        self, rewards: Tensor, values: Tensor | None, mask: Tensor, groups: Sequence[RolloutGroup], step: int
    ) -> Tensor:
        """The advantage of every token, before whitening, from token rewards [B, L]: [B, L]."""
        algorithm, name, function = self._algorithm, self._algorithm.advantage, self._advantage
        sizes, lengths = [len(group.rollouts) for group in groups], mask.sum(dim=1)
        if self._is_token_level:
            assert values is not None or not needs_values(function), f"{name} needs values"
            advantages = function(
                rewards,
                torch.zeros_like(rewards) if values is None else values,
                mask,
                group_index=torch.arange(len(groups)).repeat_interleave(torch.tensor(sizes)),  # [B]
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                **self._offered(groups, lengths, step),
                **algorithm.advantage_options,
            )
            check_returned("algorithm.advantage", name, advantages, rewards)
        else:
            sums = rewards.sum(dim=1)  # [B]
            rows_of = torch.split(torch.arange(len(sums)), sizes)  # of each group
            advantages = torch.zeros_like(sums)[:, None]  # [B, 1]
            for indices in _by_size(groups):
                rows = torch.stack([rows_of[index] for index in indices])  # [G, S]
                if rows.shape[1] == 1 and self._teaches_alone:
                    continue  # nothing to compare with
                offered = self._offered([groups[index] for index in indices], lengths[rows], step)
                given = function(sums[rows], **offered, **algorithm.advantage_options)
                check_returned("algorithm.advantage", name, given, rows)
                advantages[rows, 0] = given.double()
        on_tokens = torch.where(mask, advantages.double(), 0.0)  # [B, L]
        if not bool(on_tokens.isfinite().all()):
            raise ValueError(f"algorithm.advantage: {name} returned a number that is not finite")
        return on_tokens

    def _offered(self, groups: Sequence[RolloutGroup], lengths: Tensor, step: int) -> dict[str, Any]:
        """Named inputs that the advantage declares (docs/extending.md); tensors have the shape of `lengths`."""
        grades = [rollout.grade for group in groups for rollout in group.rollouts]
        names = dict.fromkeys(name for grade in grades for name in grade.parts)  # tasks may have rewards of their own
        terms = {name: torch.tensor([grade.parts.get(name, 0.0) for grade in grades]).double() for name in names}
        offered = {
            "reward_terms": {name: values.reshape(lengths.shape) for name, values in terms.items()},
            "reward_weights": self._reward_weights,
            "lengths": lengths,
            "correct": torch.tensor([grade.outcome == "correct" for grade in grades]).reshape(lengths.shape),
            "prompt_ids": [group.prompt.prompt_id for group in groups],
            "step": step,
        }
        return {name: value for name, value in offered.items() if name in self._declared}


def _by_size(groups: Sequence[RolloutGroup]) -> list[list[int]]:
    """Indices of the groups of each size: a single list where all samples of all groups could be graded."""
    sizes = [len(group.rollouts) for group in groups]
    return [[index for index, size in enumerate(sizes) if size == one] for one in dict.fromkeys(sizes)]


def check_returned(option: str, name: str, value: object, first: Tensor, what: str = "it returned") -> None:
    """Refuse a result of a function of tensors that is not as `RETURNED` says, by its first argument.

    Raises:
        ValueError: it begins with the option; `what` says which part of the result `value` is.
    """
    num_dims, expected = RETURNED.get(option, PER_TOKEN)
    shape, is_mask = tuple(first.shape[:num_dims]), option == "algorithm.filters"
    if not isinstance(value, Tensor) or value.shape != shape or (is_mask and value.dtype != torch.bool):
        found = f"{describe_value(value)}, {getattr(value, 'dtype', 'no tensor')}"
        raise ValueError(f"{option}: `{name}` must return {expected.format(shape=shape)}; {what}: {found}")


def train_sequences(groups: Sequence[RolloutGroup]) -> list[TrainSequence]:
    """One sequence a rollout, in order, with advantages still zero."""
    return [_train_sequence(rollout) for group in groups for rollout in group.rollouts]


def _train_sequence(rollout: Rollout) -> TrainSequence:
    response, sampled = rollout.response, rollout.response.sampled
    ages = (rollout.policy_version - response.policy_versions)[sampled]
    return TrainSequence(
        token_ids=np.concatenate([np.array(rollout.prompt.token_ids, np.int64), response.token_ids]),
        targets=len(rollout.prompt.token_ids) + sampled,
        draw_index=rollout.draw_index,
        rollout_logprobs=response.rollout_logprobs[sampled],
        advantages=np.zeros(len(sampled), np.float32),
        ages=ages if ages.any() else None,
    )


def policy_logprobs(sequences: Sequence[TrainSequence]) -> Tensor:
    """The policy's log-probs that the ratio takes, of all response tokens, [R] float64.

    The decoder's, or with `algorithm.old_logprobs: recompute` the trainer's, which those of a reference or a teacher
    resemble in their rounding.
    """
    return joined([one.rollout_logprobs if one.old_logprobs is None else one.old_logprobs for one in sequences])


def joined(arrays: Sequence[npt.NDArray[np.float32] | None]) -> Tensor:
    """The numbers of the response tokens of all sequences, [R] float64."""
    present = [array for array in arrays if array is not None]
    assert len(present) == len(arrays), "either all sequences have these numbers or none"
    return torch.from_numpy(np.concatenate(present)).double()


def _padded(numbers: Tensor, mask: Tensor) -> Tensor:
    """[R] -> [B, L] float64, zero where the mask is false."""
    return torch.zeros(mask.shape, dtype=torch.float64).masked_scatter(mask, numbers)


def _mean(numbers: npt.NDArray[np.float64]) -> float:
    """The mean; that of equal numbers is exactly theirs."""
    return float(numbers[0] + (numbers - numbers[0]).mean())
