"""Several tasks in one run."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from task_cases import to_grade
from tiny_run import EASY, LUCKY, make_recipe

from srtrl.build import build_tokenizer
from srtrl.metrics import read_metrics
from srtrl.tasks.base import load_task
from srtrl.tasks.grading import Grader
from srtrl.tasks.mixture import MixedOrder
from srtrl.tasks.order import DataOrder
from srtrl.tasks.reward_input import RewardInput, batched, isolated

SIZES = (10, 7, 3)


def mixed_order(weights: tuple[float, ...], *, is_shuffled: bool = True) -> MixedOrder:
    orders = [DataOrder(size, 5, index, is_shuffled=is_shuffled) for index, size in enumerate(SIZES[: len(weights)])]
    return MixedOrder(orders, weights, "abc"[: len(weights)])


@pytest.mark.parametrize(
    ("weights", "shares"),
    [((2, 1), (2, 1)), ((0.3, 0.6), (1, 2)), ((1, 1), (1, 1)), ((0.5, 0.25, 0.25), (2, 1, 1)), ((7, 1, 5), (7, 1, 5))],
)
def test_every_window_has_its_exact_quotas_and_every_epoch_all_prompts(
    weights: tuple[float, ...], shares: tuple[int, ...]
) -> None:
    sizes, cycle = SIZES[: len(weights)], sum(shares)
    order = mixed_order(weights)
    tasks = [order.place_of(draw)[0] for draw in range(400)]
    for start in range(400 - cycle):
        assert tuple(tasks[start : start + cycle].count(task) for task in range(len(weights))) == shares
    drawn = [order.prompt_of(draw) for draw in range(400)]
    starts = [sum(sizes[:task]) for task in range(len(weights))]
    for task, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        own = [prompt for prompt, its_task in zip(drawn, tasks, strict=True) if its_task == task]
        assert order.epochs(400)[f"data/epoch/{'abc'[task]}"] == len(own) / size
        epochs = [own[first : first + size] for first in range(0, len(own) - size + 1, size)]
        assert all(sorted(epoch) == list(range(start, start + size)) for epoch in epochs)
        assert len(set(map(tuple, epochs))) > 1 or len(epochs) < 2
    as_is = mixed_order(weights, is_shuffled=False)
    first = [as_is.prompt_of(draw) for draw, task in enumerate(tasks[:20]) if task == 0]
    assert first == [number % sizes[0] for number in range(len(first))]
    later = mixed_order(weights)  # that of a run which resumes
    assert [later.prompt_of(draw) for draw in reversed(range(400))] == drawn[::-1]


def test_weights_that_fit_no_short_cycle_are_met_as_near_as_one_draw() -> None:
    order = mixed_order((1, 0.1, 3.14159))
    tasks = [order.place_of(draw)[0] for draw in range(5000)]
    for task, weight in enumerate((1, 0.1, 3.14159)):
        for num in range(1, 5000, 7):
            assert abs(tasks[:num].count(task) - num * weight / 4.24159) < 1.5


def test_a_list_of_one_task_is_that_task(policy: Path, tmp_path: Path) -> None:
    task, rewards = {"name": "arithmetic", "options": EASY["options"]}, [{"name": "correct", "weight": 2.0}]
    plain = make_recipe(policy, tmp_path, task=task, rewards=rewards)
    assert make_recipe(policy, tmp_path, task=[task | {"weight": 3, "rewards": rewards}]) == plain


def test_tasks_of_one_size_are_shuffled_apart_and_may_be_as_they_are(policy: Path, tmp_path: Path) -> None:
    recipe = make_recipe(policy, tmp_path, task=[EASY | {"weight": 1}, EASY | {"weight": 1, "label": "other"}])
    task = load_task(recipe, build_tokenizer(recipe))
    shuffled, as_is = (task.order(7, is_shuffled=is_shuffled) for is_shuffled in (True, False))
    first, second = ([shuffled.prompt_of(draw) % 10 for draw in range(start, 20, 2)] for start in (0, 1))
    assert first != second
    assert sorted(first) == sorted(second) == list(range(10))
    assert [as_is.prompt_of(draw) for draw in range(20)] == [draw // 2 + draw % 2 * 10 for draw in range(20)]


@isolated
def apart(sample: RewardInput) -> float:
    return sample.num_tokens


@isolated
def halved(sample: RewardInput) -> float:
    return sample.num_tokens / 2


async def awaited(sample: RewardInput) -> float:
    return -sample.num_tokens


@batched
def in_batch(samples: Sequence[RewardInput]) -> list[float]:
    return [len(samples) + sample.num_tokens / 100 for sample in samples]


def test_rewards_of_every_kind_see_the_samples_of_their_task_alone(policy: Path, tmp_path: Path) -> None:
    """In a worker process, in the event loop, and all samples at once; grades come in the order of the samples."""
    easy = EASY | {"rewards": [{"name": "test_mixture:apart"}, {"name": "test_mixture:in_batch"}]}
    names = ("halved", "awaited", "in_batch")
    lucky = LUCKY | {"rewards": [{"name": f"test_mixture:{name}"} for name in names]}
    recipe = make_recipe(policy, tmp_path, task=[easy, lucky])
    task = load_task(recipe, build_tokenizer(recipe))
    with Grader(task, recipe.rewards, recipe.grading) as grader:
        grader.try_rewards(task.train_prompts, 1, 12)
        prompts = [task.train_prompts[index] for index in (0, 10, 1, 2, 12)]
        tickets = [grader.submit(to_grade(prompt, "1", "stop", number)) for number, prompt in enumerate(prompts)]
        rewards = [grade.reward for grade in grader.collect(tickets)]
    assert rewards == pytest.approx([0 + 3, 0.5 - 1 + 2.01, 2 + 3.02, 3 + 3.03, 2 - 4 + 2.04])


def test_each_sample_has_its_tasks_rewards(finished: Callable[..., Path]) -> None:
    folder = finished(task=[EASY, LUCKY])
    before, *steps = read_metrics(folder / "metrics.jsonl")
    for label in ("easy", "LuckyTask"):
        assert {f"eval/accuracy/{label}", f"eval/reward/{label}"} <= set(before)
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
            assert row[f"groups/kept/{label}"] == len(own) / 4
            for sample in own:
                value = 1.0 if sample["outcome"] == "correct" else -1.0
                is_lucky = label == "LuckyTask"
                assert sample["reward"] == (
                    value if is_lucky else sample["reward_digits"] + sample["reward_correct"] / 2
                )
                assert (sample["reward_digits"] is None) == is_lucky
