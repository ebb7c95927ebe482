"""A dynamic batch is the shortest prefix that suffices, whatever finishes first; where texts end, and stages' times."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
from engine_cases import make_response
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from srtrl.drafters.base import DrafterBase
from srtrl.engine.engine import Engine
from srtrl.engine.no_run_ahead import NoRunAhead
from srtrl.metrics import StageTimer
from srtrl.rollout.collect import Collector, collect_rollouts
from srtrl.rollout.dynamic_sampling import DrawsUntilFull
from srtrl.rollout.one_turn import OneTurn, response_text
from srtrl.tasks.grading import Grader
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import Completion, FinishReason, Grade, Prompt, Purpose, Request, RolloutGroup, SamplingParams
from srtrl.warm_start.training import train_tokenizer


class FakeEngine:
    """Each step finishes some of the samples; the tokens are the numbers of draw and sample, and an end token."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.live: list[Request] = []
        self.run_ahead = NoRunAhead()
        self.early: list[Request] = []
        self.added: list[Request] = []
        self.drafter = DrafterBase()
        self.num_free_slots = 0

    @property
    def has_work(self) -> bool:
        return bool(self.live)

    def add(self, request: Request) -> None:
        assert all(one.rng_key != request.rng_key for one in self.added)
        self.added.append(request)
        self.live.append(request)
        self.early = [one for one in self.early if one.rng_key != request.rng_key]

    def step_run_aheads(self) -> bool:
        return False

    @contextmanager
    def rollout(self, purpose: Purpose) -> Iterator[None]:
        assert purpose == "train"
        yield
        assert not self.live

    def step(self) -> list[Completion]:
        self.random.shuffle(self.live)
        return [completion_of(self.live.pop()) for _ in range(self.random.randrange(min(4, len(self.live)) + 1))]


def completion_of(request: Request) -> Completion:
    """Completion by the fake engine."""
    response = make_response([request.draw_index, request.sample_index, 0], [-0.5] * 3, version=3)
    return Completion(request=request, response=response)


@dataclass
class FakeGrader:
    """Grades take a random number of questions, or a wait; a ticket is a place in `submitted`."""

    reward: Callable[[Prompt, str], float]
    random: random.Random
    delays: Sequence[int] = (0, 0, 1, 3, 20, 10**9)
    pending: dict[int, int] = field(default_factory=dict)
    """Ticket -> questions until it is done."""
    submitted: list[tuple[Prompt, str, FinishReason, int]] = field(default_factory=list)
    batches: list[int] = field(default_factory=list)
    """Numbers of tickets that were collected at once."""

    def submit(self, sample: RewardInput) -> int:
        self.submitted.append((sample.prompt, sample.text, sample.finish_reason, sample.num_tokens))
        self.pending[len(self.submitted) - 1] = self.random.choice(self.delays)
        return len(self.submitted) - 1

    def is_done(self, ticket: int) -> bool:
        self.pending[ticket] -= 1
        return self.pending[ticket] < 0

    def wait_any(self, tickets: Sequence[int], *_: object) -> None:
        waiting = [ticket for ticket in tickets if self.pending[ticket] >= 0]
        if waiting:
            self.pending[self.random.choice(waiting)] = -1

    def collect_on_ranks(self, tickets: Sequence[int], keys: Sequence[tuple[int, int]], *_: object) -> list[Grade]:
        assert len(tickets) == len(keys)
        return self.collect(tickets)

    def collect(self, tickets: Sequence[int]) -> list[Grade]:
        assert all(self.pending[ticket] < 0 for ticket in tickets), "collect would wait while samples decode"
        self.batches.append(len(tickets))
        return [Grade(reward=self.reward(*self.submitted[t][:2]), parts={}, outcome="correct") for t in tickets]


class FakeTokenizer:
    """Spells draw and sample, then more than is to be graded."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        assert skip_special_tokens
        return f"{token_ids[0]}/{token_ids[1]}STOP and more"

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return ["" for _ in ids]


def prompt_of(draw: int) -> Prompt:
    return Prompt(prompt_id=str(draw), text="", token_ids=(draw,), answer="")


def make_collector(grader: FakeGrader, **options: Any) -> Collector:
    """Two samples per draw, on seed 11."""
    return Collector(
        cast(Grader, grader),
        OneTurn(cast(PreTrainedTokenizerBase, FakeTokenizer())),
        num_samples=2,
        sampling=SAMPLING,
        seed=11,
        purpose="train",
        policy_version=3,
        **options,
    )


SAMPLING = SamplingParams(max_new_tokens=4, stop_strings=("STOP",))


def sample_number(prompt: Prompt, text: str) -> float:
    return float(text.rpartition("/")[-1])


COLLECTOR = make_collector(FakeGrader(sample_number, random.Random(0)))
"""For the requests that it makes."""


def test_response_text_is_cut_at_the_first_stop_string() -> None:
    tokenizer: PreTrainedTokenizerBase = train_tokenizer([], 257)
    token_ids = [*tokenizer.encode("one END two STOP three"), 0]
    assert response_text(tokenizer, token_ids, ()) == "one END two STOP three"  # without the end token
    assert response_text(tokenizer, token_ids, ("STOP", "END")) == "one "
    assert response_text(tokenizer, token_ids, ("absent",)) == "one END two STOP three"


def test_a_stage_inside_another_pauses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 2.0, 5.0, 11.0, 20.0, 21.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    timer = StageTimer()
    with timer.stage("rollout"), timer.stage("grading"):  # 1 to 2 and 5 to 11; 2 to 5
        pass
    with pytest.raises(KeyError), timer.stage("grading"):  # 20 to 21
        raise KeyError
    assert timer.take() == {"rollout": 7.0, "grading": 4.0}
    assert timer.take() == {}


# --- Dynamic sampling ------------------------------------------------------------------------------------------------

NUM_SAMPLES = 2
FIRST_DRAW = 5


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
        self.max_open = 0
        self.coming: list[int] = []

    def opened(self, draws: range) -> None:
        """Called as draws are opened: what is open now?"""
        self.undecided |= set(draws)
        self.max_open = max(self.max_open, len(self.undecided))
        self.coming.append(draws.stop)
        self.engine.early += COLLECTOR.requests([(draws.stop, prompt_of(draws.stop))])

    def keeps(self, group: RolloutGroup) -> bool:
        self.undecided.remove(group.draw_index)
        return group.rollouts[0].grade.reward > 0

    def run(self) -> tuple[list[RolloutGroup], list[RolloutGroup]]:
        collector = make_collector(self.grader)
        draws = DrawsUntilFull(prompt_of, first_draw=FIRST_DRAW, **self.limits, keeps=self.keeps, on_open=self.opened)
        groups = collect_rollouts(cast(Engine, self.engine), collector, draws)
        return groups, draws.kept_groups(groups)


def shortest_prefix(pattern: Sequence[bool], limits: dict[str, int]) -> list[bool]:
    """The definition, without any engine: go through the draws one by one until the batch is full."""
    prefix: list[bool] = []
    while sum(prefix) < limits["num_prompts"] and len(prefix) < limits["max_draws"]:
        prefix.append(pattern[len(prefix)])
    return prefix


@settings(deadline=None)  # the machine may be busy
@given(data=st.data())
def test_the_batch_is_the_shortest_prefix_that_fills_it(data: st.DataObject) -> None:
    num_prompts = data.draw(st.integers(1, 6), "num_prompts")
    limits = {"num_prompts": num_prompts, "max_draws": data.draw(st.integers(num_prompts, 25), "max_draws")}
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
        assert case.max_open == num_prompts  # all of a batch at once
        assert sorted(request.draw_index for request in case.engine.added) == sorted(draws * NUM_SAMPLES)
        assert case.grader.batches == [NUM_SAMPLES] * len(draws)  # each group by itself
        assert case.undecided == set()
        left = {request.draw_index for request in case.engine.early}
        assert left == {draw for draw in case.coming if draw not in draws}  # opened draws end theirs
