"""Credit assignment against loops over plain floats: rewards to tokens, advantages, returns, overlong filtering."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
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
from srtrl.trainer.credit import Credit, assign_credit, filter_groups, groups_to_learn_from, train_sequences
from srtrl.types import Conversation, GradeOutcome, RolloutGroup, SegmentKind, TrainSequence

KL = 0.1


def group(draw_index: int, rewards: Sequence[float], *, correct: Sequence[int] = (), **options: Any) -> RolloutGroup:
    """A draw with these rewards; `correct` are samples, `options` as `make_group` has them."""
    outcomes: list[GradeOutcome] = ["correct" if index in correct else "wrong" for index in range(len(rewards))]
    return make_group(draw_index, outcomes, rewards=rewards, **options)


def random_groups(seed: int, num_groups: int = 4, num_samples: int = 3) -> list[RolloutGroup]:
    rng = np.random.default_rng(seed)
    return [
        group(10 + 3 * number, rng.normal(size=num_samples).tolist(), lengths=rng.integers(1, 8, num_samples).tolist())
        for number in range(num_groups)
    ]


def random_sequences(groups: Sequence[RolloutGroup], seed: int) -> list[TrainSequence]:
    """The groups' sequences with a random reference and a random critic."""
    rng = np.random.default_rng(seed)
    sequences = []
    for plain in train_sequences(groups):
        noise, values = rng.normal(size=(2, len(plain.rollout_logprobs))).astype(np.float32)
        sequences.append(replace(plain, ref_logprobs=plain.rollout_logprobs + noise / 2, values=values))
    return sequences


def credit_of(groups: Sequence[RolloutGroup], seed: int | None = None, **options: Any) -> Credit:
    """Of the groups' sequences; `seed` is that of a random reference and critic. Options are of `algorithm`."""
    sequences = train_sequences(groups) if seed is None else random_sequences(groups, seed)
    critic: dict[str, Any] = {"critic": {}} if options.get("advantage") == "gae" else {}
    return assign_credit(groups, sequences, make_recipe(algorithm={"clip_high": 0.3, "kl": {}} | options, **critic))


def tokens_of(credit: Credit) -> list[list[float]]:
    return [sequence.advantages.tolist() for sequence in credit.sequences]


def estimate(estimator: str, new: float, ref: float) -> float:
    """The estimate of one token's KL; `new` is the log-prob by the policy."""
    return {"k1": new - ref, "k2": (new - ref) ** 2 / 2, "k3": math.exp(ref - new) - 1 - (ref - new)}[estimator]


def token_rewards(
    groups: Sequence[RolloutGroup], sequences: Sequence[TrainSequence], kl: str | None
) -> list[list[float]]:
    """Reward of each sampled token of each sequence."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = []
    for rollout, sequence in zip(rollouts, sequences, strict=True):
        row = [0.0] * len(sequence.rollout_logprobs)
        row[-1] = rollout.grade.reward
        if kl is not None:
            assert sequence.ref_logprobs is not None
            for token, (new, ref) in enumerate(zip(sequence.rollout_logprobs, sequence.ref_logprobs, strict=True)):
                row[token] -= KL * estimate(kl, float(new), float(ref))
        rewards.append(row)
    return rewards


def two_groups() -> list[RolloutGroup]:
    return [group(7, [1.0, 2.0], lengths=[3, 1]), group(9, [3.0, 4.0], lengths=[1, 2])]


# ---- filters ----


def drop_all(rewards: Tensor, correct: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.bool)


def one_number(rewards: Tensor, correct: Tensor) -> Tensor:
    return torch.tensor(True)


def at_least(rewards: Tensor, correct: Tensor, *, limit: float) -> Tensor:
    return rewards.mean(dim=1) >= limit


def test_filters_keep_whole_groups_in_order_by_rewards_and_verdicts() -> None:
    """Rewards may differ where all are wrong (a length penalty), and be equal where one is right."""
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
        assert [one.draw_index for one in filter_groups(groups, filters, {"limit": 0.9})] == kept, filters
    with pytest.raises(
        ValueError, match=r"algorithm\.filters: `test_credit:one_number` must return a bool for each of"
    ):
        filter_groups(groups, ["test_credit:one_number"])


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


@pytest.mark.parametrize(
    "options",
    [
        *({"advantage": name} for name in ("group_relative", "group_centered", "leave_one_out")),
        {"advantage": "gae", "whiten_advantages": True, "kl": {"coefficient": KL, "placement": "reward"}},
        {"advantage": "reinforce_plus_plus", "overlong_filtering": True},
        {"filters": ["drop_uniform"], "whiten_advantages": True},
    ],
)
def test_a_sample_that_could_not_be_graded_changes_no_number_of_the_others(options: dict[str, Any]) -> None:
    groups = random_groups(5, num_groups=4, num_samples=3)
    whole = credit_of(groups, 6, **options)
    algorithm = make_recipe(algorithm=options).algorithm
    for failed in ([(0, 2)] * 4, [(1,)] * 4, [()] * 4):
        kept = groups_to_learn_from(with_failures(groups, failed), algorithm)
        credit = credit_of(kept, 6, **options)
        assert tokens_of(credit) == tokens_of(whole)
        assert list(credit.advantages.values()) == list(whole.advantages.values())
        assert credit.metrics == whole.metrics
    uneven = groups_to_learn_from(with_failures(groups, [(3,), (), (0, 1, 2), (2, 2)]), algorithm)
    assert [len(one.rollouts) for one in uneven] == [3] * 4


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
    everything = make_recipe(algorithm={"advantage": "group_centered"}).algorithm
    kept = groups_to_learn_from(groups, everything)
    assert [(one.draw_index, len(one.rollouts)) for one in kept] == [(0, 2), (1, 3)]  # of the others one is left
    credit = credit_of(kept, advantage="group_centered")
    assert credit.advantages == pytest.approx({(0, 0): 1, (0, 1): -1, (1, 0): 4 / 3, (1, 1): -2 / 3, (1, 2): -2 / 3})
    assert [(one.draw_index, one.returns) for one in credit.sequences] == [(0, None)] * 2 + [(1, None)] * 3
    assert tokens_of(credit)[1:4:2] == [pytest.approx([-1.0] * 2), pytest.approx([-2 / 3] * 2)]
    for advantage, sizes in (("reinforce_plus_plus", [2, 3, 1, 1]), ("test_credit:looks_around", [2, 3, 1, 1])):
        by_token = groups_to_learn_from(groups, make_recipe(algorithm={"advantage": advantage}).algorithm)
        assert [len(one.rollouts) for one in by_token] == sizes
    failed = with_failures([group(1, [1.0])], [(0,)])[0]
    single = [group(0, [1.0]), replace(failed, rollouts=failed.rollouts[:1]), group(2, [0.5])]
    kept = groups_to_learn_from(single, everything)  # of one sample from the beginning
    assert [one.draw_index for one in kept] == [0, 2]
    for names, draws in (
        (["drop_all_right_or_wrong"], [0, 1]),
        (["test_credit:at_least"], [0]),
        (["drop_uniform"], [0, 1]),
    ):
        algorithm = make_recipe(algorithm={"filters": names, "filter_options": {"limit": -0.1}}).algorithm
        assert [one.draw_index for one in groups_to_learn_from(groups, algorithm)] == draws, names
    assert groups_to_learn_from(groups[3:], everything) == []


# ---- sequence-level advantages ----


def as_it_is(rewards: Tensor) -> Tensor:
    return rewards


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_kl_in_the_reward_is_summed_over_the_sample(estimator: str) -> None:
    groups = random_groups(1)
    sequences = random_sequences(groups, 1)
    kl = {"coefficient": KL, "estimator": estimator, "placement": "reward"}
    recipe = make_recipe(algorithm__advantage="test_credit:as_it_is", algorithm__kl=kl)
    credit = assign_credit(groups, sequences, recipe)
    expected = [sum(row) for row in token_rewards(groups, sequences, estimator)]
    assert list(credit.advantages.values()) == pytest.approx(expected, rel=1e-12)
    plain = [rollout.grade.reward for group in groups for rollout in group.rollouts]
    assert credit.metrics["reward/kl_penalty"] == pytest.approx(np.mean(np.array(plain) - expected), rel=1e-9)
    recomputed = [replace(one, old_logprobs=one.rollout_logprobs, rollout_logprobs=one.advantages) for one in sequences]
    again = assign_credit(groups, recomputed, recipe)
    assert again.advantages == credit.advantages, "the trainer's own log-probs count where it has computed them"
    in_loss = credit_of(groups, 1, advantage="test_credit:as_it_is", kl={"coefficient": KL, "estimator": "k3"})
    assert list(in_loss.advantages.values()) == plain
    assert in_loss.metrics == {"groups/zero_advantage_share": 0.0}


# ---- token-level advantages ----


@pytest.mark.parametrize("whiten", [False, True])
@pytest.mark.parametrize("kl", [None, "k1", "k3"])
def test_gae_with_the_kl_in_the_reward(kl: str | None, whiten: bool) -> None:
    """Over the sampled tokens alone: at what an environment inserted, nothing is added and nothing decays."""
    gamma, lam = 0.97, 0.9
    groups = [with_observations(one, seed) for seed, one in enumerate(random_groups(3))]
    sequences = random_sequences(groups, 3)
    section = {"coefficient": KL, "estimator": kl, "placement": "reward"} if kl else {}
    credit = credit_of(groups, 3, advantage="gae", gamma=gamma, lam=lam, whiten_advantages=whiten, kl=section)
    values = [sequence.values.astype(float) for sequence in sequences if sequence.values is not None]
    expected = reference.gae(list(map(np.array, token_rewards(groups, sequences, kl))), values, gamma, lam)
    returns = [advantages + value for advantages, value in zip(expected, values, strict=True)]  # before the whitening
    if whiten:
        expected = reference.whiten(expected)
    for sequence, advantages, return_ in zip(credit.sequences, expected, returns, strict=True):
        assert sequence.returns is not None
        assert sequence.returns.tolist() == pytest.approx(return_.tolist(), rel=1e-6, abs=1e-7)
        assert sequence.advantages.tolist() == pytest.approx(advantages.tolist(), rel=1e-6, abs=1e-7)
    assert list(credit.advantages.values()) == pytest.approx([np.mean(row) for row in expected], rel=1e-9)


SEEN: list[dict[str, Any]] = []


@token_level
def looks_around(rewards: Tensor, values: Tensor, mask: Tensor, *, lengths: Tensor, **options: Any) -> Tensor:
    """Not a number in the padding must not matter."""
    SEEN.append({"rewards": rewards, "values": values, "mask": mask, "lengths": lengths, **options})
    return torch.where(mask, 1.0, math.nan).float()


def asks_by_name(
    rewards: Tensor,
    reward_weights: dict[str, float],
    *,
    reward_terms: dict[str, Tensor],
    lengths: Tensor,
    correct: Tensor,
    prompt_ids: list[str],
    step: int,
    bonus: float,
    **others: Any,
) -> Tensor:
    SEEN.append({name: value for name, value in locals().items() if name != "rewards"})
    return rewards + bonus


def test_an_advantage_gets_padded_rows_what_it_declares_and_its_options() -> None:
    SEEN.clear()
    groups = two_groups()
    credit = credit_of(groups, advantage="test_credit:looks_around", gamma=0.5, lam=0.25)
    assert tokens_of(credit) == [[1.0] * 3, [1.0], [1.0], [1.0] * 2]
    options = {"algorithm__advantage": "test_credit:asks_by_name", "algorithm__advantage_options": {"bonus": 0.5}}
    recipe = make_recipe(rewards=[{"name": "a:f", "weight": 2.0}], **options)
    credit = assign_credit(groups, train_sequences(groups), recipe, step=12)
    assert list(credit.advantages.values()) == [1.5, 2.5, 3.5, 4.5]
    by_row, by_name = SEEN

    assert by_row["rewards"].tolist() == [[0, 0, 1], [2, 0, 0], [3, 0, 0], [0, 4, 0]]
    assert by_row["rewards"].dtype == torch.float64
    assert by_row["mask"].tolist() == [[True] * 3, [True, False, False], [True, False, False], [True, True, False]]
    assert by_row["values"].tolist() == [[0.0] * 3] * 4
    assert by_row["group_index"].tolist() == [0, 0, 1, 1]
    assert (by_row["gamma"], by_row["lam"]) == (0.5, 0.25)
    grades = [rollout.grade for each in groups for rollout in each.rollouts]
    terms = {name: values.flatten().tolist() for name, values in by_name["reward_terms"].items()}
    assert terms == {name: [grade.parts[name] for grade in grades] for name in grades[0].parts}
    assert by_name["lengths"].tolist() == [[3, 1], [1, 2]]
    assert by_name["correct"].flatten().tolist() == [grade.outcome == "correct" for grade in grades]
    assert (by_name["reward_weights"], by_name["step"]) == ({"f": 2.0}, 12)
    assert by_name["prompt_ids"] == [each.prompt.prompt_id for each in groups]
    assert by_row["lengths"].tolist() == [3, 1, 1, 2]


@token_level
def transposed(rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Tensor:
    return rewards.T


@token_level
def infinite(rewards: Tensor, values: Tensor, mask: Tensor, **_: Any) -> Tensor:
    return rewards / 0


def one_a_group(rewards: Tensor) -> Tensor:
    return rewards.mean(dim=1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("transposed", r"shape \(4, 3\), that of its first argument; it returned: Tensor of shape \(3, 4\)"),
        ("infinite", "returned a number that is not finite"),
        ("one_a_group", r"shape \(2, 2\), that of its first argument; it returned: Tensor of shape \(2,\)"),
    ],
)
def test_an_incorrect_advantage_is_a_users_error(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"algorithm\.advantage: .* {message}"):
        credit_of(two_groups(), advantage=f"test_credit:{name}")


# ---- overlong filtering ----


def test_cut_samples_count_in_the_baseline_and_are_not_learned_from() -> None:
    """A group without any advantage is counted all the same, and nothing may be left."""
    groups = [group(0, [1.0, 0.0]), group(1, [0.25, 1.0], cut=[0]), group(2, [0.5, 0.5], cut=[0, 1])]
    whole = credit_of(groups)
    credit = credit_of(groups, overlong_filtering=True)
    assert credit.advantages == {sample: whole.advantages[sample] for sample in [(0, 0), (0, 1), (1, 1)]}
    assert whole.metrics == {"groups/zero_advantage_share": pytest.approx(1 / 3)}
    assert credit.metrics == whole.metrics | {"samples/overlong_dropped": 3}
    assert [one.draw_index for one in credit.sequences] == [0, 0, 1]
    assert tokens_of(credit) == [tokens_of(whole)[index] for index in (0, 1, 3)]
    nothing = credit_of(groups[2:], overlong_filtering=True)
    metrics = {"groups/zero_advantage_share": 1.0, "samples/overlong_dropped": 2.0}
    assert nothing == Credit(sequences=[], advantages={}, metrics=metrics)


def test_whitening_comes_before_overlong_filtering() -> None:
    groups = [group(0, [1.0, 0.0], cut=[1]), group(1, [3.0, 0.0])]
    options: dict[str, Any] = {"advantage": "test_credit:as_it_is", "whiten_advantages": True}
    whole, filtered = credit_of(groups, **options), credit_of(groups, **options, overlong_filtering=True)
    tokens = np.array([1.0, 0.0, 0.0, 3.0, 0.0, 0.0])  # responses of 1, 2, 1 and 2 tokens
    expected = ((tokens - tokens.mean()) / math.sqrt(tokens.var(ddof=1) + 1e-8))[[0, 1, 3, 4]]
    assert list(whole.advantages.values()) == pytest.approx(expected, rel=1e-12)
    assert list(filtered.advantages.values()) == pytest.approx(expected[[0, 2, 3]], rel=1e-12)


def with_observations(group: RolloutGroup, seed: int) -> RolloutGroup:
    """Put one or two observations into each rollout."""
    rng = np.random.default_rng(seed)
    rollouts = []
    for rollout in group.rollouts:
        length = len(rollout.response.token_ids)
        places = sorted(rng.integers(1, length, size=2).tolist()) if length > 1 else []
        ends = [*places, length]
        segments: list[tuple[SegmentKind, int]] = [("model", ends[0])]
        for start, end in pairwise(ends):
            segments += [("boundary", 1), ("observation", 2), ("model", end - start)]
        inserted = np.repeat(places, 3).astype(int)
        rollouts.append(
            replace(
                rollout,
                response=make_response(
                    np.insert(rollout.response.token_ids, inserted, 9).tolist(),
                    np.insert(rollout.response.rollout_logprobs, inserted, 0).tolist(),
                    extensions=tuple((place + 3 * i, place + 3 * i + 3) for i, place in enumerate(places)),
                ),
                conversation=Conversation(
                    segments=tuple(one for one in segments if one[1]), num_turns=2, num_void_turns=0, stop_reason="done"
                ),
            )
        )
    return replace(group, rollouts=rollouts)
