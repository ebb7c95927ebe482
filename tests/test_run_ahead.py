"""Which samples run ahead, in which order, in how many rows, and when; `test_scheduler.py` has slots and pages."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine_cases import options, requests_for, tiny_policy
from environment_cases import PROMPTS, TOKENIZER, Digits, collector_of, grader_of, section_of
from tiny_run import make_recipe

from srtrl import build, ranks
from srtrl.drafters.none import Drafter as NoDrafter
from srtrl.drafters.srt import Drafter as SrtDrafter
from srtrl.engine.batch import Batch
from srtrl.engine.draft_budget import MAX_ROWS, StepCost
from srtrl.engine.engine import Engine
from srtrl.engine.page_pool import PagePool
from srtrl.environments.base import Step, Turn
from srtrl.environments.turns import EnvironmentTurns
from srtrl.features.run_ahead import RunAhead
from srtrl.rollout.collect import FixedDraws, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.one_turn import OneTurn
from srtrl.tasks.grading import Grader
from srtrl.tasks.order import DataOrder
from srtrl.tasks.reward_input import RewardInput
from srtrl.trainer.credit import CreditAssigner
from srtrl.trainer.sampling import RolloutContext, Sampler
from srtrl.types import Request

NUM_STEPS = 6
IS_OVER = threading.Event()
"""A judge and a tool answer when it is set: after `NUM_STEPS` decode steps of run-aheads alone."""


async def judge(sample: RewardInput) -> float:
    assert await asyncio.to_thread(IS_OVER.wait, 60)
    return sample.num_tokens / 2


class SlowDigits(Digits):
    """As `Digits`, when it is over."""

    async def step(self, turn: Turn) -> Step:  # type: ignore[override]
        assert await asyncio.to_thread(IS_OVER.wait, 60)
        return super().step(turn)


class CountingEngine(Engine):
    """Counts the steps of run-aheads alone."""

    num_alone = 0

    def step_run_aheads(self) -> bool:
        has_stepped = super().step_run_aheads()
        self.num_alone += has_stepped
        if self.num_alone == NUM_STEPS:
            IS_OVER.set()
        return has_stepped


def new_run_ahead(cost: StepCost | None = None, max_slowdown: float = 0.03) -> RunAhead:
    return RunAhead(Batch(4, 64, PagePool(100, 4), 0), cost or StepCost(), NoDrafter(), max_slowdown=max_slowdown)


def test_run_aheads_have_the_rows_that_are_nearly_free() -> None:
    dear, level = ((1, 1.0), (1000, 1000.0)), ((1, 1.0), (10, 1.0), (100, 3.7))
    cases: list[tuple[tuple[tuple[int, float], ...], float, int]] = [
        (dear, 0.03, 0),  # a row as dear as a token
        (((8, 1.0), (16, 2.0), (1000, 125.0)), 0.03, 4),  # a bucket's padding
        (dear, 16.0, 64),
        (level, 0.03, 7),
        (level, 0.5, 22),
    ]
    for points, slowdown, rows in cases:
        run_ahead = new_run_ahead(StepCost(points=points), slowdown)
        assert run_ahead.max_rows(4, is_alone=False) == rows
        assert run_ahead.max_rows(0, is_alone=False) == 0, "no step yet"
        assert run_ahead.max_rows(4, is_alone=True) == MAX_ROWS
    assert new_run_ahead(StepCost(range(8, 2056, 8))).max_rows(4, is_alone=False) == 0, "no cost yet"


def test_each_draw_runs_ahead_once_in_a_rollout() -> None:
    run_ahead = new_run_ahead()
    chosen = [list(run_ahead.choose(range(*draws))) for draws in ((4, 8), (5, 9), (5, 7), (9, 10))]
    assert chosen == [[4, 5, 6, 7], [8], [], [9]]
    run_ahead.clear()
    assert list(run_ahead.choose(range(5, 9))) == [5, 6, 7, 8]


def queued(run_ahead: RunAhead) -> list[Request]:
    return list(run_ahead._line.values())


def test_run_aheads_wait_breadth_first_end_after_a_turn_and_each_rank_begins_with_others() -> None:
    requests = [replace(one, has_turns=True) for one in requests_for(((1,), (2,)), num_samples=2)]
    first = [requests[number] for number in (0, 2, 1, 3)]
    for rank, order in ((0, [0, 2, 1, 3]), (1, [1, 3, 0, 2])):
        with ranks.use(rank, 2):
            run_ahead = new_run_ahead()
            run_ahead.add(requests)
        assert queued(run_ahead) == [replace(first[number], has_turns=False) for number in order]
    run_ahead = new_run_ahead()
    run_ahead.add(requests)
    assert [one.rng_key for one in queued(run_ahead)] == [one.rng_key for one in first]
    assert run_ahead.cancel(first[0].rng_key) == {}
    assert len(queued(run_ahead)) == 3
    with pytest.raises(AssertionError, match="two run-aheads have the same RNG key"):
        run_ahead.add(requests)


@pytest.mark.parametrize(
    ("name", "value", "runs_ahead"),
    [
        ("draft_budget", 8, True),
        ("draft_budget", 0, False),
        ("drafter", "none", False),
        ("run_ahead_max_slowdown", None, False),
    ],
)
def test_there_are_run_aheads_where_drafts_come_from_them_and_they_are_allowed(
    name: str, value: object, runs_ahead: bool, tmp_path: Path
) -> None:
    recipe = make_recipe(Path("none"), tmp_path, **{f"rollout__{name}": value})
    run_ahead = build.build_run_ahead(recipe, build.build_drafter(recipe))
    assert isinstance(run_ahead, partial) == runs_ahead


@contextmanager
def graders_and_turns(waits_for: str) -> Iterator[tuple[Grader, OneTurn]]:
    grader = grader_of("environment" if waits_for == "tool" else f"{__name__}:judge")
    turns = OneTurn(TOKENIZER)
    if waits_for == "tool":
        turns = EnvironmentTurns(section_of(SlowDigits, max_turns=4), TOKENIZER)
    with grader, turns:
        yield grader, turns


def roll_out(waits_for: str, *, runs_ahead: bool) -> tuple[dict[str, float], int]:
    """The metrics of the second of two steps, and the steps of run-aheads alone."""
    IS_OVER.clear() if runs_ahead else IS_OVER.set()
    run_ahead = partial(RunAhead, max_slowdown=0.0) if runs_ahead else None
    sizes = options(max_sequence_tokens=128, slots=12)
    engine = CountingEngine(
        tiny_policy(vocab_size=290), sizes, tokenizer=TOKENIZER, drafter=SrtDrafter(), run_ahead=run_ahead
    )
    draws, metrics = list(enumerate(PROMPTS)), {}
    with graders_and_turns(waits_for) as (grader, turns):
        for first in (0, 3):
            collector = collector_of(grader, turns, 60, num_samples=2)
            engine.add_run_aheads(collector.requests(draws[first + 3 : first + 6]))
            chosen: Any = FixedDraws(draws[first : first + 3])
            if waits_for == "judge of a group":
                limits: Any = {"first_draw": first, "num_prompts": 3, "max_draws": 3}
                chosen = DrawsUntilFull(PROMPTS.__getitem__, **limits, keeps=lambda _: True)
            collect_rollouts(engine, collector, chosen)
            assert engine.pool.num_used == 0
            metrics = engine.take_metrics() | collector.ranks.take_metrics()
            engine.end_step(has_new_weights=True)
    return metrics, engine.num_alone


@pytest.mark.parametrize("waits_for", ["judge", "judge of a group", "tool"])
def test_run_aheads_go_on_while_graders_and_tools_work(waits_for: str) -> None:
    """With `roll_out`; that nothing else changes is in `test_promises.py`."""
    metrics, num_alone = roll_out(waits_for, runs_ahead=True)
    assert num_alone >= NUM_STEPS
    assert metrics["engine/text_tokens_repeated"] > NUM_STEPS
    without, _ = roll_out(waits_for, runs_ahead=False)
    assert metrics["engine/tokens"] == without["engine/tokens"]
    assert metrics["engine/decode_steps"] <= without["engine/decode_steps"], "steps of run-aheads alone do not count"


def test_draws_of_the_next_step_run_ahead_and_none_after_the_last(tmp_path: Path) -> None:
    announced: list[Any] = []
    engine: Any = SimpleNamespace(run_ahead=new_run_ahead(), add_run_aheads=announced.append)
    collector: Any = SimpleNamespace(requests=lambda draws: [draw for draw, _ in draws])
    recipe = make_recipe(Path(), tmp_path, train__num_steps=2)
    context: Any = SimpleNamespace(recipe=recipe, engine=engine, end_ids=(0,), started=lambda prompt: prompt)
    task: Any = SimpleNamespace(train_prompts=PROMPTS)
    sampler = Sampler(context, task, CreditAssigner(recipe), DataOrder(len(PROMPTS), recipe.seed))
    sampler.announce(1, range(4), collector)
    sampler.announce(1, range(4, 6), collector)  # as dynamic sampling does
    engine.run_ahead.clear()
    sampler.num_draws = 6
    sampler.announce(2, range(6, 8), collector)
    sampler.announce(2, range(8, 10), collector)
    assert announced == [[4, 5, 6, 7], [8, 9], [8, 9]]


@pytest.mark.parametrize(
    ("device", "computing", "runs_ahead"),
    [("cpu", "", True), ("cpu", "grader", False), ("cpu", "turns", False), ("cuda", "grader", True)],
)
def test_on_a_cpu_waits_are_left_to_graders_and_tools_that_compute(
    device: str, computing: str, runs_ahead: bool
) -> None:
    with graders_and_turns("judge") as (grader, _), graders_and_turns("tool") as (_, turns):
        assert not grader.computes_here
        assert not turns.computes_here
    parts: dict[str, Any] = {name: SimpleNamespace(computes_here=name == computing) for name in ("grader", "turns")}
    engine = SimpleNamespace(runner=SimpleNamespace(model=SimpleNamespace(device=torch.device(device))))
    engine.policy_version = 0
    recipe: Any = SimpleNamespace(seed=0)
    context = RolloutContext(recipe=recipe, engine=cast(Engine, engine), tokenizer=TOKENIZER, end_ids=(0,), **parts)
    unused: Any = None
    assert context.collector("train", 1, unused, unused, unused).runs_ahead == runs_ahead
