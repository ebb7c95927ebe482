"""`data.order`: draws that depend on how the samples of each prompt fared."""

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from rollout_cases import make_group
from tiny_run import PPO, assert_same_run, make_recipe, train

from srtrl.build import build_order, load_data, with_num_steps
from srtrl.features.data_order import PromptStatistics, StatisticsOrder, skip_silent
from srtrl.metrics import read_metrics
from srtrl.report.runs import read_run
from srtrl.tasks.base import TaskBase, load_task
from srtrl.tasks.order import DataOrder


def statistics(num_prompts: int, **known: Any) -> PromptStatistics:
    zeros = np.zeros(num_prompts, np.int64)
    given = {"num_visits": zeros, "mean_reward": np.zeros(num_prompts), "num_right": zeros, "num_wrong": zeros}
    return PromptStatistics(**given | known)


def test_an_order_that_reads_no_statistics_is_the_static_one() -> None:
    task = TaskBase.__new__(TaskBase)
    task.train_prompts = [make_group(0, ["correct"]).prompt] * 10
    for name in ("shuffled", "as_is"):
        order = build_order(make_recipe(Path(), Path(), data__order=name), task)
        assert isinstance(order, DataOrder)
        assert ([order.prompt_of(draw) for draw in range(10)] == list(range(10))) == (name == "as_is")
    with pytest.raises(ValueError, match="the task has no training prompts"):
        DataOrder(0, 0)


def test_skip_silent_visits_with_the_probability_of_its_paper() -> None:
    """Each prompt with max(p^z, 0.01), all right and all wrong apart; the seed and the epoch decide which."""
    counts = np.arange(40_000) % 10  # no signal in the last 0 to 9 groups
    half = np.arange(40_000) < 20_000
    right, wrong = np.where(half, counts, 0), np.where(half, 0, counts)
    # of all right 20 steps had more than an twelfth, so that p is 0.3; of all wrong 90 had less than a sixth: 0.95
    shares = {"right_shares": np.array([0.1] * 20 + [0.2, 0.0] * 35), "wrong_shares": np.full(90, 0.1)}
    visited = [*map(int, skip_silent(3, 2, statistics(40_000, num_right=right, num_wrong=wrong, **shares)))]
    assert len(set(visited)) == len(visited)
    for p, group in ((0.3, half), (0.95, ~half)):
        share = Counter(counts[visited][group[visited]].tolist())
        for z in range(10):
            assert share[z] / 2000 == pytest.approx(max(p**z, 0.01), abs=0.035)
    again = statistics(40_000, num_right=right, num_wrong=wrong, **shares)
    assert visited == skip_silent(3, 2, again).tolist()
    assert visited != skip_silent(3, 3, again).tolist()


def test_without_a_prompt_to_visit_all_are_visited() -> None:
    silent = statistics(3, num_right=np.full(3, 99))
    epochs = [skip_silent(0, epoch, silent).tolist() for epoch in range(50)]
    assert [0, 1, 2] in map(sorted, epochs)
    assert all(epochs)


def test_what_is_known_decides_when_a_draw_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guess may be wrong; what was drawn stays, and no epoch has a prompt twice."""
    order = StatisticsOrder("shuffled", 8, 1)

    def left(seed: int, epoch: int, known: PromptStatistics) -> list[int]:
        """Those that were visited least often, the last ones first."""
        return [prompt for prompt in range(7, -1, -1) if known.num_visits[prompt] <= epoch and prompt != 3]

    monkeypatch.setattr(order, "_function", left)
    order.observe([], 0)
    assert [order.prompt_of(draw) for draw in range(9)] == [7, 6, 5, 4, 2, 1, 0, 7, 6]
    order.statistics.num_visits[[5, 1]] = 2
    assert order.prompt_of(2) == 5, "within a step nothing changes"
    order.observe([], 2)
    assert [order.prompt_of(draw) for draw in range(9)] == [7, 6, 4, 2, 0, 7, 6, 4, 2]
    assert order.epochs(2) == {"data/epoch": 2 / 5, "data/left_out": 3 / 8}


def test_the_statistics_are_those_of_the_groups() -> None:
    """The last visit of each prompt, in two epochs: [draw]: outcomes, and rewards if they are not 0 and 1."""
    order = StatisticsOrder("as_is", 5, 0)
    right, wrong = ["correct"] * 2, ["wrong"] * 2
    mixed: list[Any] = ["correct", "wrong"]
    steps: list[list[tuple[Any, ...]]] = [
        [(right,), (wrong,), (mixed,)],
        [(right, (1.0, 0.5)), (["timeout", "error"],), (right,), (wrong, (0.2, 0.2))],
        [(wrong,), (["correct", "timeout"],), (mixed, (0.3, 0.3))],
    ]
    draw = 0
    for step in steps:
        groups = [make_group(draw + index, group[0], rewards=(*group[1:], ())[0]) for index, group in enumerate(step)]
        draw += len(groups)
        for index in range(draw + 3):  # as run-aheads do
            order.prompt_of(index)
        order.observe(groups, draw)
    known = order.statistics
    assert known.num_visits.tolist() == [2, 2, 2, 2, 1]
    assert known.mean_reward.tolist() == pytest.approx([1, 0.2, 0, 1, 0.3])
    assert known.num_right.tolist() == [2, 0, 0, 1, 0]
    assert known.num_wrong.tolist() == [0, 2, 1, 0, 1]
    assert known.right_shares.tolist() == pytest.approx([1 / 3]), "of the one step that began after the first epoch"
    assert known.wrong_shares.tolist() == pytest.approx([2 / 3])
    order.prompt_of(11)
    order.observe([make_group(draw, mixed) for draw in (10, 11)], 12)
    assert known.num_visits.tolist() == [3, 3, 2, 2, 1]
    assert known.num_right.tolist() == [0, 0, 0, 1, 0]
    assert known.num_wrong.tolist() == [0, 0, 1, 0, 1]
    assert known.wrong_shares.tolist() == pytest.approx([2 / 3, 0])


def test_draws_that_other_ranks_have_opened_are_known() -> None:
    """A rank opens some draws of a step alone; here the first ones of the next epoch, too."""
    groups = [make_group(draw, ["wrong"] * 2) for draw in range(6)]
    orders = []
    for opened in ((0, 2, 5), (1, 3)):
        orders.append(order := StatisticsOrder("skip_silent", 4, 0))
        for draw in opened:
            order.prompt_of(draw)
        order.observe(groups, 6)
    first, other = ([order.prompt_of(draw) for draw in range(12)] for order in orders)
    assert first == other


SKIPPING: dict[str, Any] = {
    "task__name": "tiny_run:LuckyTask",
    "task__options__num_train": 8,
    "rewards": [{"name": "correct"}],
    "data__order": "skip_silent",
    "train__num_steps": 6,
    "train__checkpoint_every": 3,
}
"""Many prompts without a signal."""
PARTIAL = {"rollout__mode": "partial", "rollout__min_complete": 0.5, "algorithm__old_logprobs": "recompute"}


def test_a_run_of_partial_is_the_same_after_a_resume(policy: Path, tmp_path: Path) -> None:
    """Prompts without a signal are left out; `test_promises.py` has `on_policy`, and run-aheads, which guess."""
    recipe = make_recipe(policy, tmp_path, **SKIPPING | PARTIAL)
    folder = train(recipe).folder
    rows = read_metrics(folder / "metrics.jsonl")
    assert max(row.get("data/left_out", 0) for row in rows) > 0.2
    copy = make_recipe(policy, tmp_path / "copy", **SKIPPING | PARTIAL)
    shutil.copytree(folder, copy.folder)
    assert_same_run(train(copy, resume=True, from_step=3).folder, folder)


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
    train = with_num_steps(recipe, load_data(recipe)[2]).train
    assert (train.num_steps, train.num_passes) == (num_steps, None)


def test_a_run_of_passes_is_one_of_as_many_steps(
    policy: Path, finished: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = Mock(wraps=load_task)
    monkeypatch.setattr("srtrl.build.load_task", load)
    changes = {"name": "passes", "train__num_steps": None, "train__num_passes": 1.5}
    recipe = make_recipe(policy, tmp_path, **changes)
    folder = train(recipe).folder
    load.assert_called_once()
    assert_same_run(folder, finished())
    assert read_run(folder).recipe.train.num_steps == 4
    assert train(recipe, resume=True, from_step=2).num_steps == 4
    late = make_recipe(policy, tmp_path, **changes | {"name": "late"}, **PPO | {"critic__warmup_steps": 4})
    with pytest.raises(ValueError, match=r"critic\.warmup_steps: expected fewer than train\.num_steps \(4\)"):
        train(late)
