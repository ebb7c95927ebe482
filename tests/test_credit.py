"""Credit assignment against loops over plain floats: rewards to tokens, advantages, returns, overlong filtering."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import algorithm_reference as reference
import numpy as np
import pytest
import torch
from engine_cases import make_response
from rollout_cases import make_group
from torch import Tensor
from update_cases import make_recipe

from srtrl.algorithms.advantages import token_level
from srtrl.trainer.credit import Credit, CreditAssigner, train_sequences
from srtrl.types import GradeOutcome, Rollout, RolloutGroup, TrainSequence

KL = 0.1


def group(draw_index: int, rewards: Sequence[float], *, correct: Sequence[int] = (), **options: Any) -> RolloutGroup:
    """A draw with these rewards; `correct` are samples, `options` as `make_group` has them."""
    outcomes: list[GradeOutcome] = ["correct" if index in correct else "wrong" for index in range(len(rewards))]
    return make_group(draw_index, outcomes, rewards=rewards, **options)


def random_groups(seed: int) -> list[RolloutGroup]:
    """Four groups of three samples, of which the first is truncated."""
    rng = np.random.default_rng(seed)
    return [
        group(number, rng.normal(size=3).tolist(), lengths=rng.integers(1, 8, 3).tolist(), cut=[0])
        for number in (10, 13, 16, 19)
    ]


def random_sequences(groups: Sequence[RolloutGroup], seed: int) -> list[TrainSequence]:
    """The groups' sequences with a random reference and a random critic."""
    rng = np.random.default_rng(seed)
    sequences = []
    for plain in train_sequences(groups):
        noise, values = rng.normal(size=(2, len(plain.rollout_logprobs))).astype(np.float32)
        sequences.append(replace(plain, ref_logprobs=plain.rollout_logprobs + noise / 2, values=values))
    return sequences


def credit_of(groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence] = (), **options: Any) -> Credit:
    """Credit of the groups' sequences; options are of `algorithm`."""
    critic: dict[str, Any] = {"critic": {}} if options.get("advantage") == "gae" else {}
    recipe = make_recipe(algorithm={"clip_high": 0.3, "kl": {}} | options, **critic)
    return CreditAssigner(recipe).assign_credit(groups, sequences or train_sequences(groups))


def tokens_of(credit: Credit) -> list[list[float]]:
    return [sequence.advantages.tolist() for sequence in credit.sequences]


# ---- all tokens against loops ----


def as_it_is(rewards: Tensor) -> Tensor:
    return rewards


def with_observation(rollout: Rollout) -> Rollout:
    """With a first token that was not sampled."""
    tokens, logprobs = rollout.response.token_ids.tolist(), rollout.response.rollout_logprobs.tolist()
    changes: dict[str, Any] = {"extensions": ((0, 1),), "finish_reason": rollout.response.finish_reason}
    return replace(rollout, response=make_response([9, *tokens], [0, *logprobs], **changes))


@pytest.mark.parametrize("advantage", ["gae", "test_credit:as_it_is"])
@pytest.mark.parametrize(
    ("estimator", "placement", "has_old", "is_whitened", "is_filtered"),
    [
        ("k1", "reward", False, False, True),
        ("k3", "reward", True, False, False),
        ("k2", "reward", False, True, True),
        ("k3", "loss", True, True, False),
    ],
)
def test_advantages_equal_loops_over_the_sampled_tokens(
    advantage: str, estimator: str, placement: str, has_old: bool, is_whitened: bool, is_filtered: bool
) -> None:
    """At what an environment inserted, nothing is added and nothing decays. `has_old`: the trainer's log-probs count.

    Without `gae` a sample has the sum of its tokens. Truncated samples count in the whitening, and are left out then.
    """
    groups = [replace(one, rollouts=list(map(with_observation, one.rollouts))) for one in random_groups(3)]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    sequences = random_sequences(groups, 3)
    rewards = []
    for rollout, sequence in zip(rollouts, sequences, strict=True):
        assert sequence.ref_logprobs is not None
        log_ratio = torch.from_numpy(sequence.rollout_logprobs).double() - torch.from_numpy(sequence.ref_logprobs)
        row = -KL * reference.kl_estimate(estimator, log_ratio).numpy() * (placement == "reward")
        row[-1] += rollout.grade.reward
        rewards.append(row)
    values = [sequence.values.astype(float) for sequence in sequences if sequence.values is not None]
    expected = [np.full(len(row), row.sum()) for row in rewards]
    if advantage == "gae":
        expected = reference.gae(rewards, values, gamma=0.97, lam=0.9)
    returns = [row + value for row, value in zip(expected, values, strict=True)]  # before the whitening
    if is_whitened:
        expected = reference.whiten(expected)
    if has_old:
        sequences = [replace(s, old_logprobs=s.rollout_logprobs, rollout_logprobs=s.advantages) for s in sequences]
    credit = credit_of(
        groups,
        sequences,
        advantage=advantage,
        gamma=0.97,
        lam=0.9,
        kl={"coefficient": KL, "estimator": estimator, "placement": placement},
        whiten_advantages=is_whitened,
        overlong_filtering=is_filtered,
    )
    penalties = [rollout.grade.reward - row.sum() for rollout, row in zip(rollouts, rewards, strict=True)]
    assert credit.metrics == pytest.approx(
        {"groups/zero_advantage_share": 0.0}
        | ({"reward/kl_penalty": np.mean(penalties)} if placement == "reward" else {})
        | ({"samples/overlong_dropped": 4} if is_filtered else {}),
        rel=1e-9,
    )
    kept = [index for index in range(12) if index % 3 or not is_filtered]
    for index, sequence in zip(kept, credit.sequences, strict=True):
        assert sequence.returns is not None
        np.testing.assert_allclose(sequence.returns, returns[index], rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(sequence.advantages, expected[index], rtol=1e-6, atol=1e-7)
    means = {(rollouts[index].draw_index, index % 3): expected[index].mean() for index in kept}
    assert credit.advantages == pytest.approx(means, rel=1e-9)


def test_cut_samples_count_in_the_baseline_and_are_not_learned_from() -> None:
    """A group without any advantage is counted all the same, and nothing may be left."""
    groups = [group(0, [1.0, 0.0]), group(1, [0.25, 1.0], cut=[0]), group(2, [0.5, 0.5], cut=[0, 1])]
    whole, credit = credit_of(groups), credit_of(groups, overlong_filtering=True)
    assert credit.advantages == {sample: whole.advantages[sample] for sample in [(0, 0), (0, 1), (1, 1)]}
    assert whole.metrics == {"groups/zero_advantage_share": pytest.approx(1 / 3)}
    assert credit.metrics == whole.metrics | {"samples/overlong_dropped": 3}
    metrics = {"groups/zero_advantage_share": 1.0, "samples/overlong_dropped": 2.0}
    assert credit_of(groups[2:], overlong_filtering=True) == Credit(sequences=[], advantages={}, metrics=metrics)


# ---- filters ----


def drop_all(rewards: Tensor, correct: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.bool)


def at_least(rewards: Tensor, correct: Tensor, *, limit: float) -> Tensor:
    return rewards.mean(dim=1) >= limit


def test_filters_keep_whole_groups_in_order_by_rewards_and_verdicts() -> None:
    """Rewards may differ if all are wrong (a length penalty), and be equal if one is right."""
    groups = [group(0, [0.0, -0.1]), group(1, [0.5, 0.5], correct=[1]), group(2, [1.0, 0.9], correct=[0, 1])]
    table: list[tuple[list[str], list[int]]] = [
        (["drop_all_right_or_wrong"], [1]),
        (["drop_uniform"], [0, 2]),
        (["drop_uniform", "drop_all_right_or_wrong"], []),
        (["drop_uniform", "test_credit:drop_all", "drop_uniform"], []),
        (["drop_uniform", "test_credit:at_least"], [2]),  # it gets the option that it declares
        ([], [0, 1, 2]),
    ]
    for filters, kept in table:
        left = groups_kept(groups, filters=filters, filter_options={"limit": 0.9})
        assert [one.draw_index for one in left] == kept, filters


# ---- samples that could not be graded ----


def with_failures(groups: Sequence[RolloutGroup], failed: Sequence[Sequence[int]]) -> list[RolloutGroup]:
    """The groups with samples that could not be graded: those of `failed`, in the place that they name, of reward 0."""
    outcomes: list[GradeOutcome] = ["timeout", "crash", "error"]
    longer = []
    for one, places in zip(groups, failed, strict=True):
        rollouts = list(one.rollouts)
        for place in places:
            grade = replace(rollouts[0].grade, reward=0.0, outcome=outcomes[place % 3])
            rollouts.insert(place, replace(rollouts[0], grade=grade, response=make_response([5] * 9)))
        rollouts = [replace(rollout, sample_index=index) for index, rollout in enumerate(rollouts)]
        longer.append(replace(one, rollouts=rollouts))
    return longer


def groups_kept(groups: list[RolloutGroup], **options: Any) -> list[RolloutGroup]:
    return CreditAssigner(make_recipe(algorithm=options)).groups_to_learn_from(groups)


def test_a_sample_that_could_not_be_graded_is_left_out_and_all_others_are_kept() -> None:
    groups = random_groups(5)
    for failed in ([(0, 2)] * 4, [(1,)] * 4, [(3,), (), (0, 1, 2), (2, 2)]):
        for found, expected in zip(groups_kept(with_failures(groups, failed)), groups, strict=True):
            assert [id(one.response) for one in found.rollouts] == [id(one.response) for one in expected.rollouts]


def test_groups_of_several_sizes_are_compared_each_within_itself() -> None:
    """A failed grading is not better than an incorrect answer, whose reward is below 0."""
    groups = with_failures(
        [
            group(0, [1.0, -1.0], correct=[0]),
            group(1, [1.0, -1.0, -1.0], correct=[0]),
            group(2, [1.0]),
            group(3, [0.0]),
        ],
        [(2,), (), (0, 1), (1, 2)],
    )

    two = groups_kept(groups, advantage="group_centered")
    assert [(one.draw_index, len(one.rollouts)) for one in two] == [(0, 2), (1, 3)]  # of the others one is left
    credit = credit_of(two, advantage="group_centered")
    assert credit.advantages == pytest.approx({(0, 0): 1, (0, 1): -1, (1, 0): 4 / 3, (1, 1): -2 / 3, (1, 2): -2 / 3})
    assert [(one.draw_index, one.returns) for one in credit.sequences] == [(0, None)] * 2 + [(1, None)] * 3
    assert tokens_of(credit)[1:4:2] == [pytest.approx([-1.0] * 2), pytest.approx([-2 / 3] * 2)]
    for advantage in ("reinforce_plus_plus", "test_credit:looks_around"):  # single samples are learned from
        assert [len(one.rollouts) for one in groups_kept(groups, advantage=advantage)] == [2, 3, 1, 1]
    for name, draws in (("drop_all_right_or_wrong", [0, 1]), ("test_credit:at_least", [0]), ("drop_uniform", [0, 1])):
        assert [
            one.draw_index for one in groups_kept(groups, filters=[name], filter_options={"limit": -0.1})
        ] == draws, name
    assert groups_kept(groups[3:]) == []
    failed = with_failures([group(1, [1.0])], [(0,)])[0]
    single = [group(0, [1.0]), replace(failed, rollouts=failed.rollouts[:1]), group(2, [0.5])]
    assert [one.draw_index for one in groups_kept(single)] == [0, 2], "of one sample from the beginning"


# ---- functions of a user ----


SEEN: list[dict[str, Any]] = []


def record(**given: Any) -> None:
    SEEN.append({name: value.tolist() if isinstance(value, Tensor) else value for name, value in given.items()})


@token_level
def looks_around(rewards: Tensor, values: Tensor, mask: Tensor, *, lengths: Any, step: int, **options: Any) -> Tensor:
    """Not a number in the padding must not matter."""
    record(rewards=rewards, values=values, mask=mask, lengths=lengths, step=step, **options)
    return torch.where(mask, 1.0, math.nan).float()


def asks_by_name(
    rewards: Tensor, reward_weights: Any, reward_terms: Any, lengths: Any, correct: Any, prompt_ids: Any, bonus: float
) -> Tensor:
    record(**locals() | {"reward_terms": reward_terms["f"]})
    return rewards + bonus


def test_an_advantage_gets_padded_rows_what_it_declares_and_its_options() -> None:
    SEEN.clear()
    groups = [group(7, [1.0, 2.0], lengths=[3, 1]), group(9, [3.0, 4.0], lengths=[1, 2], correct=[1])]
    for one in groups:
        grades = [replace(rollout.grade, parts={"f": rollout.grade.reward / 2}) for rollout in one.rollouts]
        one.rollouts[:] = [replace(rollout, grade=grade) for rollout, grade in zip(one.rollouts, grades, strict=True)]
    recipe = make_recipe(algorithm={"advantage": "test_credit:looks_around", "gamma": 0.5, "lam": 0.25})
    credit = CreditAssigner(recipe).assign_credit(groups, train_sequences(groups), step=12)
    assert tokens_of(credit) == [[1] * 3, [1], [1], [1] * 2]
    options = {"advantage": "test_credit:asks_by_name", "advantage_options": {"bonus": 0.5}}
    recipe = make_recipe(algorithm=options, rewards=[{"name": "a:f", "weight": 2.0}])
    credit = CreditAssigner(recipe).assign_credit(groups, train_sequences(groups))
    assert list(credit.advantages.values()) == [1.5, 2.5, 3.5, 4.5]
    by_row, by_name = SEEN
    mask = [[True] * 3, [True, False, False], [True, False, False], [True, True, False]]
    padded = {"rewards": [[0, 0, 1], [2, 0, 0], [3, 0, 0], [0, 4, 0]], "values": [[0] * 3] * 4, "mask": mask}
    rest = {"lengths": [3, 1, 1, 2], "step": 12, "group_index": [0, 0, 1, 1], "gamma": 0.5, "lam": 0.25}
    assert by_row == padded | rest
    by_sample = {"rewards": [[1, 2], [3, 4]], "reward_terms": [[0.5, 1], [1.5, 2]], "lengths": [[3, 1], [1, 2]]}
    rest = {"correct": [[False] * 2, [False, True]], "reward_weights": {"f": 2}, "prompt_ids": ["7", "9"], "bonus": 0.5}
    assert by_name == by_sample | rest


@token_level
def transposed(rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Tensor:
    return rewards.T


def infinite(rewards: Tensor) -> Tensor:
    return rewards / 0


def one_a_group(rewards: Tensor, *_: Tensor) -> Tensor:
    return rewards.mean(dim=1)


@pytest.mark.parametrize(
    "options",
    [
        *({"advantage": f"test_credit:{name}"} for name in ("transposed", "infinite", "one_a_group")),
        {"filters": ["test_credit:one_a_group"]},
    ],
)
def test_what_is_incorrect_in_a_step_is_a_users_error(options: dict[str, Any]) -> None:
    (option,) = options
    groups = [group(7, [1.0, 2.0], lengths=[3, 1]), group(9, [3.0, 4.0], lengths=[1, 2])]
    with pytest.raises(ValueError, match=rf"^algorithm\.{option}: .*test_credit:"):
        credit_of(groups_kept(groups, **options), **options)
