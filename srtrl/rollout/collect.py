"""Groups of graded rollouts from the engine: a completion goes to the graders while the others still decode.

What comes back depends on the policy, the seed and the data order alone: groups are in data order and samples sorted,
never in the order in which they finished.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

from srtrl import ranks
from srtrl.metrics import StageTimer
from srtrl.model.noise import make_rng_key
from srtrl.rollout.one_rank import OneRank
from srtrl.rollout.one_turn import Answer, OneTurn
from srtrl.tasks.reward_input import RewardInput
from srtrl.types import (
    Completion,
    Conversation,
    Prompt,
    Purpose,
    Request,
    Response,
    Rollout,
    RolloutGroup,
    SampleKey,
    SamplingParams,
)

if TYPE_CHECKING:
    from srtrl.engine.engine import Engine
    from srtrl.tasks.grading import Grader, GradeTicket

POLL_SECONDS = 0.05
"""Longest wait for environments, which have time limits."""
OnProgress = Callable[[int, int], None]
"""Called after each completion with the number of completions so far and of those that are requested; with dynamic
sampling the latter may grow."""


class Draws(ABC):
    """The draws of one rollout: which samples are decoded, and when."""

    undecided: Sequence[int] = ()
    """Open draws whose grades decide what else is decoded."""
    num_opened = 0
    """Draws whose samples are requested, as far as this rank knows."""

    def ended(self, collector: Collector, completion: Completion) -> None:
        """A sample of this rank has ended; the finish reason is the decoder's."""
        num_done = collector.ranks.add("finished") + 1
        collector.on_progress(num_done, max(num_done, self.num_opened * collector.num_samples))

    @abstractmethod
    def requests(self, engine: Engine, collector: Collector) -> Iterator[Request]:
        """Samples to add before the next decode step; each is added before the next is requested."""

    @abstractmethod
    def are_over(self, collector: Collector) -> bool:
        """Whether no rank has anything left to decode or to decide."""

    def complete(self, collector: Collector) -> Sequence[int]:
        """After all are decoded: draws of which `rollouts` takes all samples, when they are graded."""
        return ()

    @abstractmethod
    def rollouts(self, collector: Collector) -> list[Rollout]:
        """This rank's rollouts, after all are decoded."""


def collect_rollouts(engine: Engine, collector: Collector, draws: Draws) -> list[RolloutGroup]:
    """Decode and grade all samples of some draws, on all ranks.

    If this rank has nothing to decode it waits for its tools and its grades, then for the other ranks; meanwhile
    run-aheads continue.

    Args:
        engine: Decodes; its policy is not changed.
        collector: Makes the requests and takes the completions; no draw of it is open.
        draws: `FixedDraws`, or with dynamic sampling `DrawsUntilFull`.

    Returns:
        One group per draw, sorted by draw index; rollouts sorted by sample index.

    Raises:
        ValueError: A request that the engine can never serve (see `Engine.check_request`).
    """
    with collector.timer.stage("rollout"), collector.ranks.rollout(), engine.rollout(collector.purpose):
        while True:
            for request in draws.requests(engine, collector):
                engine.add(request)
            if engine.has_work:
                started = time.monotonic()
                ended = collector.receive(engine, engine.step())
                collector.ranks.report_progress(time.monotonic() - started)
            elif draws.undecided or collector.turns.futures():
                ended = collector.wait(engine, draws.undecided)
            elif draws.are_over(collector):
                collector.run_ahead(engine, draws.complete(collector))
                break
            elif collector.ranks.wait_for_others(sleeps=not engine.step_run_aheads()):
                continue
            else:
                break
            for completion in ended:
                draws.ended(collector, completion)
    with collector.timer.stage("grading"):
        return collector.exchange(engine, draws.rollouts(collector))


class FixedDraws(Draws):
    """Draws that are all opened at once."""

    def __init__(self, draws: Sequence[tuple[int, Prompt]]) -> None:
        """Draws that no rollout has opened; all ranks make the same.

        Args:
            draws: `(draw_index, prompt)`, draw indices distinct; the same prompt may be drawn twice. In training a
                draw's index is its place in the data order of the run.
        """
        self.draws = sorted(draws, key=lambda draw: draw[0])
        self.num_opened = len(self.draws)
        self._are_open = False

    def requests(self, engine: Engine, collector: Collector) -> Iterator[Request]:
        """See `Draws`."""
        if not self._are_open:
            self._are_open = True
            opened = [request for draw in self.draws for request in collector.open(*draw)]
            whole = [
                Completion(request=request, response=request.prefix)
                for request in opened
                if request.is_whole and request.prefix is not None
            ][ranks.index() :: ranks.count()]
            engine.drafter.learn(whole)
            for completion in collector.receive(engine, whole):
                self.ended(collector, completion)
            yield from collector.ranks.deal(engine, [request for request in opened if not request.is_whole])
        yield from collector.ranks.claim(engine.num_free_slots)

    def are_over(self, collector: Collector) -> bool:
        """See `Draws`."""
        return collector.ranks.read("finished") == len(self.draws) * collector.num_samples

    def complete(self, collector: Collector) -> Sequence[int]:
        """See `Draws`."""
        return [draw_index for draw_index, _ in self.draws]

    def rollouts(self, collector: Collector) -> list[Rollout]:
        """See `Draws`; `batched` rewards see all samples at once."""
        return collector.take(self.complete(collector))


@dataclass(slots=True)
class Collector:
    """Settings of a rollout, and its samples between request and grade; all ranks make the same in the same order."""

    grader: Grader
    """Grades beside the decoder; `batched` rewards see all samples that are taken at once."""
    turns: OneTurn
    """Whether and how a sample continues where the decoder gives it back."""
    _: KW_ONLY
    num_samples: int
    """Samples of each draw."""
    sampling: SamplingParams
    """Temperature, limits and ends of each sample."""
    seed: int
    """The run's seed; with `purpose`, draw and sample index it makes each sample's RNG key."""
    purpose: Purpose
    """`train` or `eval`: they never share noise."""
    policy_version: int
    """Number of policy updates before the rollout."""
    on_progress: OnProgress = lambda *_: None
    timer: StageTimer = field(default_factory=StageTimer)
    """Counts decoding as `rollout`, and waiting while no sample decodes as `grading` or `tools`."""
    ranks: OneRank = field(default_factory=OneRank)
    """This process's part of the rollout; the counter `finished` counts samples."""
    runs_ahead: bool = True
    """Whether run-aheads continue while samples wait for environments and graders."""
    prefixes: Mapping[SampleKey, Response] = field(default_factory=dict)
    """Responses from which samples continue, because an earlier rollout has sampled them."""
    _draws: dict[int, _OpenDraw] = field(default_factory=dict, init=False)

    def requests(self, draws: Sequence[tuple[int, Prompt]]) -> list[Request]:
        """One request per sample, sorted by (draw, sample); the engine chooses its own admission order."""
        return [
            Request(
                prompt_id=prompt.prompt_id,
                prompt_token_ids=prompt.token_ids,
                draw_index=draw_index,
                sample_index=sample_index,
                rng_key=make_rng_key(self.seed, self.purpose, draw_index, sample_index),
                sampling=self.sampling,
                purpose=self.purpose,
                prefix=self.prefixes.get((draw_index, sample_index)),
                has_turns=self.turns.has_turns,
            )
            for draw_index, prompt in sorted(draws, key=lambda draw: draw[0])
            for sample_index in range(self.num_samples)
        ]

    def open(self, draw_index: int, prompt: Prompt) -> list[Request]:
        """The samples of one more draw, for the engine to decode."""
        assert draw_index not in self._draws, f"draw {draw_index} is opened twice"
        self._draws[draw_index] = _OpenDraw(prompt)
        return self.requests([(draw_index, prompt)])

    def receive(self, engine: Engine, completions: Sequence[Completion]) -> list[Completion]:
        """Turns of samples of open draws have ended; continue the samples that environments have answered by now.

        Returns:
            The samples that have ended; they are with the graders.
        """
        for completion in completions:
            self.turns.submit_turn(completion, self._draws[completion.request.draw_index].prompt)
        ended = []
        for answer in self.turns.take_answers():
            if answer.extension:
                engine.extend(answer.completion, answer.extension)
                continue
            if answer.completion.request.has_turns:  # else the engine has it no longer
                engine.end(answer.completion)
            self._grade(answer)
            ended.append(answer.completion)
        return ended

    def _grade(self, answer: Answer) -> None:
        """A sample has ended: grade what the policy sampled.

        Its finish reason is `length` if an observation did not fit.
        """
        request, response, conversation = answer.completion.request, answer.completion.response, answer.conversation
        if conversation is not None and conversation.stop_reason == "observation":
            response = replace(response, finish_reason="length")
        assert response.finish_reason is not None
        draw = self._draws[request.draw_index]
        assert request.sample_index not in draw.samples, f"the engine finished a sample twice: {request}"
        token_ids = response.token_ids[response.sampled].tolist()
        sample = RewardInput(
            prompt=draw.prompt,
            text=conversation.policy_text if conversation else answer.text,
            finish_reason=response.finish_reason,
            num_tokens=len(token_ids),
            max_new_tokens=request.sampling.max_new_tokens,
            token_ids=tuple(token_ids),
            turns=conversation.turns if conversation else (),
            texts_of=self.turns.texts_of,
        )
        ticket = self.grader.submit(sample)
        draw.samples[request.sample_index] = _Sample(ticket, response, answer.text, conversation)

    def is_graded(self, draw_index: int) -> bool:
        """Whether all samples of an open draw are decoded and graded: `take` would not wait."""
        samples = self._draws[draw_index].samples
        return len(samples) == self.num_samples and all(self.grader.is_done(done.ticket) for done in samples.values())

    def wait(self, engine: Engine, draw_indices: Sequence[int]) -> list[Completion]:
        """Wait until one more sample of these draws is graded, or an environment answers or is late.

        Where run-aheads may continue, one decode step of them takes the place of the wait.

        Returns:
            The samples that have ended, as `receive`.
        """
        self.ranks.report_progress()
        futures = self.turns.futures()
        with self.timer.stage("tools" if futures else "grading"):
            seconds = 0.0 if self.runs_ahead and engine.step_run_aheads() else POLL_SECONDS if futures else None
            self.grader.wait_any(self._tickets(draw_indices), futures, seconds)
        return self.receive(engine, [])

    def run_ahead(self, engine: Engine, draw_indices: Sequence[int]) -> None:
        """Let run-aheads continue, if they may, until these draws are graded or no run-ahead has work."""
        tickets = self._tickets(draw_indices)
        with self.timer.stage("grading"):
            while self.runs_ahead and not all(map(self.grader.is_done, tickets)) and engine.step_run_aheads():
                self.grader.wait_any(tickets, timeout=0.0)

    def _tickets(self, draw_indices: Sequence[int]) -> list[GradeTicket]:
        """Tickets of this rank's ended samples of some open draws."""
        return [sample.ticket for draw_index in draw_indices for sample in self._draws[draw_index].samples.values()]

    def take(self, draw_indices: Sequence[int], *, are_shared: bool = True) -> list[Rollout]:
        """This rank's rollouts of decoded draws, in the given order; waits for their grades, and forgets the draws.

        `are_shared`: other ranks have samples of these draws too; called on all of them.
        """
        draws = {draw_index: self._draws.pop(draw_index) for draw_index in draw_indices}
        samples = {
            (number, index): sample for number, draw in draws.items() for index, sample in sorted(draw.samples.items())
        }
        tickets = [sample.ticket for sample in samples.values()]
        if are_shared:
            grades = self.grader.collect_on_ranks(tickets, list(samples), self.turns.texts_of)
        else:
            grades = self.grader.collect(tickets)
        return [
            Rollout(
                prompt=draws[draw_index].prompt,
                draw_index=draw_index,
                sample_index=sample_index,
                response=sample.response,
                text=sample.text,
                policy_version=self.policy_version,
                grade=grade,
                conversation=sample.conversation,
            )
            for ((draw_index, sample_index), sample), grade in zip(samples.items(), grades, strict=True)
        ]

    def exchange(self, engine: Engine, rollouts: Sequence[Rollout]) -> list[RolloutGroup]:
        """The groups of all ranks, in data order."""
        others = self.ranks.exchange(engine, rollouts, self.requests)
        groups = groupby(sorted([*rollouts, *others], key=data_order), key=lambda rollout: rollout.draw_index)
        return [_group(list(samples), self.num_samples) for _, samples in groups]


class _Sample(NamedTuple):
    """A finished sample whose grade is still to come."""

    ticket: GradeTicket
    response: Response
    text: str
    conversation: Conversation | None


@dataclass(slots=True, frozen=True)
class _OpenDraw:
    prompt: Prompt
    samples: dict[int, _Sample] = field(default_factory=dict)
    """The finished ones, by sample index."""


def data_order(sample: Rollout | Request) -> SampleKey:
    """Sort key: where a sample is in data order."""
    return sample.draw_index, sample.sample_index


def _group(rollouts: list[Rollout], num_samples: int) -> RolloutGroup:
    draw_index, indices = rollouts[0].draw_index, [rollout.sample_index for rollout in rollouts]
    assert indices == list(range(num_samples)), f"draw {draw_index} has the samples {indices}"
    return RolloutGroup(prompt=rollouts[0].prompt, draw_index=draw_index, rollouts=rollouts)
