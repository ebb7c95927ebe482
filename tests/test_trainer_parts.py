"""Credit, data order and learning rate: the parts of a training step that are plain functions."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import make_recipe
from torch import Tensor

from srtrl.trainer.build import is_deterministic
from srtrl.trainer.credit import assign_credit, filter_groups, train_sequences, with_reference
from srtrl.trainer.data_order import DataOrder
from srtrl.trainer.optimizer import learning_rate_at
from srtrl.types import Grade, Prompt, Rollout, RolloutGroup


def drop_all(rewards: Tensor) -> Tensor:
    return torch.zeros(len(rewards), dtype=torch.bool)


def group(draw_index: int, rewards: list[float]) -> RolloutGroup:
    prompt = Prompt(prompt_id="p", text="p", token_ids=(3, 4), answer="")
    rollouts = [
        Rollout(
            prompt=prompt,
            draw_index=draw_index,
            sample_index=index,
            token_ids=[5] * (index + 1),
            rollout_logprobs=[-1.0] * (index + 1),
            text="",
            finish_reason="stop",
            policy_version=0,
            grade=Grade(reward=reward, parts={}, outcome="wrong"),
        )
        for index, reward in enumerate(rewards)
    ]
    return RolloutGroup(prompt=prompt, draw_index=draw_index, rollouts=rollouts)


def test_filters_keep_whole_groups_in_order() -> None:
    groups = [group(0, [1.0, 1.0]), group(1, [0.0, 1.0]), group(2, [0.0, 0.0]), group(3, [1.0, 0.0])]
    assert [kept.draw_index for kept in filter_groups(groups, ["drop_uniform"])] == [1, 3]
    assert filter_groups(groups, ["drop_uniform", "test_trainer_parts:drop_all", "drop_uniform"]) == []
    assert filter_groups(groups, []) == groups


def as_it_is(rewards: Tensor) -> Tensor:
    return rewards


def test_kl_in_the_reward_is_summed_over_the_sample() -> None:
    recipe = make_recipe(
        Path("policy"),
        Path("runs"),
        algorithm__advantage="test_trainer_parts:as_it_is",
        algorithm__kl={"coefficient": 0.1, "estimator": "k1", "placement": "reward"},
    )
    groups = [group(0, [1.0, 0.0]), group(1, [0.5, 0.5])]
    sequences = train_sequences(groups)
    # the reference gives every token log-prob -1.5: k1 is 0.5 a token, 0.05 off the rewards of 1 token, 0.10 of 2
    references = [sequence.rollout_logprobs - 0.5 for sequence in sequences]
    credit = assign_credit(groups, with_reference(sequences, references), recipe)
    expected = [0.95, -0.10, 0.45, 0.40]
    assert list(credit.advantages.values()) == pytest.approx(expected)
    assert [float(sequence.advantages[-1]) for sequence in credit.sequences] == pytest.approx(expected)
    assert [len(sequence.advantages) for sequence in credit.sequences] == [1, 2, 1, 2]
    assert credit.metrics == {"reward/kl_penalty": pytest.approx(0.075)}
    kl = recipe.algorithm.kl.model_copy(update={"placement": "loss"})
    in_loss = recipe.model_copy(update={"algorithm": recipe.algorithm.model_copy(update={"kl": kl})})
    plain = assign_credit(groups, with_reference(sequences, references), in_loss)
    assert list(plain.advantages.values()) == [1.0, 0.0, 0.5, 0.5]


@given(st.integers(1, 40), st.integers(0, 5), st.integers(1, 50), st.integers(1, 30))
def test_data_order_is_a_permutation_an_epoch(num_prompts: int, seed: int, batch: int, steps: int) -> None:
    order = DataOrder(num_prompts, seed)
    drawn = [index for step in range(1, steps + 1) for index in order.draws_of_step(step, batch)]
    for epoch in range(len(drawn) // num_prompts):
        assert sorted(drawn[epoch * num_prompts : (epoch + 1) * num_prompts]) == list(range(num_prompts))
    # any step may be asked for, in any order: what resume and look-ahead need
    fresh = DataOrder(num_prompts, seed)
    for step in (steps, 1, (steps + 1) // 2):
        assert fresh.draws_of_step(step, batch) == drawn[(step - 1) * batch : step * batch]


def test_data_order_depends_on_seed_and_epoch() -> None:
    first, second = DataOrder(50, 0).draws(0, 50), DataOrder(50, 0).draws(50, 50)
    assert first != second
    assert first != DataOrder(50, 1).draws(0, 50)
    with pytest.raises(ValueError, match="no training prompts"):
        DataOrder(0, 0)


def test_learning_rate() -> None:
    def rates(schedule: Any, warmup: int = 4) -> list[float]:
        return [
            learning_rate_at(step, peak=1.0, warmup_steps=warmup, num_steps=12, schedule=schedule) for step in range(12)
        ]

    assert rates("constant")[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates("constant")[4:] == [1.0] * 8
    assert rates("linear")[4:] == pytest.approx([1 - step / 8 for step in range(8)])
    assert rates("cosine")[8] == pytest.approx(0.5)
    assert rates("cosine", warmup=0)[0] == 1.0
    assert min(rates("linear")) > 0


def test_the_deterministic_mode_is_for_the_cpu(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tmp_path)
    assert is_deterministic(recipe, torch.device("cpu"))
    assert not is_deterministic(recipe, torch.device("cuda"))
    with pytest.raises(ValueError, match="true is for the CPU only"):
        is_deterministic(make_recipe(tmp_path, tmp_path, rollout__deterministic=True), torch.device("cuda"))
