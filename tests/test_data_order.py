"""`data.order` and `train.num_passes`: which prompt is drawn when, and how many steps that takes."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_run import PPO, assert_same_run, make_recipe, train

from srtrl.build import with_num_steps
from srtrl.report.runs import read_run
from srtrl.tasks.order import DataOrder
from srtrl.trainer.credit import CreditAssigner
from srtrl.trainer.sampling import Sampler


def test_the_sampler_draws_in_the_order_of_the_recipe() -> None:
    task: Any = SimpleNamespace(order=lambda *seeds, **options: DataOrder(10, *seeds, **options))
    for name in ("shuffled", "as_is"):
        recipe = make_recipe(Path(), Path(), data__order=name)
        context: Any = SimpleNamespace(recipe=recipe, end_ids=(0,))
        order = Sampler(context, task, CreditAssigner(recipe)).order
        drawn = [order.prompt_of(draw) for draw in range(10)]
        assert (drawn == list(range(10))) == (name == "as_is")
        assert order.epochs(15) == {"data/epoch": 1.5}


@pytest.mark.parametrize(
    ("num_passes", "num_prompts", "num_steps"),
    [(1, 4, 3), (1.2, 4, 3), (1.3, 4, 4), (2, 4, 5), (0.1, 1, 1), (0.3, 1, 3)],
)
def test_passes_are_counted_into_steps(
    num_passes: float, num_prompts: int, num_steps: int, policy: Path, tmp_path: Path
) -> None:
    """There are ten prompts."""
    changes = {"train__num_steps": None, "rollout__num_prompts": num_prompts, "train__num_passes": num_passes}
    changes |= {"train__mini_batch_prompts": None}
    recipe = make_recipe(policy, tmp_path, **changes)
    train = with_num_steps(recipe).train
    assert (train.num_steps, train.num_passes) == (num_steps, None)


def test_a_run_of_passes_is_one_of_as_many_steps(policy: Path, tmp_path: Path) -> None:
    changes = {"name": "passes", "train__num_steps": None, "train__num_passes": 1.5}
    recipe = make_recipe(policy, tmp_path, **changes)
    folder = train(recipe).folder
    assert_same_run(folder, train(make_recipe(policy, tmp_path)).folder)
    assert read_run(folder).recipe.train.num_steps == 4
    assert train(recipe, resume=True, from_step=2).num_steps == 4
    late = make_recipe(policy, tmp_path, **changes | {"name": "late"}, **PPO | {"critic__warmup_steps": 4})
    with pytest.raises(ValueError, match=r"critic\.warmup_steps: expected fewer than train\.num_steps \(4\)"):
        train(late)
