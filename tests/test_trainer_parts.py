"""Parts of a training run that are plain functions, or small enough to test alone."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_run import make_policy, make_recipe

from srtrl.trainer import build
from srtrl.trainer.build import build_policy, is_deterministic
from srtrl.trainer.optimizer import learning_rate_at
from srtrl.trainer.run_metrics import merge_metrics
from srtrl.trainer.sampling import DataOrder
from srtrl.trainer.trainer import long_lived_objects_left_alone


@given(st.integers(2, 40), st.integers(0, 5), st.integers(1, 500))
def test_data_order_is_a_permutation_in_each_epoch(num_prompts: int, seed: int, num_draws: int) -> None:
    order = DataOrder(num_prompts, seed)
    drawn = [order.prompt_of(draw) for draw in range(num_draws)]
    for start in range(0, num_draws - num_prompts, num_prompts):
        assert sorted(drawn[start : start + num_prompts]) == list(range(num_prompts))
    fresh = DataOrder(num_prompts, seed)  # in any order: what resume and look-ahead need
    assert [fresh.prompt_of(draw) for draw in reversed(range(num_draws))] == drawn[::-1]


def test_data_order_depends_on_seed_and_epoch() -> None:
    epochs = [
        [order.prompt_of(draw) for draw in range(start, start + 50)]
        for order in (DataOrder(50, 0), DataOrder(50, 1))
        for start in (0, 50)
    ]
    assert len(set(map(tuple, epochs))) == 4
    with pytest.raises(ValueError, match="no training prompts"):
        DataOrder(0, 0)


def test_a_metric_has_one_source() -> None:
    """A drafter of the user's may log what a loss of the user's logs."""
    assert merge_metrics({"a": 1.0}, {"b": 2.0}) == {"a": 1.0, "b": 2.0}
    with pytest.raises(ValueError, match=r"log the metric `mine`, the update \(algorithm\.loss\) and another"):
        merge_metrics({"a": 1.0, "mine": 1.0}, {"b": 2.0, "mine": 2.0})


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


def test_the_deterministic_mode_is_the_default_of_the_cpu(tmp_path: Path) -> None:
    recipe = make_recipe(tmp_path, tmp_path)
    assert is_deterministic(recipe, torch.device("cpu"))
    assert not is_deterministic(recipe, torch.device("cuda"))
    assert is_deterministic(make_recipe(tmp_path, tmp_path, rollout__deterministic=True), torch.device("cuda"))
    assert not is_deterministic(make_recipe(tmp_path, tmp_path, rollout__deterministic=False), torch.device("cpu"))


def test_an_update_that_has_no_attention_for_its_heads_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any rollout; whoever only decodes needs none."""
    refused: list[tuple[torch.dtype, int]] = []
    monkeypatch.setattr(build, "check_packed_attention", lambda device, dtype, width: refused.append((dtype, width)))
    path = make_policy(tmp_path / "policy")
    for options in ({}, {"model__mixed_precision": "bf16"}):
        recipe = make_recipe(path, tmp_path, **options)
        policy = build_policy(recipe, recipe.model.path, torch.device("cpu"))
        build.make_optimizer(policy, recipe.train, recipe)
    width = policy.config.head_dim
    assert refused == [(torch.float32, width), (torch.bfloat16, width)]


class Node:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


def test_the_garbage_collector_leaves_alone_what_was_there_and_takes_what_comes() -> None:
    old = weakref.ref(Node())
    with long_lived_objects_left_alone():
        new = weakref.ref(Node())
        gc.collect()
        assert new() is None
        assert old() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old() is None
