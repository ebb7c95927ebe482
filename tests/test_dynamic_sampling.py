"""Dynamic sampling opens exactly the shortest prefix of the draws that fills the batch, whatever finishes first."""

import random
from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rollout_cases import SAMPLING, FakeEngine, FakeGrader, make_collector, prompt_of

from srtrl.engine.engine import Engine
from srtrl.rollout.collect import StageTimer
from srtrl.rollout.dynamic_sampling import sample_until_full
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.types import Request, RolloutGroup

NUM_SAMPLES = 2
FIRST_DRAW = 5
SMALL = {"num_prompts": 2, "max_open_prompts": 2, "max_draws": 2}


class Case:
    """One batch over fakes; `pattern` says which draws the filters keep, from FIRST_DRAW on."""

    def __init__(self, pattern: Sequence[bool], limits: dict[str, int], seed: int) -> None:
        self.pattern = pattern
        self.limits = limits
        self.engine = FakeEngine(seed)
        self.grader = FakeGrader(
            lambda prompt, _: float(pattern[int(prompt.prompt_id) - FIRST_DRAW]), random.Random(seed + 1)
        )
        self.undecided: set[int] = set()
        self.most_open = 0
        self.seen_ahead: list[int] = []

    def opened(self, draws: range) -> list[Request]:
        """Called as draws are opened, like a run-ahead: what is open now?"""
        self.undecided |= set(draws)
        self.most_open = max(self.most_open, len(self.undecided))
        coming = [(draws.stop, prompt_of(draws.stop))]
        self.seen_ahead.append(draws.stop)
        return run_ahead_requests(coming, num_samples=NUM_SAMPLES, sampling=SAMPLING, seed=11)

    def keeps(self, group: RolloutGroup) -> bool:
        self.undecided.remove(group.draw_index)
        return group.rollouts[0].grade.reward > 0

    def run(self, timer: StageTimer | None = None) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        collector = make_collector(self.grader, timer=timer or StageTimer())
        return sample_until_full(
            cast(Engine, self.engine),
            collector,
            prompt_of,
            first_draw=FIRST_DRAW,
            **self.limits,
            keeps=self.keeps,
            run_ahead=self.opened,
        )


def shortest_prefix(pattern: Sequence[bool], limits: dict[str, int]) -> list[bool]:
    """The definition, without any engine: go through the draws one by one until the batch is full."""
    prefix: list[bool] = []
    while sum(prefix) < limits["num_prompts"] and len(prefix) < limits["max_draws"]:
        prefix.append(pattern[len(prefix)])
    return prefix


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_the_batch_is_the_shortest_prefix_that_fills_it(data: st.DataObject) -> None:
    num_prompts = data.draw(st.integers(1, 6), "num_prompts")
    limits = {
        "num_prompts": num_prompts,
        "max_open_prompts": data.draw(st.integers(1, 8), "max_open_prompts"),
        "max_draws": data.draw(st.integers(num_prompts, 25), "max_draws"),
    }
    pattern = data.draw(st.lists(st.booleans(), min_size=25, max_size=25), "kept")
    prefix = shortest_prefix(pattern, limits)
    draws = list(range(FIRST_DRAW, FIRST_DRAW + len(prefix)))
    for seed in data.draw(st.lists(st.integers(0, 10**6), min_size=2, max_size=2), "timing"):
        case = Case(pattern, limits, seed)
        groups, kept_groups = case.run()
        assert [group.draw_index for group in groups] == draws
        assert [group.draw_index for group in kept_groups] == [d for d, kept in zip(draws, prefix, strict=True) if kept]
        for group in groups:
            assert group.prompt == prompt_of(group.draw_index)
            assert [(r.draw_index, r.sample_index) for r in group.rollouts] == [(group.draw_index, i) for i in (0, 1)]
            assert [r.text for r in group.rollouts] == [f"{group.draw_index}/{i}" for i in (0, 1)]
        assert case.most_open <= min(limits["max_open_prompts"], num_prompts)
        assert sorted(request.draw_index for request in case.engine.added) == sorted(draws * NUM_SAMPLES)
        assert case.grader.batches == [NUM_SAMPLES] * len(draws)  # each group by itself
        assert case.undecided == set()
        left = {request.draw_index for request in case.engine.run_ahead}
        assert left == {draw for draw in case.seen_ahead if draw not in draws}  # opened draws end theirs


@pytest.mark.parametrize(("max_open_prompts", "most_open"), [(4, 4), (9, 6)])
def test_as_many_are_open_as_may_be(max_open_prompts: int, most_open: int) -> None:
    """The bound is no more than a bound: where all are kept, all of a batch are open at once."""
    case = Case([True] * 10, {"num_prompts": 6, "max_open_prompts": max_open_prompts, "max_draws": 10}, seed=0)
    case.run()
    assert case.most_open == most_open


def test_waiting_for_graders_while_nothing_decodes_is_counted_apart() -> None:
    timer = StageTimer()
    case = Case([True] * 3, SMALL, seed=0)
    case.grader.delays = (10**9,)  # done when it is waited for, not before
    case.run(timer)
    seconds = timer.take()
    assert set(seconds) == {"rollout", "grading"}
    assert all(value > 0 for value in seconds.values())


def test_an_error_of_a_filter_ends_the_step() -> None:
    case = Case([True] * 3, SMALL, seed=0)

    def keeps(group: RolloutGroup) -> bool:
        raise ValueError("algorithm.filters: mine must return a bool")

    case.keeps = keeps  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="mine must return"):
        case.run()
