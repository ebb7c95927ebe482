"""Several tasks in one run."""

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from rank_cases import FORKED
from rank_runs import assert_close_runs, train_on_ranks
from tiny_run import assert_same_run, make_policy, make_recipe, train

from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.tasks.base import check_task
from srtrl.tasks.mixture import MixedOrder, shares

OPTIONS = {"num_train": 10, "num_eval": 6, "max_operations": 2}
EASY: dict[str, Any] = {"name": "arithmetic", "label": "easy", "weight": 2, "options": OPTIONS}
LUCKY: dict[str, Any] = {
    "name": "tiny_run:LuckyTask",
    "weight": 1,
    "options": OPTIONS | {"num_train": 7, "seed": 3},
    "rewards": [{"name": "correct", "options": {"incorrect": -1.0}}],
}
SIZES = (10, 7, 3)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [((2, 1), [2, 1]), ((0.3, 0.6), [1, 2]), ((1, 1), [1, 1]), ((0.5, 0.25, 0.25), [2, 1, 1]), ((7, 1, 5), [7, 1, 5])],
)
def test_every_window_has_its_exact_quotas_and_every_epoch_all_prompts(
    weights: tuple[float, ...], expected: list[int]
) -> None:
    assert shares(weights) == expected
    sizes, cycle = SIZES[: len(weights)], sum(expected)
    order = MixedOrder(sizes, weights, "abc"[: len(weights)], seed=5)
    tasks = [order.task_of(draw) for draw in range(400)]
    for start in range(400 - cycle):
        assert [tasks[start : start + cycle].count(task) for task in range(len(weights))] == expected
    counts = Counter[int]()
    for task in tasks:  # the rule, written out
        assert task == min(range(len(weights)), key=lambda it: (counts[it] + 1) / expected[it])
        counts[task] += 1
    assert order.counts(400) == [counts[task] for task in range(len(weights))]
    drawn = [order.prompt_of(draw) for draw in range(400)]
    starts = [sum(sizes[:task]) for task in range(len(weights))]
    for task, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = [prompt for prompt, its_task in zip(drawn, tasks, strict=True) if its_task == task]
        epochs = [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(start, start + size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1 or len(epochs) < 2
    later = MixedOrder(sizes, weights, "abc"[: len(weights)], seed=5)  # that of a run which resumes
    assert [later.prompt_of(draw) for draw in reversed(range(400))] == drawn[::-1]


def test_a_list_of_one_task_is_that_task(tmp_path: Path) -> None:
    task = {"name": "arithmetic", "options": OPTIONS}
    plain = make_recipe(tmp_path, tmp_path, task=task)
    assert make_recipe(tmp_path, tmp_path, task=[task | {"weight": 3}]) == plain
    rewards = [{"name": "correct", "weight": 2.0}]
    assert make_recipe(tmp_path, tmp_path, task=[task | {"rewards": rewards}]) == make_recipe(
        tmp_path, tmp_path, task=task, rewards=rewards
    )


@FORKED
def test_two_ranks_draw_and_grade_what_one_does(tmp_path: Path) -> None:
    changes: dict[str, Any] = {"train__num_steps": 2, "rewards": [{"name": "rank_runs:weight"}]}
    several = mixture(tmp_path, name="several", **changes)
    assert [process.exitcode for process in train_on_ranks(several, 2)] == [0, 0]
    one = train(mixture(tmp_path, name="one", **changes)).folder
    assert_close_runs(several.folder, one, tolerance=1e-3)


def mixture(tmp_path: Path, **changes: Any) -> Recipe:
    """A run of both tasks, whose policy is there once."""
    policy = tmp_path / "policy"
    if not policy.exists():
        make_policy(policy)
    return make_recipe(policy, tmp_path / "runs", task=[EASY, LUCKY], **changes)


@pytest.mark.parametrize("mode", [{}, {"rollout__mode": "partial", "algorithm__old_logprobs": "recompute"}])
def test_a_resumed_run_is_the_same_and_each_sample_has_its_tasks_rewards(tmp_path: Path, mode: dict[str, Any]) -> None:
    folder = train(mixture(tmp_path, name="whole", **mode)).folder
    first = mixture(tmp_path, name="resumed", **mode)
    train(first)
    resumed = train(first, resume=True, from_step=2).folder
    assert_same_run(resumed, folder)
    before, *steps = read_metrics(folder / "metrics.jsonl")
    for label in ("easy", "LuckyTask"):
        assert {f"eval/accuracy/{label}", f"eval/reward/{label}"} <= set(before)
    if mode:
        return
    assert [(row["data/epoch/easy"], row["data/epoch/LuckyTask"]) for row in steps] == [
        (0, 0),
        (3 / 10, 1 / 7),
        (6 / 10, 2 / 7),
        (8 / 10, 4 / 7),
    ]
    for row, path in zip(steps, sorted((folder / "rollouts").glob("*.parquet")), strict=True):
        samples = pq.read_table(path).to_pylist()
        for label, mean in (("easy", row["reward/mean/easy"]), ("LuckyTask", row["reward/mean/LuckyTask"])):
            own = [sample for sample in samples if sample["prompt_id"].startswith(f"{label}/")]
            assert mean == pytest.approx(sum(sample["reward"] for sample in own) / len(own))
            assert row[f"data/draws/{label}"] == len(own) / 4
            for sample in own:
                value = 1.0 if sample["outcome"] == "correct" else -1.0
                is_lucky = label == "LuckyTask"
                assert sample["reward"] == (
                    value if is_lucky else sample["reward_digits"] + sample["reward_correct"] / 2
                )
                assert (sample["reward_digits"] is None) == is_lucky


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([EASY, EASY], "two tasks are labelled `easy`"),
        ([EASY, LUCKY | {"weight": 0}], "greater than 0"),
        ([EASY, LUCKY | {"weight": 1.000001}], "repeat after 3,000,001 draws"),
        ([EASY, {"name": "mixture", "options": {"tasks": [EASY]}}], "no mixture inside"),
        ([EASY, LUCKY | {"rewards": []}], "at least 1 item"),
        ([EASY, LUCKY | {"rewards": [{"name": "corect"}]}], r"tasks.1.rewards.0: `corect` is not in"),
        ([EASY, LUCKY | {"options": {"num_trian": 2}}], r"tasks.1.options.num_trian: unknown key"),
        ([EASY, {"name": "prompts", "options": {"train": {"files": ["a"]}}}], "tasks.1: the task prompts has no verif"),
    ],
)
def test_mistakes_are_one_line(tmp_path: Path, tasks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        check_task(make_recipe(tmp_path, tmp_path, task=tasks))
    assert "\n" not in str(caught.value)
