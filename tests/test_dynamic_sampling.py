"""Dynamic sampling opens exactly the shortest prefix of the draws that fills the batch, whatever finishes first."""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from srtrl.engine.engine import Engine
from srtrl.rollout.collect import Collector, StageTimer
from srtrl.rollout.dynamic_sampling import sample_until_full
from srtrl.rollout.run_ahead import run_ahead_requests
from srtrl.tasks.grading import Grader
from srtrl.types import Completion, FinishReason, Grade, Prompt, Request, RolloutGroup, SamplingParams

NUM_SAMPLES = 2
FIRST_DRAW = 5
SMALL = {"num_prompts": 2, "max_open_prompts": 2, "max_draws": 2}


class FakeEngine:
    """Each step finishes some of the samples, in a random order; the token is the draw's number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.live: list[Request] = []
        self.run_ahead: list[Request] = []
        self.added: list[Request] = []

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: Request) -> None:
        if request.is_run_ahead:
            self.run_ahead.append(request)
            return
        assert all(one.rng_key != request.rng_key for one in self.added)
        self.added.append(request)
        self.live.append(request)
        self.run_ahead = [one for one in self.run_ahead if one.rng_key != request.rng_key]

    def generate(
        self, requests: Iterable[Request], *, run_ahead: Iterable[Request] = (), before_step: Callable[[], None]
    ) -> Iterator[Completion]:
        assert not list(requests)
        assert not list(run_ahead)
        while True:
            before_step()
            if not self.live:
                return
            self.random.shuffle(self.live)
            for _ in range(self.random.randrange(min(4, len(self.live)) + 1)):
                request = self.live.pop()
                yield Completion(
                    request=request,
                    token_ids=[request.draw_index],
                    rollout_logprobs=[-0.5],
                    finish_reason="stop",
                    policy_version=3,
                )


@dataclass
class FakeGrader:
    """Grades take a random number of questions or waits; the reward is that of the draw."""

    random: random.Random
    rewards: dict[str, float]
    delays: Sequence[int] = (0, 0, 1, 3, 20)
    pending: dict[int, int] = field(default_factory=dict)
    """Ticket -> questions until it is done."""
    tickets: list[str] = field(default_factory=list)
    num_batches: int = 0

    def submit(self, prompt: Prompt, text: str, finish_reason: FinishReason, num_tokens: int) -> int:
        self.tickets.append(prompt.prompt_id)
        self.pending[len(self.tickets) - 1] = self.random.choice(self.delays)
        return len(self.tickets) - 1

    def is_done(self, ticket: int) -> bool:
        self.pending[ticket] -= 1
        return self.pending[ticket] < 0

    def wait_any(self, tickets: Sequence[int]) -> None:
        waiting = [ticket for ticket in tickets if self.pending[ticket] >= 0]
        if waiting:
            self.pending[self.random.choice(waiting)] = -1

    def collect(self, tickets: Sequence[int]) -> list[Grade]:
        assert all(self.pending[ticket] < 0 for ticket in tickets), "collect would wait while samples decode"
        assert len(tickets) == NUM_SAMPLES
        self.num_batches += 1
        return [Grade(reward=self.rewards[self.tickets[t]], parts={}, outcome="wrong") for t in tickets]


class FakeTokenizer:
    """The text is the token's number."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        return str(token_ids[0])


def prompt_of(draw: int) -> Prompt:
    return Prompt(prompt_id=str(draw), text="", token_ids=(draw,), answer="")


class Case:
    """One batch over fakes; `pattern` says which draws the filters keep, from FIRST_DRAW on."""

    def __init__(self, pattern: Sequence[bool], limits: dict[str, int], seed: int) -> None:
        self.pattern = pattern
        self.limits = limits
        self.engine = FakeEngine(seed)
        self.grader = FakeGrader(
            random.Random(seed + 1), {str(FIRST_DRAW + i): float(keep) for i, keep in enumerate(pattern)}
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
        return run_ahead_requests(coming, num_samples=NUM_SAMPLES, sampling=SamplingParams(max_new_tokens=4), seed=1)

    def keeps(self, group: RolloutGroup) -> bool:
        self.undecided.remove(group.draw_index)
        return group.rollouts[0].grade.reward > 0

    def run(self, timer: StageTimer | None = None) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        collector = Collector(
            cast(Grader, self.grader),
            cast(PreTrainedTokenizerBase, FakeTokenizer()),
            num_samples=NUM_SAMPLES,
            sampling=SamplingParams(max_new_tokens=4),
            seed=1,
            purpose="train",
            timer=timer or StageTimer(),
        )
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
            assert [r.text for r in group.rollouts] == [str(group.draw_index)] * 2
        assert case.most_open <= min(limits["max_open_prompts"], num_prompts)
        assert sorted(request.draw_index for request in case.engine.added) == sorted(draws * NUM_SAMPLES)
        assert case.grader.num_batches == len(draws)  # each group by itself
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


def test_a_stage_inside_another_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 11.0, 20.0, 21.0, 22.0, 23.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = StageTimer()
    with timer.stage("rollout"), timer.stage("grading"):  # 1 to 2 and 5 to 11; 2 to 5
        pass
    with pytest.raises(KeyError), timer.stage("grading"):  # 20 to 21
        raise KeyError
    assert timer.take() == {"rollout": 7.0, "grading": 4.0}
    assert timer.take() == {}
    with timer.stage("update"), pytest.raises(AssertionError, match="inside stage update"):
        timer.take()


def test_an_error_of_a_filter_ends_the_step() -> None:
    case = Case([True] * 3, SMALL, seed=0)

    def keeps(group: RolloutGroup) -> bool:
        raise ValueError("algorithm.filters: mine must return a bool")

    case.keeps = keeps  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="mine must return"):
        case.run()
