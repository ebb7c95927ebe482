"""A tiny DAPO run: its batches are full, and what is learned depends on no timing, no slot, no draft and no kill."""

import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from test_resume import die, finish, start
from tiny_run import assert_same_run, make_recipe

from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.engine import Engine
from srtrl.metrics import read_metrics
from srtrl.recipe.schema import Recipe
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.run.checkpoint import latest_checkpoint, read_state
from srtrl.run.metrics import describe_step
from srtrl.tasks import arithmetic
from srtrl.trainer import sampling
from srtrl.trainer.trainer import run_training
from srtrl.types import Request, RolloutGroup

NUM_PROMPTS = 4
NUM_STEPS = 4


PAGE_GIB = 2 * 2 * 16 * 16 * 4 / 2**30
"""Memory of a page of the policy's KV: keys and values, layers, tokens, numbers of a token, bytes."""
SETTINGS: dict[str, dict[str, Any]] = {
    "srt": {},
    "every run-ahead": {"rollout__draft_budget": 8, "rollout__run_ahead_max_slowdown": 1e9, "rollout__slots": 40},
    "no run-ahead": {"rollout__run_ahead_max_slowdown": None, "rollout__draft_budget": 8, "rollout__slots": 13},
    "few slots": {"rollout__slots": 3},
    "few pages": {"rollout__slots": 16, "rollout__kv_memory_gib": 5 * PAGE_GIB},
    "no drafts": {"rollout__drafter": "none", "rollout__slots": 64},
}


def is_lucky(text: str, answer: str) -> bool:
    """A verdict by hash: of the answers in seven, two accept nothing, one all, and the others every second text."""
    match int(answer) % 7:
        case 0 | 1:
            return False
        case 2:
            return True
        case _:
            return zlib.crc32(text.encode()) % 2 == 0


class Task(arithmetic.Task):
    """Problems of arithmetic, judged by `is_lucky`."""

    verifier = staticmethod(is_lucky)


def make_dapo_recipe(policy: Path, output_dir: Path, **changes: Any) -> Recipe:
    """`make_recipe` with DAPO's four parts and no KL; the rewards draw no random numbers."""
    values: dict[str, Any] = {
        "task__name": "test_dapo:Task",
        "rewards": [{"name": "correct"}, {"name": "overlong_penalty", "options": {"cache_tokens": 4}}],
        "rollout__dynamic_sampling": True,
        "rollout__stop_strings": list("aeiouxyz012345"),
        "algorithm": {
            "reduction": "token_mean",
            "clip_high": 0.28,
            "filters": ["drop_all_right_or_wrong"],
            "overlong_filtering": True,
        },
    }
    return make_recipe(policy, output_dir, **(values | changes))


@pytest.fixture(scope="module")
def plain(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_training(make_dapo_recipe(policy, tmp_path_factory.mktemp("plain"), rollout__drafter="none")).folder


def test_each_batch_is_the_shortest_prefix_that_fills_it(plain: Path) -> None:
    rows = [row for row in read_metrics(plain / "metrics.jsonl") if row["step"] > 0]
    next_draw = 0
    for row in rows:
        table = pq.read_table(plain / "rollouts" / f"step_{row['step']:06.0f}.parquet").to_pylist()
        correct: dict[int, list[bool]] = {}
        for sample in table:
            correct.setdefault(sample["draw_index"], []).append(sample["outcome"] == "correct")
        mixed = [any(group) and not all(group) for group in correct.values()]
        assert list(correct) == list(range(next_draw, next_draw + len(mixed)))  # all draws, in data order
        assert sum(mixed) == NUM_PROMPTS
        assert mixed[-1]
        for sample in table:
            group = correct[sample["draw_index"]]
            is_learned = any(group) and not all(group) and sample["finish_reason"] == "stop"  # overlong filtering
            assert (sample["advantage"] is not None) == is_learned
        assert row["data/draws"] == len(mixed)
        assert (f"  4 of {len(mixed)} groups kept" in describe_step(row)) == (len(mixed) > 4)
        assert (row["groups/kept"], row["groups/dropped"], row["groups/short"]) == (4, len(mixed) - 4, 0)
        assert row["groups/all_right"] == sum(map(all, correct.values()))
        assert row["groups/all_right"] + row["groups/all_wrong"] == row["groups/dropped"]
        assert row["accuracy"] == pytest.approx(sum(map(sum, correct.values())) / len(table))  # before the filters
        assert row["data/epoch"] == pytest.approx(next_draw / 10)
        assert row["grad_norm"] > 0
        next_draw += len(mixed)
    assert len(rows) == NUM_STEPS
    checkpoint = latest_checkpoint(plain / "checkpoints")
    assert checkpoint is not None
    assert read_state(checkpoint).num_draws == next_draw
    assert {row["groups/dropped"] for row in rows} != {0}
    assert sum(row["groups/all_right"] for row in rows) > 0
    assert sum(row["samples/overlong_dropped"] for row in rows) > 0


@pytest.mark.parametrize("name", SETTINGS)
def test_timing_changes_nothing_that_is_learned(
    name: str, policy: Path, plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests: list[Request] = []
    add = Engine.add

    def recording_add(engine: Engine, request: Request) -> None:
        requests.append(request)
        add(engine, request)

    monkeypatch.setattr(Engine, "add", recording_add)
    folder = run_training(make_dapo_recipe(policy, tmp_path, **SETTINGS[name])).folder
    assert_same_run(folder, plain)
    assert_no_rng_key_is_learned_from_twice(requests)
    if SETTINGS[name].get("rollout__drafter") != "none":
        assert_dropped_groups_feed_the_drafter(folder)
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    if name == "every run-ahead":
        assert sum(row["engine/run_ahead_followed"] for row in rows) > 0
        ahead = {one.rng_key for one in requests if one.is_run_ahead}
        met = ahead & {one.rng_key for one in requests if not one.is_run_ahead}
        assert len(met) > len(ahead) / 2  # all but those of the last step's prompts ahead
    if name == "few pages":
        assert sum(row["engine/preemptions"] for row in rows) > 0


def assert_no_rng_key_is_learned_from_twice(requests: list[Request]) -> None:
    """What a run-ahead decodes is a later sample on that sample's key, or never learned from."""
    samples = [request for request in requests if request.purpose == "train" and not request.is_run_ahead]
    learned_from = {request.rng_key: (request.draw_index, request.sample_index) for request in samples}
    assert len(learned_from) == len(samples) == len(set(learned_from.values())) > 3 * NUM_PROMPTS * 4
    assert learned_from.keys().isdisjoint(one.rng_key for one in requests if one.purpose == "eval")
    met = [request for request in requests if request.is_run_ahead and request.rng_key in learned_from]
    assert all(learned_from[one.rng_key] == (one.draw_index, one.sample_index) for one in met)


def assert_dropped_groups_feed_the_drafter(folder: Path) -> None:
    """They are in the rollout cache of the last checkpoint."""
    checkpoint = latest_checkpoint(folder / "checkpoints")
    assert checkpoint is not None
    drafter = SrtDrafter()
    drafter.load(checkpoint)
    rows = pq.read_table(folder / "rollouts" / f"step_{NUM_STEPS:06d}.parquet").to_pylist()
    dropped = [row for row in rows if row["advantage"] is None]
    assert dropped
    for row in dropped:
        kept = drafter.cache("train").rollouts(tuple(row["prompt_token_ids"]))
        assert row["token_ids"] in [one.tolist() for one in kept]


def test_where_max_draws_do_not_suffice_the_step_says_so_and_goes_on(policy: Path, tmp_path: Path) -> None:
    recipe = make_dapo_recipe(policy, tmp_path, rollout__max_draws=5, train__num_steps=3)
    folder = run_training(recipe).folder
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if row["step"] > 0]
    assert any(row["groups/short"] > 0 for row in rows)
    for row in rows:
        assert row["groups/kept"] == NUM_PROMPTS - row["groups/short"]
        if row["groups/short"]:
            assert row["data/draws"] == 5
            assert f"{row['groups/short']:.0f} groups too few: rollout.max_draws reached" in describe_step(row)
        if row["groups/kept"]:
            assert row["grad_norm"] > 0


def kill_in_dynamic_sampling() -> None:
    """In step 3, when more groups have been decided than the batch has: some were replaced, others are open."""
    num_steps = 0

    class Killing(DrawsUntilFull):
        def __init__(self, *arguments: Any, keeps: Callable[[RolloutGroup], bool], **options: Any) -> None:
            nonlocal num_steps
            num_steps += 1
            step, num_decided = num_steps, 0

            def counting_keeps(group: RolloutGroup) -> bool:
                nonlocal num_decided
                num_decided += 1
                if step == 3 and num_decided == NUM_PROMPTS + 2:
                    die()
                return keeps(group)

            super().__init__(*arguments, keeps=counting_keeps, **options)

    setattr(sampling, "DrawsUntilFull", Killing)  # noqa: B010


def test_killed_in_the_middle_of_dynamic_sampling_and_resumed(policy: Path, plain: Path, tmp_path: Path) -> None:
    recipe = make_dapo_recipe(policy, tmp_path, rollout__drafter="none")
    assert finish(start(recipe, prepare=kill_in_dynamic_sampling)) == -signal.SIGKILL
    checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    assert checkpoint is not None
    assert checkpoint.name == "step_000002"
    other = make_dapo_recipe(policy, tmp_path, rollout__drafter="none", rollout__slots=7)  # may be changed
    assert finish(start(other, resume=True)) == 0
    assert_same_run(tmp_path / "run", plain)
