"""Every combination that `recipe_conflicts.py` refuses, and that its neighbour is accepted."""

from typing import Any

import pytest
from pydantic import ValidationError
from update_cases import make_recipe

from srtrl.algorithms.reductions import MAX_ERROR
from srtrl.recipe import Recipe
from srtrl.recipe_base import RecipeConflictsError
from srtrl.recipe_conflicts import MAX_KL_ERROR

REFUSED: list[tuple[str, dict[str, Any], str, dict[str, Any]]] = [
    # key of the conflict, options that are refused, part of the message, what repairs them
    (
        "model.mixed_precision",
        {"model": {"path": "unused", "dtype": "bfloat16", "mixed_precision": "bf16"}},
        "found bf16",
        {"model__dtype": "float32"},
    ),
    (
        "rollout.kv_memory_share",
        {"rollout__kv_memory_share": 0.8, "rollout__kv_memory_gib": 8.0},
        "has no effect beside rollout.kv_memory_gib (8.0)",
        {"rollout__kv_memory_gib": "auto"},
    ),
    (
        "rollout.kv_memory_share",
        {"rollout__kv_memory_share": 0.8, "rollout__num_pages": 5000},
        "has no effect beside rollout.num_pages (5000)",
        {"rollout__kv_memory_share": 0.5},
    ),
    (
        "rollout.dynamic_sampling",
        {"rollout__dynamic_sampling": True},
        "no filters",
        {"algorithm__filters": ["drop_uniform"]},
    ),
    ("rollout.max_open_prompts", {"rollout__max_open_prompts": 2}, "found 2", {"rollout__max_open_prompts": None}),
    ("rollout.max_draws", {"rollout__max_draws": 9}, "found 9", {"rollout__max_draws": None}),
    (
        "rollout.max_draws",
        {"rollout__dynamic_sampling": True, "algorithm__filters": ["drop_uniform"], "rollout__max_draws": 2},
        "at least rollout.num_prompts (3), found 2",
        {"rollout__max_draws": 3},
    ),
    (
        "algorithm.filters.0",
        {
            "rollout__num_samples": 1,
            "algorithm__filters": ["drop_uniform"],
            "algorithm__advantage": "reinforce_plus_plus",
        },
        "would drop every group",
        {"rollout__num_samples": 2},
    ),
    ("rollout.num_samples", {"rollout__num_samples": 1}, "group_relative (a group of one", {"rollout__num_samples": 2}),
    (
        "rollout.num_samples",
        {"rollout__num_samples": 1, "algorithm__advantage": "leave_one_out"},
        "leave_one_out",
        {"rollout__num_samples": 2},
    ),
    ("algorithm.gamma", {"algorithm__gamma": 0.9}, "found 0.9", {"algorithm__advantage": "reinforce_plus_plus"}),
    ("algorithm.lam", {"algorithm__lam": 0.9}, "found 0.9", {"algorithm__advantage": "gae", "critic": {}}),
    (
        "algorithm.whiten_advantages",
        {"algorithm__advantage": "reinforce_plus_plus", "algorithm__whiten_advantages": True},
        "itself",
        {"algorithm__whiten_advantages": False},
    ),
    ("algorithm.kl.target", {"algorithm__kl__target": 0.1}, "found 0", {"algorithm__kl__coefficient": 0.1}),
    (
        "algorithm.kl.horizon",
        {"algorithm__kl": {"coefficient": 0.1, "target": 0.1, "horizon": 1}},
        "0.2 x the 6 samples",
        {"algorithm__kl": {"coefficient": 0.1, "target": 0.1, "horizon": 2}},
    ),
    (
        "algorithm.kl.estimator",
        {"algorithm__kl__coefficient": 0.1, "algorithm__kl__estimator": "k1"},
        "expectation 0",
        {"algorithm__kl__placement": "reward"},
    ),
    (
        "algorithm.kl.horizon",
        {"algorithm__kl": {"coefficient": 0.1, "horizon": 500}},
        "set algorithm.kl.target; found 500",
        {"algorithm__kl": {"coefficient": 0.1, "horizon": 500, "target": 0.1}},
    ),
    (
        "algorithm.importance_level",
        {"algorithm__importance_level": "sequence"},
        "set algorithm.importance_cap; found sequence",
        {"algorithm__importance_cap": 2.0, "algorithm__old_logprobs": "recompute"},
    ),
    (
        "algorithm.importance_cap",
        {"algorithm__importance_cap": 2.0},
        "algorithm.old_logprobs=recompute",
        {"algorithm__old_logprobs": "recompute"},
    ),
    (
        "train.num_epochs",
        {"algorithm__loss": "policy_gradient", "train__num_epochs": 2},
        "found 2",
        {"train__num_epochs": 1},
    ),
    ("algorithm.advantage", {"algorithm__advantage": "gae"}, "needs a critic", {"critic": {}}),
    ("critic", {"critic": {}}, "uses no critic", {"algorithm__advantage": "gae"}),
    (
        "critic.mini_batch_prompts",
        {"algorithm__advantage": "gae", "critic": {"mini_batch_prompts": 2}},
        "divisor of rollout.num_prompts (3), found 2",
        {"critic": {"mini_batch_prompts": 1}},
    ),
    (
        "critic.lr_warmup_steps",
        {"algorithm__advantage": "gae", "train__schedule": "linear", "critic": {"lr_warmup_steps": 2}},
        "fewer than the run's 2 optimizer steps",
        {"critic": {"lr_warmup_steps": 1}},
    ),
    (
        "train.warmup_steps",
        {
            "algorithm__advantage": "gae",
            "train__schedule": "linear",
            "critic": {"warmup_steps": 1},
            "train__warmup_steps": 1,
        },
        "fewer than the run's 1 optimizer steps",
        {"train__warmup_steps": 0},
    ),
    (
        "algorithm.loss",
        {"algorithm__advantage": "reinforce_plus_plus", "algorithm__loss": "gspo"},
        "expected gspo_token",
        {"algorithm__loss": "gspo_token"},
    ),
    (
        "critic.warmup_steps",
        {"algorithm__advantage": "gae", "critic": {"warmup_steps": 2}},
        "fewer than train.num_steps (2)",
        {"critic": {"warmup_steps": 1}},
    ),
]


@pytest.mark.parametrize(("key", "refused", "message", "repair"), REFUSED)
def test_a_combination_is_refused_and_its_repair_accepted(
    key: str, refused: dict[str, Any], message: str, repair: dict[str, Any]
) -> None:
    with pytest.raises(ValidationError) as caught:
        make_recipe(**refused)
    error = caught.value.errors()[0]["ctx"]["error"]
    assert isinstance(error, RecipeConflictsError)
    found = {".".join(map(str, conflict.key)): conflict.message for conflict in error.conflicts}
    assert list(found) == [key]
    assert message in found[key]
    repaired = make_recipe(**{**refused, **repair})
    assert Recipe.model_validate(repaired.model_dump()) == repaired, "a resolved recipe gives every option's value"


def test_the_clip_of_the_kl_controllers_error_is_the_same_in_both_files() -> None:
    assert MAX_KL_ERROR == MAX_ERROR


def test_one_override_switches_a_part_off() -> None:
    """An ablation must not have to undo every option of what it leaves out."""
    rewarded = {"algorithm__kl": {"coefficient": 0.0, "estimator": "k1", "placement": "reward"}}
    assert make_recipe(**rewarded).algorithm.kl.coefficient == 0
    critic = {"value_loss": "squared_error", "value_clip": 0.5}
    assert make_recipe(algorithm__advantage="gae", critic=critic).critic is not None
