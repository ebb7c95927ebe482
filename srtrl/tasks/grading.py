"""Grading while the decoder runs: the verifier and the rewards of each completion.

`submit` returns at once: `isolated` functions (math-verify, say) start in a worker process, and coroutines (of judges,
say) in an event loop, while the decoder continues with other samples. `collect` waits for them and runs the rest in the
training process. A sample that hangs or
crashes is retried once in a process that has graded nothing else; a second failure costs that sample only: reward 0,
its outcome, and a line in the log.
"""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import chain
from operator import itemgetter
from typing import Any, Self

from srtrl.ranks.processes import Ranks
from srtrl.recipe.schema import GradingSection, RewardSection
from srtrl.resolve import Caught, describe_error
from srtrl.tasks.base import Task
from srtrl.tasks.event_loop import event_loop
from srtrl.tasks.final_answer import as_judged
from srtrl.tasks.reward_input import RewardInput
from srtrl.tasks.reward_terms import Reward, check_importable, is_isolated, resolve_rewards
from srtrl.tasks.worker import Failure, Graded, IsolatedFunctions, check_reward
from srtrl.tasks.worker_pool import WALL_SECONDS_PER_CPU_SECOND, Worker, WorkerPool
from srtrl.types import (
    UNVERIFIED_OUTCOMES,
    VERIFIED_OUTCOMES,
    FinishReason,
    Grade,
    GradeOutcome,
    Prompt,
    RolloutGroup,
)

logger = logging.getLogger(__name__)

MAX_AWAITED = 64
"""Maximum number of coroutine rewards at the same time."""


@dataclass(kw_only=True, slots=True, frozen=True)
class GradeTicket:
    """A completion that is being graded."""

    sample: RewardInput
    """Its `correct` is None as long as an isolated verifier runs."""
    verdict: "Future[Graded | Failure]"
    """Verdict, isolated and awaited rewards; done at once where there is nothing to wait for."""


class Grader:
    """Grades completions with a task's verifier and the recipe's rewards.

    Use it as a context manager: worker processes start for the first samples, and leaving it ends them, also in the
    middle of a job. There are none if neither the verifier nor a reward is `isolated`. Coroutine rewards run in an
    event loop, `MAX_AWAITED` at a time.

    Args:
        task: Whose verifier decides what is correct; without one, nothing is correct or wrong.
        rewards: The recipe's rewards; the sample's reward is their weighted sum.
        grading: Number of workers and their CPU limit.
        max_new_tokens: `RewardInput.max_new_tokens`.

    Raises:
        ValueError: as `resolve_rewards`, or a verifier that workers could not import.
    """

    def __init__(
        self, task: Task, rewards: Sequence[RewardSection], grading: GradingSection, max_new_tokens: int
    ) -> None:
        self._rewards = resolve_rewards(rewards)
        self._max_new_tokens = max_new_tokens
        self._logged: set[str] = set()
        """Reasons of failures that have been logged."""
        self._verifier = task.verifier
        self.outcomes = VERIFIED_OUTCOMES if task.verifier is not None else UNVERIFIED_OUTCOMES
        """The outcomes that a grading can have."""
        self._verifier_isolated = is_isolated(task.verifier)
        if self._verifier_isolated:
            check_importable("the task's verifier", task.verifier)
        self._isolated = IsolatedFunctions(
            verifier=self._verifier if self._verifier_isolated else None,
            rewards=tuple((reward.name, reward.function) for reward in self._rewards if reward.isolated),
        )
        self._grading = grading
        self._pool: WorkerPool | None = None
        self._awaited = [reward for reward in self._rewards if reward.awaited]
        self._stack = ExitStack()
        named = [(section.name, reward) for section, reward in zip(rewards, self._rewards, strict=True)]
        self.serial_rewards = [
            name for name, it in named if ":" in name and not (it.isolated or it.batched or it.awaited)
        ]
        """Rewards of the user that are called for one sample after the other."""

    def __enter__(self) -> Self:
        if self._isolated.modules:
            limits = self._grading
            workers = [Worker(self._isolated, limits.timeout_seconds) for _ in range(limits.num_workers)]
            self._pool = WorkerPool(workers, "srtrl-grading")
            self._stack.callback(self._pool.close)
        if self._awaited:
            self._loop, self._limit = self._stack.enter_context(event_loop()), asyncio.Semaphore(MAX_AWAITED)
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def submit(
        self,
        prompt: Prompt,
        text: str,
        finish_reason: FinishReason,
        num_tokens: int,
        *,
        environment_reward: float = 0.0,
        num_turns: int = 1,
    ) -> GradeTicket:
        """Start grading one completion; isolated functions run while the caller continues.

        Args:
            prompt: The problem.
            text: The completion without special tokens.
            finish_reason: Why it ended.
            num_tokens: Its length, the end token included.
            environment_reward: The sum of the rewards of the sample's environment.
            num_turns: Turns of the policy.
        """
        sample = RewardInput(
            prompt=prompt,
            text=text,
            correct=None,
            finish_reason=finish_reason,
            num_tokens=num_tokens,
            max_new_tokens=self._max_new_tokens,
            environment_reward=environment_reward,
            num_turns=num_turns,
        )
        if self._verifier is not None and not self._verifier_isolated:
            with Caught() as caught:
                sample = replace(sample, correct=bool(self._verifier(as_judged(prompt, text), prompt.answer)))
            if caught.error is not None:
                failure = Failure(outcome="error", detail=f"verifier: {describe_error(caught.error)}")
                return GradeTicket(sample=sample, verdict=_done(failure))
        assert self._pool or not self._isolated.modules, "the grader is used outside of its context"
        verdict = self._pool.submit(sample) if self._pool else _done(Graded(correct=sample.correct))
        if self._awaited:
            verdict = asyncio.run_coroutine_threadsafe(self._await_rewards(sample, verdict), self._loop)
        return GradeTicket(sample=sample, verdict=verdict)

    async def _await_rewards(self, sample: RewardInput, verdict: "Future[Graded | Failure]") -> Graded | Failure:
        """The verdict with the coroutine rewards."""
        graded = await asyncio.wrap_future(verdict)
        if isinstance(graded, Failure):
            return graded
        sample, parts = replace(sample, correct=graded.correct), dict(graded.parts)
        seconds = WALL_SECONDS_PER_CPU_SECOND * self._grading.timeout_seconds
        async with self._limit:
            for reward in self._awaited:
                with Caught() as caught:
                    async with asyncio.timeout(seconds) as limit:
                        parts[reward.name] = check_reward(reward.name, await reward.function(sample))
                if caught.error is not None:
                    late = f"no answer within {seconds:g} seconds of wall-clock time" if limit.expired() else ""
                    detail = f"reward `{reward.name}`: {late or describe_error(caught.error)}"
                    return Failure(outcome="timeout" if late else "error", detail=detail)
        return replace(graded, parts=parts)

    def is_done(self, ticket: GradeTicket) -> bool:
        """Whether `collect` would return this grade without waiting."""
        return ticket.verdict.done()

    def wait_any(
        self, tickets: Sequence[GradeTicket], others: Sequence[Future[Any]] = (), timeout: float | None = None
    ) -> None:
        """Wait until one more of `tickets` or `others` is done, or for `timeout` seconds; at once where all are."""
        verdicts = [ticket.verdict for ticket in tickets]
        wait([future for future in (*verdicts, *others) if not future.done()], timeout, return_when=FIRST_COMPLETED)

    def collect(self, tickets: Sequence[GradeTicket]) -> list[Grade]:
        """Wait for the grades of `tickets`, in their order; batched rewards see all of them at once.

        The first sample of each reason why samples cannot be graded is logged.

        Raises:
            RuntimeError: a worker process cannot start.
        """
        verdicts = [ticket.verdict.result() for ticket in tickets]
        samples = [
            replace(ticket.sample, correct=verdict.correct) if isinstance(verdict, Graded) else ticket.sample
            for ticket, verdict in zip(tickets, verdicts, strict=True)
        ]
        for reward in self._rewards:
            if not (reward.isolated or reward.awaited):
                _apply(reward, samples, verdicts)
        grades = [self._grade(verdict) for verdict in verdicts]
        for ticket, grade in zip(tickets, grades, strict=True):
            if grade.detail and grade.detail not in self._logged:
                self._logged.add(grade.detail)
                prompt_id = ticket.sample.prompt.prompt_id
                logger.warning("prompt %s: grading ended in %s, reward 0: %s", prompt_id, grade.outcome, grade.detail)
        return grades

    def collect_on_ranks(
        self, tickets: Sequence[GradeTicket], keys: Sequence[tuple[int, int]], ranks: Ranks
    ) -> list[Grade]:
        """As `collect`, where other ranks have other tickets of the same rollout; called on all ranks.

        Where a reward is `batched`, rank 0 grades all of them in the order of their `keys` (draw and sample): the
        reward sees what it would see with one rank, and is called once.
        """
        if not any(reward.batched for reward in self._rewards):
            with ranks.synchronized("grading"):
                return self.collect(tickets)
        own = [(key, ticket.sample, ticket.verdict.result()) for key, ticket in zip(keys, tickets, strict=True)]
        rows = sorted(chain(*ranks.gather(own, "samples for a batched reward")), key=itemgetter(0))
        everything = [GradeTicket(sample=sample, verdict=_done(verdict)) for _, sample, verdict in rows]
        grades = ranks.on_main(lambda: self.collect(everything), "a batched reward")
        grade_of = {key: grade for (key, *_), grade in zip(rows, grades, strict=True)}
        return [grade_of[key] for key in keys]

    def try_rewards(self, prompt: Prompt, num_samples: int = 1) -> None:
        """Grade the reference answer of a prompt, as a group of samples, before anything is decoded.

        Raises:
            ValueError: the verifier or a reward raises on it.
        """
        text = prompt.answer or "an answer"
        grade, *_ = self.collect([self.submit(prompt, text, "stop", len(text)) for _ in range(num_samples)])
        if grade.outcome == "error":
            raise ValueError(
                f"rewards: tried on prompt {prompt.prompt_id} with the response {text[:80]!r}, before the run began: "
                f"{grade.detail}"
            )

    def _grade(self, verdict: Graded | Failure) -> Grade:
        if isinstance(verdict, Failure):
            parts = {reward.name: 0.0 for reward in self._rewards}
            return Grade(reward=0.0, parts=parts, outcome=verdict.outcome, detail=verdict.detail)
        parts = {reward.name: verdict.parts[reward.name] for reward in self._rewards}
        total = sum(reward.weight * parts[reward.name] for reward in self._rewards)
        outcome: GradeOutcome = "correct" if verdict.correct else "wrong"
        return Grade(reward=total, parts=parts, outcome=outcome if self._verifier is not None else "graded")


def check_not_all_failed(groups: Sequence[RolloutGroup], where: str) -> None:
    """Stop where no sample of a step could be graded, all for one reason: nothing would ever be learned.

    Raises:
        ValueError: all outcomes are `error` or `crash`, with the same detail; it begins with `where` ("step 3").
    """
    grades = [rollout.grade for group in groups for rollout in group.rollouts]
    reasons = {(grade.outcome, grade.detail) for grade in grades}
    if len(reasons) == 1 and grades[0].outcome in ("error", "crash"):
        raise ValueError(
            f"{where}: none of the {len(grades)} samples could be graded, all for the same reason "
            f"({grades[0].outcome}): {grades[0].detail}"
        )


def _done(verdict: Graded | Failure) -> "Future[Graded | Failure]":
    future: Future[Graded | Failure] = Future()
    future.set_result(verdict)
    return future


def _apply(reward: Reward, samples: Sequence[RewardInput], verdicts: list[Graded | Failure]) -> None:
    """Add one in-process reward to the verdicts; where it raises, the samples concerned become failures."""
    graded = [index for index, verdict in enumerate(verdicts) if isinstance(verdict, Graded)]
    for indices in [range(len(samples))] if reward.batched else [range(index, index + 1) for index in graded]:
        with Caught() as caught:
            values = _values(reward, [samples[index] for index in indices])
        for index in indices:
            verdict = verdicts[index]
            if caught.error is not None and isinstance(verdict, Graded):
                detail = f"reward `{reward.name}`: {describe_error(caught.error)}"
                verdicts[index] = Failure(outcome="error", detail=detail)
            elif isinstance(verdict, Graded):
                verdicts[index] = replace(verdict, parts=verdict.parts | {reward.name: values[index - indices.start]})


def _values(reward: Reward, samples: Sequence[RewardInput]) -> list[float]:
    """The values of one call of a reward; ValueError unless they are finite numbers, one for each sample."""
    given = reward.function(samples) if reward.batched else [reward.function(samples[0])]
    if isinstance(given, Mapping | str | bytes):
        raise ValueError(f"a batched reward must return a list of numbers, it returned {given!r:.100}")
    values = [check_reward(reward.name, value) for value in given]
    if len(values) != len(samples):
        raise ValueError(f"it returned {len(values)} values for {len(samples)} samples")
    return values
