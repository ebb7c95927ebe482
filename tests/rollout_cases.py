"""An engine that finishes samples in a random order, graders that take a random time, and graded groups."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from engine_cases import make_response
from transformers import PreTrainedTokenizerBase

from srtrl.drafters.base import DrafterBase
from srtrl.engine.background import Background
from srtrl.rollout.collect import Collector
from srtrl.rollout.turns import Turns
from srtrl.tasks.grading import Grader
from srtrl.types import (
    Completion,
    Conversation,
    FinishReason,
    Grade,
    GradeOutcome,
    Prompt,
    Purpose,
    Request,
    Rollout,
    RolloutGroup,
    SamplingParams,
)


class FakeEngine:
    """Each step finishes some of the samples; the tokens are the numbers of draw and sample, and an end token."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.live: list[Request] = []
        self.background = Background()
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

    def step_background(self) -> bool:
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
    """What the fake engine gives."""
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
    waits: bool = False
    """Whether `collect` may wait for a grade."""

    def submit(self, prompt: Prompt, text: str, finish_reason: FinishReason, num_tokens: int, **_: object) -> int:
        self.submitted.append((prompt, text, finish_reason, num_tokens))
        self.pending[len(self.submitted) - 1] = self.random.choice(self.delays)
        return len(self.submitted) - 1

    def is_done(self, ticket: int) -> bool:
        self.pending[ticket] -= 1
        return self.pending[ticket] < 0

    def wait_any(self, tickets: Sequence[int], *_: object) -> None:
        waiting = [ticket for ticket in tickets if self.pending[ticket] >= 0]
        if waiting:
            self.pending[self.random.choice(waiting)] = -1

    def collect_on_ranks(self, tickets: Sequence[int], keys: Sequence[tuple[int, int]]) -> list[Grade]:
        assert len(tickets) == len(keys)
        return self.collect(tickets)

    def collect(self, tickets: Sequence[int]) -> list[Grade]:
        is_done = all(self.pending[ticket] < 0 for ticket in tickets)
        assert self.waits or is_done, "collect would wait while samples decode"
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
        Turns(cast(PreTrainedTokenizerBase, FakeTokenizer())),
        num_samples=2,
        sampling=SAMPLING,
        seed=11,
        purpose="train",
        policy_version=3,
        **options,
    )


SAMPLING = SamplingParams(max_new_tokens=4, stop_strings=("STOP",))


def make_group(
    draw_index: int,
    outcomes: Sequence[GradeOutcome],
    *,
    rewards: Sequence[float] = (),
    lengths: Sequence[int] = (),
    cut: Sequence[int] = (),
    texts: Sequence[str] = (),
    conversations: Sequence[Conversation] = (),
) -> RolloutGroup:
    """A graded draw with a sample for each outcome.

    By default rewards are 1 for a correct sample, `lengths` of the responses 1, 2, ..., texts empty; `cut` are the
    samples that reached the maximum length; `conversations` those of samples of several turns.
    """
    prompt = Prompt(prompt_id=str(draw_index), text="p", token_ids=(3, 4), answer="")
    rng = np.random.default_rng(draw_index)
    rollouts = []
    for index, outcome in enumerate(outcomes):
        length = lengths[index] if lengths else index + 1
        reward = rewards[index] if rewards else float(outcome == "correct")
        rollouts.append(
            Rollout(
                prompt=prompt,
                draw_index=draw_index,
                sample_index=index,
                response=make_response(
                    [5] * length, (-rng.random(length)).tolist(), finish_reason="length" if index in cut else "stop"
                ),
                text=texts[index] if texts else "",
                policy_version=0,
                grade=Grade(reward=reward, parts={}, outcome=outcome),
                conversation=conversations[index] if conversations else None,
            )
        )
    return RolloutGroup(prompt=prompt, draw_index=draw_index, rollouts=rollouts)


def graded(grades: Sequence[Grade]) -> RolloutGroup:
    """A group of samples with these grades."""
    group = make_group(0, ["wrong"] * len(grades))
    rollouts = [replace(one, grade=grade) for one, grade in zip(group.rollouts, grades, strict=True)]
    return replace(group, rollouts=rollouts)
